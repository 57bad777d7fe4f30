"""Policies side by side on the same groups: energy, time and cost over those of the default, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeus_flows.core.job import Job
from zeus_flows.experiments.cluster.groups import Arrivals, Group, seed_of
from zeus_flows.experiments.cluster.simulating import GroupSums, simulate
from zeus_flows.experiments.fan_out import FanOut
from zeus_flows.experiments.paper.result import Cell, Chart, ChartKind, Result
from zeus_flows.experiments.replay.replaying import replay_job
from zeus_flows.experiments.replay.traces import Trace

BASELINE = "default"
ALL = "all"  # the workloads together
PIECES = 100  # that the work is shared out in, at most
RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Piece:
    """Some groups, under every policy and with every seed: what a comparison can be shared out by."""

    groups: tuple[Group, ...]
    traces: Mapping[str, Trace]
    jobs: Mapping[str, tuple[Job, ...]]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What a group took under a policy, in the mean over seeds."""

    group: str
    workload: str
    policy: str
    jobs: int
    attempts: float
    energy_j: float
    time_s: float
    cost_j: float
    missed: float
    overlapping: float


@dataclass(frozen=True, slots=True)
class Share:
    """What something is over the default's, and the 95 % interval of that over groups; without one for one group."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """A policy on one workload, or on all of them together.

    Attributes:
        energy_j: Energy of all attempts of all jobs.
        time_s: Their training time.
        energy: That energy over the default's on the same groups.
        time: That time over the default's.
        cost: Their cost by the job's objective over the default's.
        attempts_per_job: Retries included; 1 where every first attempt reached the target.
        missed_percent: Of jobs that never reached the target.
        overlapping_percent: Of jobs that were submitted while an earlier one of their group was under way.
    """

    workload: str
    policy: str
    groups: int
    jobs: int
    energy_j: float
    time_s: float
    energy: Share
    time: Share
    cost: Share
    attempts_per_job: float
    missed_percent: float
    overlapping_percent: float


def compare_groups(
    arrivals: Arrivals,
    traces: Sequence[Trace],
    policies: Sequence[str],
    *,
    seeds: Sequence[int],
    fan_out: FanOut,
    **changes: object,
) -> list[ClusterRow]:
    """Simulate every group under every policy, and return a row for each workload and policy, then for all workloads.

    Args:
        arrivals: The groups.
        traces: What their workloads do.
        policies: Names in `zeus_flows.core.policy.POLICIES`; the default is simulated whether it is among them or not.
        seeds: Of the simulations that each group gets.
        fan_out: Who does the work.
        changes: Fields of `Job`, such as eta or beta.
    """
    names = tuple(dict.fromkeys((BASELINE, *policies)))
    jobs = {t.workload: tuple(replay_job(t, name, **changes) for name in names) for t in traces}
    by_name = {t.workload: t for t in traces}
    done = fan_out(simulated, [Piece(g, by_name, jobs, tuple(seeds)) for g in shares(arrivals.groups, PIECES)])
    return tabulated([outcome for piece in done for outcome in piece], tuple(policies))


def shares(groups: Sequence[Group], most: int) -> list[tuple[Group, ...]]:
    """Return the groups in at most so many shares, in their order, with about as many jobs each."""
    total, done = sum(g.jobs for g in groups), 0
    share, found = list[Group](), list[tuple[Group, ...]]()
    for group in groups:
        share.append(group)
        done += group.jobs
        if done * most >= total * (len(found) + 1):
            found.append(tuple(share))
            share = []
    return [*found, tuple(share)] if share else found


def simulated(piece: Piece) -> list[GroupOutcome]:
    """Simulate some groups; the same wherever that is done."""
    outcomes = []
    for group in piece.groups:
        for job in piece.jobs[group.workload]:
            trace = piece.traces[group.workload]
            of_seeds = [simulate(trace, job, group.submissions(), seed=seed_of(s, group.name)) for s in piece.seeds]
            outcomes.append(_mean(group, job.policy, of_seeds))
    return outcomes


def _mean(group: Group, policy: str, of_seeds: Sequence[GroupSums]) -> GroupOutcome:
    def mean(of: Callable[[GroupSums], float]) -> float:
        return sum(map(of, of_seeds)) / len(of_seeds)

    return GroupOutcome(
        group=group.name,
        workload=group.workload,
        policy=policy,
        jobs=of_seeds[0].jobs,
        attempts=mean(lambda s: s.attempts),
        energy_j=mean(lambda s: s.energy_j),
        time_s=mean(lambda s: s.time_s),
        cost_j=mean(lambda s: s.cost_j),
        missed=mean(lambda s: s.missed),
        overlapping=mean(lambda s: s.overlapping),
    )


def tabulated(outcomes: Sequence[GroupOutcome], policies: Sequence[str]) -> list[ClusterRow]:
    """Return the rows that outcomes come to. Intervals resample the groups of each workload."""
    workloads = list(dict.fromkeys(o.workload for o in outcomes))
    table = {(w, p): [o for o in outcomes if (o.workload, o.policy) == (w, p)] for w in workloads for p in policies}
    table |= {(w, BASELINE): [o for o in outcomes if (o.workload, o.policy) == (w, BASELINE)] for w in workloads}
    weights = {w: _weights(len(table[w, BASELINE])) for w in workloads}
    rows = [_row(w, p, [w], table, weights) for w in workloads for p in policies]
    if len(workloads) > 1:
        rows += [_row(ALL, p, workloads, table, weights) for p in policies]
    return rows


def _weights(groups: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return how often each group is drawn in each resample."""
    return np.random.default_rng(0).multinomial(groups, np.full(groups, 1 / groups), size=RESAMPLES)


def _row(
    name: str,
    policy: str,
    workloads: Sequence[str],
    table: Mapping[tuple[str, str], Sequence[GroupOutcome]],
    weights: Mapping[str, np.ndarray[tuple[int, int], np.dtype[np.int64]]],
) -> ClusterRow:
    ours = [o for w in workloads for o in table[w, policy]]
    jobs = sum(o.jobs for o in ours)

    def over_default(of: Callable[[GroupOutcome], float]) -> Share:
        sums = {p: sum(of(o) for w in workloads for o in table[w, p]) for p in (policy, BASELINE)}
        share = Share(sums[policy] / sums[BASELINE])
        if len(ours) == 1:
            return share
        resampled = {
            p: np.sum([weights[w] @ np.array([of(o) for o in table[w, p]]) for w in workloads], axis=0)
            for p in (policy, BASELINE)
        }
        low, high = np.percentile(resampled[policy] / resampled[BASELINE], [2.5, 97.5])
        return replace(share, low=float(low), high=float(high))

    return ClusterRow(
        workload=name,
        policy=policy,
        groups=len(ours),
        jobs=jobs,
        energy_j=sum(o.energy_j for o in ours),
        time_s=sum(o.time_s for o in ours),
        energy=over_default(lambda o: o.energy_j),
        time=over_default(lambda o: o.time_s),
        cost=over_default(lambda o: o.cost_j),
        attempts_per_job=sum(o.attempts for o in ours) / jobs,
        missed_percent=100 * sum(o.missed for o in ours) / jobs,
        overlapping_percent=100 * sum(o.overlapping for o in ours) / jobs,
    )


def as_result(rows: Sequence[ClusterRow]) -> Result:
    """Return the rows as a table that can be drawn and written: energy and time over the default's."""
    cells: list[tuple[Cell, ...]] = []
    for of in ("energy", "time"):
        for row in rows:
            share: Share = row.energy if of == "energy" else row.time
            low, high = (share.value if end is None else end for end in (share.low, share.high))
            ends = (round(share.value, 4), round(low, 4), round(high, 4))
            cells.append((row.workload, row.policy, of, row.groups, row.jobs, *ends))
    columns = ("workload", "policy", "of", "groups", "jobs", "over the default's", "2.5 %", "97.5 %")
    chart = Chart(ChartKind.BARS, "workload", columns[5], "policy", "of", "2.5 %", "97.5 %", level=1.0)
    return Result(columns, tuple(cells), chart, ())
