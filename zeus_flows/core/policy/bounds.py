"""Exploring only where it fits: within a budget over all recurrences, within a deadline for this one.

Both bounds leave an exploration so many joules: its *room* where it completes, and less where it has to be stopped,
because a run of the best known arm must then follow. What an arm costs is known after its first epoch; so an
exploration may begin where that epoch fits, and goes on where it is all but sure to complete within its room or
may be stopped later without breaking a bound (`PlannedCut` and `epochs_allowed` see to that).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zeus_flows.core.cost import price
from zeus_flows.core.early_stop import CostCut, PlannedCut, capped, chance_to_complete, epochs_allowed
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import nearest
from zeus_flows.core.policy.base import Choice
from zeus_flows.core.policy.state import ArmCost, State
from zeus_flows.core.power import best_limit, cost_per_sample, epoch_at
from zeus_flows.core.power_profile import Gpu, Part
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.core.records import Ask
from zeus_flows.core.text import cost_text

ALMOST_SURELY = 1.645  # deviations: the 95th percentile
LIKELY = 0.84  # deviations: the 80th percentile
PROFILING = 0.3  # share by which an epoch that profiles may be dearer
SETTLED = 20  # recurrences that share the first budget
SPENDABLE = 0.8  # share of the budget that explorations may use: the default is only estimated
WORTH_TRYING = 0.5  # least probability of completing within the bounds, where the epoch cost is known


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an exploration may cost, in joules: where it is stopped, and where it completes."""

    at_most_j: float
    room_j: float


def bounded(job: Job, state: State, ask: Ask, choice: Choice, safe: Choice) -> Choice:
    """Return the exploration within its bounds, or the safe choice where it does not fit.

    Args:
        job: With `exploration_budget` or `deadline_s`, or both.
        state: What was spent so far.
        ask: Which recurrence, on which GPU.
        choice: The exploration that the policy would like.
        safe: What it would run without exploring.
    """
    if safe.explores:
        return choice  # nothing has reached the target yet: whatever runs is a try
    gpu = ask.gpu or state.gpu
    bounds = None if gpu is None else _bounds(job, state, ask, safe, gpu)
    if bounds is None or gpu is None:
        return _held_back(safe, choice, "what a run takes is not known well enough yet to keep the bounds")
    cut = capped(choice.cut, at_most_j=bounds.at_most_j, room_j=bounds.room_j)
    bounded_choice = replace(choice, cut=cut)
    if not _fits(job, state, ask, bounded_choice, gpu, bounds):
        left = cost_text(job, bounds.at_most_j) if bounds.at_most_j > 0 else "nothing"
        return _held_back(safe, choice, f"the budget or the deadline leaves {left} for trying")
    numbers = {**choice.reason.numbers, "at_most_j": bounds.at_most_j, "room_j": bounds.room_j}
    return replace(bounded_choice, reason=replace(choice.reason, numbers=numbers))


def budget_left(job: Job, state: State, ask: Ask, *, best_cost_j: float) -> float | None:
    """Return how many joules may still be spent, this recurrence included; None while the default is not known.

    The estimated default is Epochs(b0) at b0's epoch cost with the limit that was there before, for the data of every
    recurrence; recurrences on GPUs that b0 was not profiled on are left out on both sides. The first
    `SETTLED` recurrences share one budget: exploring early may run ahead of it as far as running the best known
    arm, at `best_cost_j` a run, makes up for by then.
    """
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
    if not default_j:
        return None
    share = 1 + SPENDABLE * (job.exploration_budget or 0.0)
    ahead = max(SETTLED - recurrences, 0)
    return share * default_j - spent_j + ahead * (share * default_j / recurrences - best_cost_j)


def _default_cost(job: Job, state: State, gpu_key: str) -> ArmCost | None:
    """Return what a run of the default costs on a GPU: per sample of the data set, and beside that."""
    b0, epochs = job.default_batch_size, state.default_epochs.mean
    profile = state.profiles.get((b0, gpu_key))
    if profile is None or not profile.complete or not profile.measurements:
        return None
    at = nearest(profile, state.limits_before_w.get(gpu_key, profile.gpu.max_power_w))
    overheads, _ = state.overheads_of(job, b0, gpu_key)
    per_sample = epochs * cost_per_sample(job, profile, at, host_w=overheads.host_w)
    if not overheads:
        return ArmCost(per_sample)
    beside, once = overheads.per_epoch(at.power_limit_w, profile).times(epochs), overheads.once_each
    time_s = beside.time_s + once.time_s
    energy_j = beside.energy_j + once.energy_j + overheads.host_w * time_s
    return ArmCost(per_sample, price(job, profile.gpu.max_power_w).of(energy_j, time_s))


def _bounds(job: Job, state: State, ask: Ask, safe: Choice, gpu: Gpu) -> Bounds | None:
    """Return the narrower of what budget and deadline leave; None where one of them cannot be told."""
    expected = _cost(safe, 0.0)
    if expected is None:
        return None
    bounds = []
    if job.exploration_budget is not None:
        left = budget_left(job, state, ask, best_cost_j=expected)
        if left is None:
            return None
        bounds.append(Bounds(left - expected, left))
    if job.deadline_s is not None:
        before = _before_deadline(job, state, ask, safe, gpu, job.deadline_s)
        if before is None:
            return None
        bounds.append(before)
    return Bounds(min(b.at_most_j for b in bounds), min(b.room_j for b in bounds))


def _before_deadline(job: Job, state: State, ask: Ask, safe: Choice, gpu: Gpu, deadline_s: float) -> Bounds | None:
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
    at = best_limit(job, profile, samples_per_epoch=samples, overheads=known)
    epoch = epoch_at(profile, at, samples_per_epoch=samples, overheads=known)
    elapsed_s = state.current[2] if state.current[0] == ask.recurrence else 0.0
    following_s = following_j / cost_per_s(epoch, known.host_w)
    # The arm to be tried is taken to cost as little a second as anything measured: then a joule lasts longest.
    parts = [Part(1, m.average_power_w, 1.0) for p in profiles.values() for m in p.measurements]
    parts += [known.per_epoch(at.power_limit_w, profile), known.once_each]
    least = min(cost_per_s(part, known.host_w) for part in parts if part.time_s > 0)
    at_most_j = (deadline_s - elapsed_s - following_s) * least
    return Bounds(at_most_j, at_most_j)


def _fits(job: Job, state: State, ask: Ask, choice: Choice, gpu: Gpu, bounds: Bounds) -> bool:
    """Return whether the exploration may begin."""
    samples = ask.samples_per_epoch or state.samples_per_epoch or 1
    known = state.arm_cost(job, choice.batch_size, gpu.key, samples)
    if isinstance(choice.cut, CostCut):
        others = [cost.training + cost.beside for cost in state.arm_costs(job, gpu.key, samples).values()]
        first_j = known.training + known.beside if known else (1 + PROFILING) * max(others, default=math.inf)
        return 0 < choice.cut.threshold_j <= bounds.at_most_j and first_j <= bounds.at_most_j
    if not isinstance(choice.cut, PlannedCut):
        return False
    if known is None:
        believed_j = _cost(choice, LIKELY)
        if believed_j is None:
            return False
        epoch_j = believed_j / math.exp(min(choice.cut.log_epochs + 0.5 * choice.cut.noise, 50.0))
        return (1 + PROFILING) * epoch_j <= bounds.at_most_j
    epoch_j = known.training + known.beside
    allowed = epochs_allowed(choice.cut, epoch_cost_j=epoch_j, max_epochs=job.max_epochs, once_j=known.once)
    return chance_to_complete(choice.cut, allowed) >= WORTH_TRYING


def _cost(choice: Choice, deviations: float) -> float | None:
    """Return what a run of the chosen arm may cost, so many standard deviations above what is expected."""
    believed = choice.run_cost()
    return None if believed is None else believed.likely_j(deviations)


def _held_back(safe: Choice, wished: Choice, why: str) -> Choice:
    text = f"{safe.reason.text}; batch size {wished.batch_size} is not tried: {why}"
    return replace(safe, reason=replace(safe.reason, kind=ReasonKind.HELD_BACK, text=text))
