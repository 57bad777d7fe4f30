"""Policies side by side on the same groups: energy, time and cost over those of the default, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
MEASURES = ("jobs", "attempts", "energy_j", "time_s", "cost_j", "missed", "overlapping")  # of a `GroupOutcome`


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
    names = tuple(dict.fromkeys((BASELINE, *policies)))
    workloads = [Summed.of(w, [o for o in outcomes if o.workload == w], names) for w in _workloads(outcomes)]
    rows = [_row(w, policy) for w in workloads for policy in policies]
    if len(workloads) > 1:
        together = workloads[0].added(ALL, workloads[1:])
        rows += [_row(together, policy) for policy in policies]
    return rows


def _workloads(outcomes: Sequence[GroupOutcome]) -> list[str]:
    return list(dict.fromkeys(o.workload for o in outcomes))


@dataclass(frozen=True, slots=True)
class Summed:
    """Sums over the groups of a workload, or of all: of each policy and measure, and in each resample of groups."""

    name: str
    groups: int
    sums: Mapping[tuple[str, str], float]
    resampled: Mapping[tuple[str, str], np.ndarray[tuple[int], np.dtype[np.float64]]]

    @classmethod
    def of(cls, name: str, outcomes: Sequence[GroupOutcome], policies: Sequence[str]) -> Summed:
        """Add up the groups of one workload."""
        by_policy = {p: [o for o in outcomes if o.policy == p] for p in policies}
        values = {
            (p, of): np.array([float(getattr(o, of)) for o in each]) for p, each in by_policy.items() for of in MEASURES
        }
        groups = len(by_policy[policies[0]])
        drawn = np.random.default_rng(0).multinomial(groups, np.full(groups, 1 / groups), size=RESAMPLES)
        sums = {key: float(each.sum()) for key, each in values.items()}
        return cls(name, groups, sums, {key: drawn @ each for key, each in values.items()})

    def added(self, name: str, others: Sequence[Summed]) -> Summed:
        """Return the sums of several workloads together."""
        every = (self, *others)
        sums = {key: sum(each.sums[key] for each in every) for key in self.sums}
        resampled = {key: np.sum([each.resampled[key] for each in every], axis=0) for key in self.resampled}
        return Summed(name, sum(each.groups for each in every), sums, resampled)

    def share(self, policy: str, of: str) -> Share:
        """Return what a policy takes over the default."""
        value = self.sums[policy, of] / self.sums[BASELINE, of]
        if self.groups == 1:
            return Share(value)
        low, high = np.percentile(self.resampled[policy, of] / self.resampled[BASELINE, of], [2.5, 97.5])
        return Share(value, float(low), float(high))


def _row(summed: Summed, policy: str) -> ClusterRow:
    sums = {of: summed.sums[policy, of] for of in MEASURES}
    return ClusterRow(
        workload=summed.name,
        policy=policy,
        groups=summed.groups,
        jobs=round(sums["jobs"]),
        energy_j=sums["energy_j"],
        time_s=sums["time_s"],
        energy=summed.share(policy, "energy_j"),
        time=summed.share(policy, "time_s"),
        cost=summed.share(policy, "cost_j"),
        attempts_per_job=sums["attempts"] / sums["jobs"],
        missed_percent=100 * sums["missed"] / sums["jobs"],
        overlapping_percent=100 * sums["overlapping"] / sums["jobs"],
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
