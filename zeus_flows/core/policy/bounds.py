"""Exploring only where it fits: within a budget over all recurrences, within a deadline for this one.

A deadline, and a time of day by which a model must be ready, is hard: whatever is tried, a run of the best known arm
must still fit after it. A budget holds in expectation: every recurrence of the best known arm saves up, and an
exploration begins as soon as that covers what it is expected to cost beyond such a run. So a budget delays, and never
forbids; a reason tells how long. What an arm costs is known after its first epoch; `PlannedCut` and `epochs_allowed`
keep the bounds from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from zeus_flows.core.cost import price
from zeus_flows.core.early_stop import (
    CostCut,
    PlannedCut,
    capped,
    chance_to_complete,
    epochs_allowed,
    expected_excess,
)
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import nearest
from zeus_flows.core.policy.base import Choice
from zeus_flows.core.policy.state import ArmCost, State
from zeus_flows.core.power import best_setting, cost_per_sample, epoch_at
from zeus_flows.core.power_profile import Gpu, Part
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.core.records import Ask
from zeus_flows.core.text import cost_text

ALMOST_SURELY = 1.645  # deviations: the 95th percentile
LIKELY = 0.84  # deviations: the 80th percentile
PROFILING = 0.3  # share by which an epoch that profiles may be dearer
SETTLED = 10  # recurrences that share the first budget
SPENDABLE = 0.8  # share of the budget that explorations may use: the default is only estimated
WORTH_TRYING = 0.5  # least probability of completing within the bounds, where the epoch cost is known


@dataclass(frozen=True, slots=True)
class Budget:
    """What a budget has saved up, in joules.

    Attributes:
        saved_j: How much dearer than the best known arm this recurrence may be expected to be.
        rate_j: How much a recurrence of the best known arm adds to that ...
        wait: ... once so many have run: the first ones share what they save.
    """

    saved_j: float
    rate_j: float
    wait: int

    def recurrences_until(self, cost_j: float) -> float:
        """Return how many recurrences of the best known arm save up a cost; infinite where they save nothing.

        >>> Budget(10.0, 5.0, 3).recurrences_until(20.0)
        5
        """
        if self.rate_j <= 0 or not math.isfinite(cost_j):
            return math.inf
        return self.wait + max(math.ceil((cost_j - self.saved_j) / self.rate_j), 1)


@dataclass(frozen=True, slots=True)
class Deadline:
    """What an exploration may cost, in joules, so that the best known arm can still run in time."""

    at_most_j: float


@dataclass(frozen=True, slots=True)
class Trial:
    """An exploration before it begins.

    Attributes:
        fits: Whether it may.
        needs_j: How much dearer than the best known arm it may make the recurrence, for the budget.
        late: Whether it is the deadline that it does not fit.
    """

    fits: bool
    needs_j: float = 0.0
    late: bool = False


def apply(job: Job, ask: Ask) -> bool:
    """Return whether there are bounds to keep."""
    timed = job.deadline_s is not None or ask.seconds_left is not None
    return job.policy != "zeus-paper" and (timed or job.exploration_budget is not None)


def bounded(job: Job, state: State, ask: Ask, choice: Choice, safe: Choice) -> Choice:
    """Return the exploration within its bounds, or the safe choice where it does not fit.

    Args:
        job: With `exploration_budget`, `deadline_s` or `ready_by`.
        state: What was spent so far.
        ask: Which recurrence, on which GPU.
        choice: The exploration that the policy would like.
        safe: What it would run without exploring.
    """
    if safe.explores:
        return choice  # nothing has reached the target yet: whatever runs is a try
    gpu = ask.gpu or state.gpu
    budget = deadline = None
    if gpu is not None and job.exploration_budget is not None:
        budget = _budget(job, state, ask, safe, gpu)
    left_s = _seconds_left(job, state, ask)
    if gpu is not None and left_s is not None:
        deadline = _before_deadline(job, state, ask, safe, gpu, left_s)
    untold = (job.exploration_budget is not None and budget is None) or (left_s is not None and deadline is None)
    if gpu is None or untold:
        return _held_back(
            safe, choice, "is not tried: what a run takes is not known well enough yet to keep the bounds"
        )
    limits = {"saved_j": budget.saved_j} if budget else {}
    limits |= {"at_most_j": deadline.at_most_j} if deadline else {}
    bounded_choice = replace(choice, cut=capped(choice.cut, **limits))
    trial = _trial(job, state, ask, bounded_choice, gpu, limits)
    if not trial.fits:
        return _held_back(safe, choice, _why(job, trial, budget, deadline, best=safe.batch_size))
    return replace(bounded_choice, reason=replace(choice.reason, numbers={**choice.reason.numbers, **limits}))


def _why(job: Job, trial: Trial, budget: Budget | None, deadline: Deadline | None, *, best: int) -> str:
    """Return why a trial does not begin; for want of savings, when it will."""
    if budget is None or trial.late:
        assert deadline is not None
        left = cost_text(job, deadline.at_most_j) if deadline.at_most_j > 0 else "nothing"
        return f"is not tried: the deadline leaves {left} for trying"
    than = "less" if trial.needs_j < 0 else "more"
    text = f"is not tried yet: it may cost {cost_text(job, abs(trial.needs_j))} {than} than a run of {best}, "
    amount = cost_text(job, abs(budget.saved_j))
    text += f"{amount} has been saved up" if budget.saved_j >= 0 else f"{amount} has yet to be made up for"
    recurrences = budget.recurrences_until(trial.needs_j)
    if not math.isfinite(recurrences):
        return f"{text}, and nothing is being saved"
    in_about = f"{recurrences:.0f} recurrence{'' if recurrences == 1 else 's'}"
    return f"{text}; at {cost_text(job, budget.rate_j)} a recurrence it is tried in about {in_about}"


@dataclass(frozen=True, slots=True)
class SoFar:
    """The recurrences so far, this one included: what they cost, and what the default would have."""

    default_j: float
    spent_j: float
    recurrences: int


def budget_left(job: Job, state: State, ask: Ask, *, best_cost_j: float) -> float | None:
    """Return how many joules may still be spent, this recurrence included; None while the default is not known.

    The estimated default is Epochs(b0) at b0's epoch cost with the limit that was there before, for the data of every
    recurrence; recurrences on GPUs that b0 was not profiled on are left out on both sides. The first
    `SETTLED` recurrences share one budget: exploring early may run ahead of it as far as running the best known
    arm, at `best_cost_j` a run, makes up for by then.
    """
    so_far = _so_far(job, state, ask)
    if so_far is None:
        return None
    share, recurrences = _share(job), so_far.recurrences
    ahead = max(SETTLED - recurrences, 0)
    return share * so_far.default_j - so_far.spent_j + ahead * (share * so_far.default_j / recurrences - best_cost_j)


def _share(job: Job) -> float:
    return 1 + SPENDABLE * (job.exploration_budget or 0.0)


def _so_far(job: Job, state: State, ask: Ask) -> SoFar | None:
    gpu = ask.gpu or state.gpu
    if gpu is None or not state.default_epochs.count:
        return None
    default_j = spent_j = 0.0
    recurrences = int(ask.recurrence != state.current[0])
    for key, spent in state.spent.items():
        default = _default_cost(job, state, key)
        if default is None:
            continue
        begins = key == gpu.key and ask.recurrence != state.current[0]
        samples = spent.samples + begins * (ask.samples_per_epoch or state.samples_per_epoch or 0)
        default_j += samples * default.training + (spent.recurrences + begins) * default.beside
        recurrences += spent.recurrences
        rates = price(job, state.max_power_w[key])
        spent_j += rates.of(spent.energy_j + spent.host_energy_j, spent.time_s)
    return SoFar(default_j, spent_j, recurrences) if default_j else None


def _default_cost(job: Job, state: State, gpu_key: str) -> ArmCost | None:
    """Return what a run of the default costs on a GPU: per sample of the data set, and beside that."""
    b0, epochs = job.default_batch_size, state.default_epochs.mean
    profile = state.profiles.get((b0, gpu_key))
    if profile is None or not profile.complete or not profile.measurements:
        return None
    at = nearest(profile, state.settings_before.get(gpu_key, math.inf))
    overheads, _ = state.overheads_of(job, b0, gpu_key)
    per_sample = epochs * cost_per_sample(job, profile, at, host_w=overheads.host_w)
    if not overheads:
        return ArmCost(per_sample)
    beside, once = overheads.per_epoch(at.setting, profile).times(epochs), overheads.once_each
    time_s = beside.time_s + once.time_s
    energy_j = beside.energy_j + once.energy_j + overheads.host_w * time_s
    return ArmCost(per_sample, price(job, profile.gpu.max_power_w).of(energy_j, time_s))


def _budget(job: Job, state: State, ask: Ask, safe: Choice, gpu: Gpu) -> Budget | None:
    """Return what the budget has saved up; None while that cannot be told."""
    expected = _steady_cost(job, state, ask, safe, gpu)
    if expected is None:
        return None
    left, so_far = budget_left(job, state, ask, best_cost_j=expected), _so_far(job, state, ask)
    if left is None or so_far is None:
        return None
    rate_j = _share(job) * so_far.default_j / so_far.recurrences - expected
    return Budget(left - expected, rate_j, max(SETTLED - so_far.recurrences, 0))


def _steady_cost(job: Job, state: State, ask: Ask, safe: Choice, gpu: Gpu) -> float | None:
    """Return what a run of the best known arm costs; the default batch size's by the epochs the default is told from.

    What is saved is a small difference of two great numbers: they must not be told in two ways.
    """
    samples = ask.samples_per_epoch or state.samples_per_epoch or 1
    known = state.arm_cost(job, safe.batch_size, gpu.key, samples)
    if safe.batch_size == job.default_batch_size and known is not None and state.default_epochs.count:
        return known.once + state.default_epochs.mean * (known.training + known.beside)
    return _cost(safe, 0.0)


def _seconds_left(job: Job, state: State, ask: Ask) -> float | None:
    """Return the seconds that this recurrence may still take; None where nothing bounds them."""
    elapsed_s = state.current[2] if state.current[0] == ask.recurrence else 0.0
    of_deadline = None if job.deadline_s is None else job.deadline_s - elapsed_s
    return min((s for s in (of_deadline, ask.seconds_left) if s is not None), default=None)


def _before_deadline(job: Job, state: State, ask: Ask, safe: Choice, gpu: Gpu, left_s: float) -> Deadline | None:
    """Return what may be spent before the deadline so that the best known arm can still run after it.

    A late recurrence is worse than a dear one: there is no more room where the exploration is likely to complete.
    """
    profiles = {b: p for (b, key), p in state.profiles.items() if key == gpu.key and p.complete and p.measurements}
    following_j = _cost(safe, ALMOST_SURELY)
    if safe.batch_size not in profiles or following_j is None:
        return None
    rates = price(job, gpu.max_power_w)

    def cost_per_s(part: Part, host_w: float) -> float:
        return rates.of(part.energy_j / part.time_s + host_w, 1.0)

    samples = ask.samples_per_epoch or state.samples_per_epoch or 1
    known, _ = state.overheads_of(job, safe.batch_size, gpu.key)
    profile = profiles[safe.batch_size]
    at = best_setting(job, profile, samples_per_epoch=samples, overheads=known)
    epoch = epoch_at(profile, at, samples_per_epoch=samples, overheads=known)
    following_s = following_j / cost_per_s(epoch, known.host_w)
    # The arm to be tried is taken to cost as little a second as anything measured: then a joule lasts longest.
    parts = [Part(1, m.average_power_w, 1.0) for p in profiles.values() for m in p.measurements]
    parts += [known.per_epoch(at.setting, profile), known.once_each]
    least = min(cost_per_s(part, known.host_w) for part in parts if part.time_s > 0)
    at_most_j = (left_s - following_s) * least
    return Deadline(at_most_j)


def _trial(job: Job, state: State, ask: Ask, choice: Choice, gpu: Gpu, limits: Mapping[str, float]) -> Trial:
    """Return whether the exploration may begin."""
    samples = ask.samples_per_epoch or state.samples_per_epoch or 1
    known = state.arm_cost(job, choice.batch_size, gpu.key, samples)
    in_time_j, saved_j = limits.get("at_most_j", math.inf), limits.get("saved_j", math.inf)
    if isinstance(choice.cut, CostCut):
        others = [cost.training + cost.beside for cost in state.arm_costs(job, gpu.key, samples).values()]
        first_j = known.training + known.beside if known else (1 + PROFILING) * max(others, default=math.inf)
        fits = choice.cut.threshold_j > 0 and first_j <= min(in_time_j, saved_j)
        return Trial(fits, first_j, late=first_j > in_time_j)
    if not isinstance(choice.cut, PlannedCut):
        return Trial(fits=False, late=not math.isinf(in_time_j))
    once_j, profiling = (known.once, 0.0) if known else (0.0, PROFILING)
    if known is not None:
        epoch_j = known.training + known.beside
    else:
        believed_j, dear_j = _cost(choice, 0.0), _cost(choice, LIKELY)
        if believed_j is None or dear_j is None:
            return Trial(fits=False, late=True)
        epochs = math.exp(min(choice.cut.log_epochs + 0.5 * choice.cut.noise, 50.0))
        epoch_j = believed_j / epochs
        if (1 + PROFILING) * dear_j / epochs > in_time_j:
            return Trial(fits=False, late=True)
    allowed = partial(epochs_allowed, epoch_cost_j=epoch_j, max_epochs=job.max_epochs, once_j=once_j)
    cut = replace(choice.cut, saved_j=None)
    if known is not None and math.isfinite(in_time_j) and chance_to_complete(cut, allowed(cut)) < WORTH_TRYING:
        return Trial(fits=False, late=True)
    if math.isinf(saved_j):
        return Trial(fits=True)
    wished = allowed(cut)
    needs_j = expected_excess(cut, wished, epoch_cost_j=epoch_j, once_j=once_j) + profiling * epoch_j
    shorter = allowed(replace(choice.cut, saved_j=saved_j - profiling * epoch_j))
    return Trial(needs_j <= saved_j or chance_to_complete(cut, shorter) >= WORTH_TRYING, needs_j)


def _cost(choice: Choice, deviations: float) -> float | None:
    """Return what a run of the chosen arm may cost, so many standard deviations above what is expected."""
    believed = choice.run_cost()
    return None if believed is None else believed.likely_j(deviations)


def _held_back(safe: Choice, wished: Choice, why: str) -> Choice:
    text = f"{safe.reason.text}; batch size {wished.batch_size} {why}"
    return replace(safe, reason=replace(safe.reason, kind=ReasonKind.HELD_BACK, text=text))
