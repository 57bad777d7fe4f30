"""Policies side by side on the same traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeus_flows.core.cost import price
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import NOTHING
from zeus_flows.core.power import run_at
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.fan_out import FanOut, in_turn
from zeus_flows.experiments.replay.replaying import Replay, replay_job, replay_many
from zeus_flows.experiments.replay.traces import Trace, jobs_in, read_trace
from zeus_flows.experiments.replay.workloads import JOBS, model_trace


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a policy on one workload, averaged over seeds.

    Attributes:
        regret: Cumulative regret, in units of the best arm's expected cost (eq. 8 and 9).
        energy_saved_percent: Of the last five recurrences' energy to accuracy, against the default.
        time_saved_percent: Of their time to accuracy; negative where it takes longer.
        last_cost_ratio: Their cost, in units of the best arm's expected cost.
        dearest: Greatest cumulative cost, in units of the default's expected one, from the 10th recurrence on.
            Single replays lie around it: the default is only estimated, and runs vary.
        unconverged: Recurrences that did not reach the target.
    """

    workload: str
    gpu: str
    policy: str
    seeds: int
    recurrences: int
    regret: float
    energy_saved_percent: float
    time_saved_percent: float
    last_cost_ratio: float
    dearest: float
    unconverged: int


@dataclass(frozen=True, slots=True)
class DefaultRun:
    """What b0 at the maximum power limit is expected to take."""

    energy_j: float
    time_s: float
    cost_j: float


def default_run(trace: Trace, job: Job) -> DefaultRun:
    """Return the expected default of a trace; repetitions that never reached the target count for max_epochs."""
    runs = trace.epochs[trace.default_batch_size]
    epochs = sum(trace.max_epochs if e is None else min(e, trace.max_epochs) for e in runs) / len(runs)
    profile = trace.profiles[trace.default_batch_size]
    at = max(profile.measurements, key=lambda m: m.setting)
    overheads = trace.overheads.get(trace.default_batch_size, NOTHING)
    run = run_at(
        profile,
        at,
        epochs=epochs,
        evaluations=epochs * overheads.evaluations_per_epoch,
        samples_per_epoch=trace.samples_per_epoch,
        overheads=overheads,
    )
    return DefaultRun(run.energy_j, run.time_s, price(job, trace.gpu.max_power_w).of(run.energy_j, run.time_s))


def find_traces(
    *,
    folder: Path | None,
    gpu: str,
    workloads: Sequence[str],
    target: float | None = None,
    default_batch_size: int | None = None,
) -> list[Trace]:
    """Return the traces to replay: from a folder, or of the built-in models.

    Raises:
        ConfigError: a workload or GPU is unknown, or a trace is broken.
    """
    jobs = JOBS if folder is None else jobs_in(folder, JOBS)
    unknown = [w for w in workloads if w not in jobs]
    if unknown:
        raise ConfigError(f"there is no workload {', '.join(unknown)}; there are {', '.join(jobs)}")
    workloads = workloads or tuple(jobs)
    if folder is not None:
        return [
            read_trace(folder, w, gpu, jobs[w], target=target, default_batch_size=default_batch_size) for w in workloads
        ]
    if target is not None:
        raise ConfigError("--target needs --traces: the built-in models have one target each")
    return [model_trace(w, gpu, default_batch_size=default_batch_size) for w in workloads]


@dataclass(frozen=True, slots=True)
class Contest:
    """One policy on one trace: what a comparison is made of, and can be shared out by. All its seeds are in it."""

    trace: Trace
    job: Job
    seeds: int
    recurrences: int


def compare(
    traces: Iterable[Trace],
    policies: Sequence[str],
    *,
    seeds: int,
    recurrences: int | None,
    fan_out: FanOut = in_turn,
    **changes: object,
) -> list[Row]:
    """Replay every policy on every trace and return one row each.

    Args:
        traces: What to replay.
        policies: Names in `zeus_flows.core.policy.POLICIES`.
        seeds: Replays to average over.
        recurrences: How many; None: 2 |B| |P|, as in the paper's figure 6.
        fan_out: Who does the work, in whatever order; rows come back in that of the contests.
        changes: Fields of `Job`, such as eta, beta, window or exploration_budget.
    """
    contests = []
    for trace in traces:
        count = recurrences or 2 * len(trace.batch_sizes) * len(trace.power_limits_w)
        contests += [Contest(trace, replay_job(trace, policy, **changes), seeds, count) for policy in policies]
    return fan_out(replayed, contests)


def replayed(contest: Contest) -> Row:
    """Replay a contest with each of its seeds, from 0; the same wherever that is done."""
    replays = replay_many(contest.trace, contest.job, recurrences=contest.recurrences, seeds=range(contest.seeds))
    return row(contest.trace, contest.job, replays)


def row(trace: Trace, job: Job, replays: Sequence[Replay]) -> Row:
    """Return the averaged result of several replays of one policy on one trace."""
    default = default_run(trace, job)

    def average(values: Iterable[float]) -> float:
        listed = list(values)
        return sum(listed) / len(listed)

    return Row(
        workload=trace.workload,
        gpu=trace.gpu.model,
        policy=job.policy,
        seeds=len(replays),
        recurrences=len(replays[0].costs_j),
        regret=average(r.regret for r in replays),
        energy_saved_percent=100 * (1 - average(r.last(r.last_energies_j) for r in replays) / default.energy_j),
        time_saved_percent=100 * (1 - average(r.last(r.last_times_s) for r in replays) / default.time_s),
        last_cost_ratio=average(r.last(r.last_costs_j) / r.best_cost_j for r in replays),
        dearest=dearest(replays, default.cost_j),
        unconverged=sum(not ok for r in replays for ok in r.converged),
    )


def dearest(replays: Sequence[Replay], default_cost_j: float, *, since: int = 10) -> float:
    """Return the greatest share that mean cumulative cost reached of the default's, from a recurrence on."""
    spent, greatest = 0.0, 0.0
    for number, costs in enumerate(zip(*(r.costs_j for r in replays), strict=True), start=1):
        spent += sum(costs) / len(costs)
        if number >= min(since, len(replays[0].costs_j)):
            greatest = max(greatest, spent / (number * default_cost_j))
    return greatest
