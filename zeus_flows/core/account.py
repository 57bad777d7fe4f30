"""What the fold keeps so that savings can be told: sums of energy, time and epochs, never the runs themselves.

An era is what ran between two drifts: within one, a batch size takes the same epochs in expectation. Its sums are by
batch size, GPU and setting, so their number does not grow with that of the recurrences. An era that has ended
is settled (`core.settle`): amounts and variances of eras add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from zeus_flows.core.amounts import NO_AMOUNT, NOTHING, Amount, Ran, Took
from zeus_flows.core.bandit import Runs
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.records import EnergySource, Observation, Outcome

MOST = 1e15  # joules, seconds, watts, samples: whatever is greater was not measured
_UNCHANGED = (Mode.OFF, Mode.OBSERVE)  # modes in which the job trains as ever


@dataclass(frozen=True, slots=True)
class Reached:
    """One recurrence that reached the target.

    Attributes:
        ran: Its run that did.
        stopped: Its attempts before that were stopped, or never would have reached it.
        out_of_memory: Those that did not fit the GPU.
        control: The default ran, to be compared with.
        whole: All was measured that it took; False: it cannot be compared.
    """

    recurrence: int
    ran: Ran
    stopped: Took = NOTHING
    out_of_memory: Took = NOTHING
    control: bool = False
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Era:
    """The recurrences that reached the target between two drifts.

    Attributes:
        first: The first of them; 0 before there is one.
        ran: Their runs, by `Ran.key`.
        scatter: log epochs of their runs, by batch size: for their scatter.
        stopped: Attempts before those runs that were stopped, by GPU.
        out_of_memory: Those that did not fit, by GPU.
        controls: How many were control runs.
        not_whole: Recurrences that were not measured completely.
    """

    first: int = 0
    ran: Mapping[str, Ran] = field(default_factory=dict)
    scatter: Mapping[str, Runs] = field(default_factory=dict)
    stopped: Mapping[str, Took] = field(default_factory=dict)
    out_of_memory: Mapping[str, Took] = field(default_factory=dict)
    controls: int = 0
    not_whole: Took = NOTHING

    def add(self, reached: Reached | None) -> Era:
        """Return the era with one more recurrence."""
        if reached is None:
            return self
        ran, first = reached.ran, self.first or reached.recurrence
        if not reached.whole:
            took = Took(1, ran.energy_j, ran.time_s, ran.host_j)
            before = replace(reached.stopped + reached.out_of_memory, count=0)
            return replace(self, first=first, not_whole=self.not_whole + took + before)
        key, arm = ran.key, str(ran.batch_size)
        known = self.ran.get(key)
        return Era(
            first=first,
            ran={**self.ran, key: ran if known is None else known + ran},
            scatter={**self.scatter, arm: self.scatter.get(arm, Runs()).add(math.log(ran.epochs))},
            stopped=_added(self.stopped, ran.gpu, reached.stopped),
            out_of_memory=_added(self.out_of_memory, ran.gpu, reached.out_of_memory),
            controls=self.controls + reached.control,
            not_whole=self.not_whole,
        )


@dataclass(frozen=True, slots=True)
class Pending:
    """Attempts of a recurrence that has not reached the target so far."""

    recurrence: int
    stopped: Took = NOTHING
    out_of_memory: Took = NOTHING
    failed: Took = NOTHING
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Settled:
    """What eras that have ended come to.

    Attributes:
        recurrences: How many are compared with the default.
        unchanged: Those of them in which nothing was to be changed.
        controls: How many of these were control runs.
        default_runs: Runs of the default batch size that reached the target.
        baseline: What the default would have taken.
        spent: What the recurrences took.
        lines: What was saved, by line.
        variances: The square of its standard error, by line.
        not_compared: Recurrences on GPUs on which the default is not known, or not measured completely.
        unknown: Recurrences of eras in which the default did not run.
        squares: Sum of squared deviations of log epochs from their batch size's mean.
        free: Its degrees of freedom.
    """

    recurrences: int = 0
    unchanged: int = 0
    controls: int = 0
    default_runs: int = 0
    baseline: Amount = NO_AMOUNT
    spent: Amount = NO_AMOUNT
    lines: Mapping[str, Amount] = field(default_factory=dict)
    variances: Mapping[str, Amount] = field(default_factory=dict)
    not_compared: Took = NOTHING
    unknown: Took = NOTHING
    squares: float = 0.0
    free: float = 0.0

    def __add__(self, other: Settled) -> Settled:
        names = {**self.lines, **other.lines}
        none = NO_AMOUNT
        return Settled(
            recurrences=self.recurrences + other.recurrences,
            unchanged=self.unchanged + other.unchanged,
            controls=self.controls + other.controls,
            default_runs=self.default_runs + other.default_runs,
            baseline=self.baseline + other.baseline,
            spent=self.spent + other.spent,
            lines={n: self.lines.get(n, none) + other.lines.get(n, none) for n in names},
            variances={n: self.variances.get(n, none) + other.variances.get(n, none) for n in names},
            not_compared=self.not_compared + other.not_compared,
            unknown=self.unknown + other.unknown,
            squares=self.squares + other.squares,
            free=self.free + other.free,
        )


@dataclass(frozen=True, slots=True)
class Account:
    """What the fold keeps of a job's history for its savings; plain values, of bounded size.

    Attributes:
        era: The present one, without its newest recurrence.
        newest: That one: where epochs have changed, it may belong to the next era.
        pending: Attempts of the recurrence under way.
        closed: The eras that have ended.
        lost: Recurrences that did not reach the target: failed, killed, cancelled, given up.
        failed: Attempts that failed in recurrences that then reached it.
        skipped: Recurrences that a drift gate skipped; what its evaluation took.
        before: The setting that was there before, per GPU, by `Gpu.key`.
        max_power_w: MAXPOWER, by `Gpu.key`.
        without_limits: GPUs that know no power limits.
        gpu: Key of the newest GPU.
        samples_per_epoch: The newest data set's size.
        energy_source: Where the joules come from.
    """

    formerly: ClassVar[Mapping[str, str]] = {"before": "before_w"}

    era: Era = Era()
    newest: Reached | None = None
    pending: Pending | None = None
    closed: Settled = Settled()
    lost: Took = NOTHING
    failed: Took = NOTHING
    skipped: Took = NOTHING
    before: Mapping[str, float] = field(default_factory=dict)
    max_power_w: Mapping[str, float] = field(default_factory=dict)
    without_limits: tuple[str, ...] = ()
    gpu: str = ""
    samples_per_epoch: float = 0.0
    energy_source: EnergySource = EnergySource.NONE

    def log_epochs(self) -> Mapping[str, Runs]:
        """Return the log epochs of runs that reached the target in the present era, by batch size."""
        return self.era.add(self.newest).scatter


def tunes_batch_size(job: Job) -> bool:
    """Return whether the job tries batch sizes; in observe mode it tells of those that were tried before."""
    return job.mode is not Mode.POWER and _may_choose(job)


def _may_choose(job: Job) -> bool:
    """Return whether there is anything to choose from and a policy that chooses, whatever the mode is now."""
    return len(job.batch_sizes) > 1 and job.policy not in ("power", "default")


def booked(job: Job, account: Account, observation: Observation) -> tuple[Account, Reached | None]:
    """Return the account with an attempt among the pending ones, and the recurrence where it reached its target.

    The recurrence is the caller's to add to an era.
    """
    account, pending = _seen(account, observation), account.pending
    if pending is None or pending.recurrence != observation.recurrence:
        account, pending = given_up(account), Pending(observation.recurrence)
    whole = pending.whole and _whole(observation)
    if not observation.converged:
        return replace(account, pending=_not_reached(pending, observation, whole=whole)), None
    reached = Reached(
        observation.recurrence,
        _ran(job, observation),
        pending.stopped,
        pending.out_of_memory,
        control=observation.control,
        whole=whole and observation.epochs > 0,
    )
    if account.pending is not None:
        account = replace(account, pending=None, failed=account.failed + pending.failed)
    return account, reached


def _not_reached(pending: Pending, observation: Observation, *, whole: bool) -> Pending:
    """Return the pending attempts with one more; one that failed was not measured to be compared."""
    took = _took(observation)
    if observation.outcome is Outcome.FAILED:
        return replace(pending, failed=pending.failed + took)
    if observation.outcome is Outcome.OUT_OF_MEMORY:
        return replace(pending, out_of_memory=pending.out_of_memory + took, whole=whole)
    return replace(pending, stopped=pending.stopped + took, whole=whole)


def given_up(account: Account) -> Account:
    """Return the account with what is pending among what is lost."""
    pending = account.pending
    if pending is None:
        return account
    took = replace(pending.stopped + pending.out_of_memory + pending.failed, count=1)
    return replace(account, pending=None, lost=account.lost + took)


def _seen(account: Account, observation: Observation) -> Account:
    """Return the account with the machine that an attempt ran on."""
    gpu, source = observation.gpu, observation.energy_source
    before, data = observation.setting_before, float(observation.samples_per_epoch)
    changes: dict[str, Any] = {}
    if account.gpu != gpu.key or account.energy_source is not source:
        changes |= {"gpu": gpu.key, "energy_source": source}
    if 0 < gpu.max_power_w <= MOST and account.max_power_w.get(gpu.key) != gpu.max_power_w:
        changes["max_power_w"] = {**account.max_power_w, gpu.key: gpu.max_power_w}
    if before is not None and 0 < before <= MOST and account.before.get(gpu.key) != before:
        changes["before"] = {**account.before, gpu.key: before}
    has_none = observation.schema > 1 and before is None and observation.setting is None
    if has_none and observation.parts is not None and gpu.key not in account.without_limits:
        changes["without_limits"] = (*account.without_limits, gpu.key)
    if 0 < data <= MOST and data != account.samples_per_epoch:
        changes["samples_per_epoch"] = data
    return replace(account, **changes) if changes else account


def _ran(job: Job, observation: Observation) -> Ran:
    o, b = observation, observation.batch_size
    chosen = o.mode is Mode.FULL and _may_choose(job)  # by the policy, even where no limit can be set
    one_limit = o.profile is not None and len(o.profile.measurements) == 1  # none was tried
    left_alone = one_limit and o.setting is not None and o.setting == o.setting_before
    as_ever = o.control or o.mode in _UNCHANGED or left_alone or (o.setting is None and not chosen)
    evaluations = o.parts.evaluations.count if o.parts is not None else 0.0
    took = _took(o)
    return Ran(
        batch_size=b,
        gpu=o.gpu.key,
        setting=None if o.control else o.setting,
        profiled=o.profiling_time_s > 0 and not left_alone,
        changed=not (b == job.default_batch_size and as_ever),
        runs=1,
        epochs=float(o.epochs),
        samples=float(o.epochs) * o.samples_per_epoch,
        data=float(o.samples_per_epoch),
        evaluations=float(evaluations),
        energy_j=took.energy_j,
        time_s=took.time_s,
        host_j=took.host_j,
        profiling_j=min(o.profiling_energy_j, took.energy_j),
        profiling_s=min(o.profiling_time_s, took.time_s),
    )


def _took(observation: Observation) -> Took:
    """Return what an attempt took; nothing where that cannot have been measured."""
    readings = (observation.energy_j, observation.time_s, observation.host_energy_j)
    return Took(1, *(value if 0 <= value <= MOST else 0.0 for value in readings))


def _whole(observation: Observation) -> bool:
    """Return whether the readings can be compared at all."""
    return (
        observation.energy_complete
        and observation.foreign_limit_w is None
        and 0 <= observation.energy_j <= MOST
        and 0 <= observation.time_s <= MOST
        and 0 <= observation.host_energy_j <= MOST
        and 0 <= observation.epochs <= MOST
        and 0 < observation.gpu.max_power_w <= MOST
        and (not observation.converged or 0 < observation.samples_per_epoch <= MOST)
    )


def _added(sums: Mapping[str, Took], gpu: str, took: Took) -> Mapping[str, Took]:
    return {**sums, gpu: sums.get(gpu, NOTHING) + took} if took.count else sums
