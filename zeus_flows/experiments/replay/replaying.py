"""Replaying a job on a trace: production's loop and policies, with a trace in the place of training.

A training run is drawn from the trace's repetitions; an arm's first run pays for profiling every power limit in
its first epoch; an attempt that its cut stops is retried, up to a bound (the paper's methodology, section 6.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeus_flows.core import policy
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.cost import observed_cost, price
from zeus_flows.core.early_stop import PlannedCut, epochs_allowed
from zeus_flows.core.job import Job
from zeus_flows.core.learning_curve import Curve, seen_by
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power import best_setting
from zeus_flows.core.power_profile import Gpu, Part, Parts, PowerProfile, SettingMeasurement
from zeus_flows.core.records import Decision, EnergySource, Observation, Outcome
from zeus_flows.experiments.replay.traces import Trace
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.ledger.protocol import History
from zeus_flows.recurrence.loop import Recurrence, another_follows, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps, asking

PUBLISHED_ATTEMPTS = 20
AS_PUBLISHED = ("zeus-paper", "zeus-paper-unpruned")
LAST = 5  # the paper judges a policy by its last five recurrences


@dataclass(frozen=True, slots=True)
class Epoch:
    """Seconds and joules of an epoch."""

    time_s: float
    energy_j: float


#: Of each batch size: its best limit, an epoch at it and its cost, and an epoch that profiles all limits.
LookedUp = dict[int, tuple[SettingMeasurement, Epoch, float, Epoch]]


class TraceTrainer:
    """A trainer that looks training up in a trace.

    Args:
        trace: What to replay.
        job: Whose objective decides the best limit.
        rng: Draws the repetitions.
        free_refusals: A run that may not train one epoch costs nothing, as the published simulator has it. Otherwise
            it pays for the profile that told.
        offline: Each power limit is measured by a whole run of its own instead of a few seconds of the first epoch:
            what just-in-time profiling is compared with (section 6.7).
        shifts: Traces that take over from a recurrence on, for drift.
        looked_up: What other trainers of this trace and objective have looked up, to be shared.
    """

    energy_source = EnergySource.SIMULATED

    def __init__(
        self,
        trace: Trace,
        job: Job,
        rng: np.random.Generator,
        *,
        free_refusals: bool = False,
        offline: bool = False,
        shifts: Mapping[int, Trace] | None = None,
        looked_up: LookedUp | None = None,
    ) -> None:
        self.gpu: Gpu = trace.gpu
        self.power_limits_w = trace.power_limits_w
        self._trace, self._job, self._rng = trace, job, rng
        self._free_refusals, self._offline = free_refusals, offline
        self._shifts = dict(shifts or {})
        self._best: LookedUp = {} if looked_up is None else looked_up

    def train(
        self,
        job: Job,
        decision: Decision,
        profile: PowerProfile | None,
        report: Callable[[EpochReport], None],
        *,
        overheads: Overheads = NOTHING,
        attempt_id: str = "",
    ) -> Observation:
        """Return how the attempt goes, by a repetition drawn from the trace."""
        if decision.recurrence in self._shifts:
            self._trace = self._shifts.pop(decision.recurrence)
            self._best = {}
        trace, b = self._trace, decision.batch_size
        repetitions = trace.epochs[b]
        # The same draw as pandas' `sample` of one row, so that the published simulator sees the same runs.
        drawn = int(self._rng.integers(len(repetitions)))
        needed, curve = repetitions[drawn], trace.curves[b][drawn] if b in trace.curves else ()
        at, epoch, cost_j, profiling = self._best.get(b) or self._look_up(b)
        beside = trace.overheads.get(b, NOTHING)
        once, once_j = beside.once_each, trace.once_cost(self._job, b) if beside else 0.0
        limit_w: float | None = at.setting
        profiles = decision.tune_power and decision.setting is None and (profile is None or not profile.complete)
        if not decision.tune_power or decision.setting is not None:
            fixed_w = decision.setting or trace.gpu.max_power_w
            at = min(trace.profiles[b].measurements, key=lambda m: abs(m.setting - fixed_w))
            epoch, limit_w = _epoch(trace, b, at), decision.setting
        measured = trace.profiles[b] if profiles else None
        if profiles and self._offline:
            at, measured = _next_limit(trace.profiles[b], profile)
            epoch, limit_w, profiles = _epoch(trace, b, at), at.setting, False
            cost_j = price(self._job, trace.gpu.max_power_w).of(epoch.energy_j, epoch.time_s)
        allowed = epochs_allowed(decision.cut, epoch_cost_j=cost_j, max_epochs=trace.max_epochs, once_j=once_j)
        if curve and isinstance(decision.cut, PlannedCut) and decision.cut.reference is not None:
            # a bound may come before a look is over
            look = min(max(decision.cut.at_least, 1), max(allowed, 1))
            allowed = _watched(
                decision.cut, curve, needed, first=look, cost_j=cost_j, max_epochs=trace.max_epochs, once_j=once_j
            )
        converged = needed is not None and needed <= allowed
        epochs = needed if converged and needed is not None else allowed
        if not epochs and profiles and not self._free_refusals:
            epochs = 1
        first = profiling if profiles else epoch
        rest = max(epochs - 1, 0)
        began = min(epochs, 1)
        return Observation(
            recurrence=decision.recurrence,
            attempt=decision.attempt,
            batch_size=b,
            outcome=_outcome(converged=converged, epochs=epochs, max_epochs=trace.max_epochs),
            epochs=epochs,
            energy_j=began * first.energy_j + rest * epoch.energy_j + once.energy_j,
            time_s=began * first.time_s + rest * epoch.time_s + once.time_s,
            gpu=trace.gpu,
            energy_source=self.energy_source,
            samples_per_epoch=trace.samples_per_epoch,
            setting=limit_w,
            profile=measured,
            profiling_energy_j=began * first.energy_j if profiles else 0.0,
            profiling_time_s=began * first.time_s if profiles else 0.0,
            epochs_allowed=allowed,
            explores=decision.explores,
            fingerprint=job.fingerprint,
            control=decision.control,
            setting_before=trace.gpu.max_power_w / trace.gpu.count,
            parts=_parts(beside, trace.profiles[b], at, epochs) if beside else None,
            curve=tuple([point for point in curve if point[0] <= epochs]),
        )

    def _look_up(self, batch_size: int) -> tuple[SettingMeasurement, Epoch, float, Epoch]:
        """Return the best limit of an arm, an epoch at it and its cost, and an epoch that profiles all limits."""
        profile = self._trace.profiles[batch_size]
        beside, samples = self._trace.overheads.get(batch_size, NOTHING), self._trace.samples_per_epoch
        at = best_setting(self._job, profile, samples_per_epoch=samples, overheads=beside)
        epoch = _epoch(self._trace, batch_size, at)
        cost_j = price(self._job, self._trace.gpu.max_power_w).of(epoch.energy_j, epoch.time_s)
        each = [_steps(self._trace, m) for m in profile.measurements]
        rest = beside.per_epoch(at.setting, profile)
        profiling = Epoch(
            sum(e.time_s for e in each) / len(each) + rest.time_s,
            sum(e.energy_j for e in each) / len(each) + rest.energy_j,
        )
        self._best[batch_size] = found = (at, epoch, cost_j, profiling)
        return found


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy did to a workload, recurrence by recurrence; all tuples are parallel.

    Attributes:
        costs_j: Cost of each recurrence, all attempts included.
        energies_j: Its energy.
        times_s: Its training time.
        batch_sizes: Batch size of its last attempt.
        last_energies_j: Energy of its last attempt: energy to accuracy, where it converged.
        last_times_s: Time of its last attempt.
        last_costs_j: Cost of its last attempt.
        attempts: How many it took.
        converged: Whether it reached the target.
        best_cost_j: The best arm's expected cost, where regret starts.
    """

    workload: str
    gpu: str
    policy: str
    seed: int
    costs_j: tuple[float, ...]
    energies_j: tuple[float, ...]
    times_s: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    last_energies_j: tuple[float, ...]
    last_times_s: tuple[float, ...]
    last_costs_j: tuple[float, ...]
    attempts: tuple[int, ...]
    converged: tuple[bool, ...]
    best_cost_j: float

    @property
    def regret(self) -> float:
        """Cumulative regret (eq. 8), in units of the best arm's expected cost."""
        return sum(self.costs_j) / self.best_cost_j - len(self.costs_j)

    def last(self, values: tuple[float, ...]) -> float:
        """Return the mean of the last five."""
        tail = values[-LAST:]
        return sum(tail) / len(tail)


def replay_job(trace: Trace, policy: str, **changes: object) -> Job:
    """Return the job that replays a trace; `changes` are fields of `Job`, such as eta, beta, window or seed."""
    job = Job(
        name=trace.workload,
        batch_sizes=trace.batch_sizes,
        default_batch_size=trace.default_batch_size,
        max_epochs=trace.max_epochs,
        policy=policy,
        max_attempts=PUBLISHED_ATTEMPTS if policy in AS_PUBLISHED else 4,
    )
    return replace(job, **changes)  # type: ignore[arg-type]


def replay(
    trace: Trace,
    job: Job,
    *,
    recurrences: int,
    seed: int = 0,
    shifts: Mapping[int, Trace] | None = None,
    free_refusals: bool | None = None,
    offline: bool = False,
    watch: Callable[[Recurrence], None] | None = None,
) -> Replay:
    """Replay a job on a trace.

    Args:
        trace: What training does.
        job: What is decided, and by which policy; see `replay_job`.
        recurrences: How many.
        seed: Seeds the policy and the draws of training runs.
        shifts: Traces that take over from a recurrence on.
        free_refusals: See `TraceTrainer`; by default only for `zeus-paper`, as published.
        offline: See `TraceTrainer`.
        watch: Called with each recurrence.
    """
    job = replace(job, seed=seed)
    free = job.policy in AS_PUBLISHED if free_refusals is None else free_refusals
    rng = np.random.default_rng(seed)
    trainer = TraceTrainer(trace, job, rng, free_refusals=free, offline=offline, shifts=shifts)
    steps = LocalSteps(job, MemoryLedger(job, trainer.energy_source, account=False), trainer)
    done = []
    for _ in range(recurrences):
        recurrence = run_recurrence(job, steps)
        if watch is not None:
            watch(recurrence)
        done.append(tuple([observation for _, observation in recurrence.attempts]))
    return _told(trace, job, done, trace.best_cost_j(job))


def replay_many(trace: Trace, job: Job, *, recurrences: int, seeds: Iterable[int]) -> list[Replay]:
    """Replay a job on a trace with many seeds: what `replay` returns for each of them, sooner.

    The same engine decides, the same trainer trains and the same rule ends a recurrence. Only the ledger is left out,
    as nobody else writes to it, and what does not depend on the seed is looked up once for all.

    Args:
        trace: What training does.
        job: What is decided, and by which policy; see `replay_job`.
        recurrences: How many.
        seeds: Of the replays.
    """
    best_cost_j, free = trace.best_cost_j(job), job.policy in AS_PUBLISHED
    looked_up: LookedUp = {}
    replays = []
    for seed in seeds:
        seeded, rng = replace(job, seed=seed), np.random.default_rng(seed)
        trainer = TraceTrainer(trace, seeded, rng, free_refusals=free, looked_up=looked_up)
        state, done = policy.initial(seeded, account=False), []
        for number in range(1, recurrences + 1):
            observations: tuple[Observation, ...] = ()
            while not observations or another_follows(seeded, observations):
                history = History(state, under_way=(number,))
                decision = policy.decide(seeded, state, asking(seeded, history, number, observations, trainer))
                profile = state.profile(decision.batch_size, trainer.gpu, decision.micro)
                observation = trainer.train(seeded, decision, profile, unheard)
                state = policy.advance(seeded, state, observation)
                observations = (*observations, observation)
            done.append(observations)
        replays.append(_told(trace, seeded, done, best_cost_j))
    return replays


def unheard(epoch: EpochReport) -> None:
    """Take an epoch that nobody wants to hear of."""


def _told(trace: Trace, job: Job, done: Sequence[tuple[Observation, ...]], best_cost_j: float) -> Replay:
    """Return what recurrences, each with its attempts, come to."""
    last = [attempts[-1] for attempts in done]
    rates = price(job, trace.gpu.max_power_w)
    return Replay(
        workload=trace.workload,
        gpu=trace.gpu.model,
        policy=job.policy,
        seed=job.seed,
        costs_j=tuple(sum(observed_cost(job, o) for o in attempts) for attempts in done),
        energies_j=tuple(sum(o.energy_j for o in attempts) for attempts in done),
        times_s=tuple(sum(o.time_s for o in attempts) for attempts in done),
        batch_sizes=tuple(o.batch_size for o in last),
        last_energies_j=tuple(o.energy_j for o in last),
        last_times_s=tuple(o.time_s for o in last),
        last_costs_j=tuple(rates.of(o.energy_j, o.time_s) for o in last),
        attempts=tuple(len(attempts) for attempts in done),
        converged=tuple(o.converged for o in last),
        best_cost_j=best_cost_j,
    )


def _next_limit(whole: PowerProfile, known: PowerProfile | None) -> tuple[SettingMeasurement, PowerProfile]:
    """Return the greatest limit that no run measured yet, and the profile once one has."""
    before = () if known is None else known.measurements
    at = next(m for m in whole.measurements if m.setting not in {k.setting for k in before})
    measured = (*before, at)
    return at, replace(whole, measurements=measured, complete=len(measured) == len(whole.measurements))


def _watched(
    cut: PlannedCut, curve: Curve, needed: int | None, *, first: int, cost_j: float, max_epochs: int, once_j: float
) -> int:
    """Return how many epochs an attempt is allowed whose learning curve is looked at after each of them."""
    last = max_epochs if needed is None else min(needed, max_epochs)
    for epoch in range(first, last):
        so_far = seen_by(curve, epoch)
        allowed = epochs_allowed(
            cut, epoch_cost_j=cost_j, max_epochs=max_epochs, once_j=once_j, curve=so_far, epoch=epoch
        )
        if allowed <= epoch:
            return epoch
    return last


def _epoch(trace: Trace, batch_size: int, at: SettingMeasurement) -> Epoch:
    """Return an epoch at one power limit, with what lies beside its steps."""
    steps = _steps(trace, at)
    beside = trace.overheads.get(batch_size)
    if beside is None:
        return steps
    rest = beside.per_epoch(at.setting, trace.profiles[batch_size])
    return Epoch(steps.time_s + rest.time_s, steps.energy_j + rest.energy_j)


def _steps(trace: Trace, at: SettingMeasurement) -> Epoch:
    time_s = trace.samples_per_epoch / at.samples_per_s
    return Epoch(time_s, time_s * at.average_power_w)


def _parts(beside: Overheads, profile: PowerProfile, at: SettingMeasurement, epochs: int) -> Parts:
    """Return what a run of so many epochs takes beside its steps."""
    evaluation = beside.evaluation_at(at.setting, profile).times(beside.evaluations_per_epoch * epochs)
    rest = beside.rest.each.times(epochs)
    once = beside.once_each
    return Parts(
        Part(1, once.energy_j, once.time_s),
        ((at.setting, evaluation),) if evaluation.count else (),
        Part(epochs, rest.energy_j, rest.time_s),
    )


def _outcome(*, converged: bool, epochs: int, max_epochs: int) -> Outcome:
    if converged:
        return Outcome.CONVERGED
    return Outcome.EXHAUSTED if epochs >= max_epochs else Outcome.STOPPED
