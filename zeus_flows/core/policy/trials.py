"""Trying an arm to learn: because it is expected to pay, or because nothing has ruled it out.

A belief can be too sure of itself. An arm that never reached the target is ruled out only by its own runs, so that it
gets a look now and then: a few epochs where learning curves can be compared, else as many as a run of the best known
arm costs. A job whose looks find nothing looks less. Looks are rare but never over: what they may cost together grows
with the logarithm of the number of runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from zeus_flows.core.belief import A_LOOK
from zeus_flows.core.early_stop import Cut, plan_many
from zeus_flows.core.gaussian import Floats
from zeus_flows.core.policy.base import LARGEST_LOG, Choice, from_log
from zeus_flows.core.policy.outlook import Outlook, numbers, octaves
from zeus_flows.core.reasons import Explanation, Reason, ReasonKind
from zeus_flows.core.text import cost_text, times

# five-point Gauss-Hermite quadrature over an unknown log epoch cost
_POINTS, _WEIGHTS = np.polynomial.hermite_e.hermegauss(5)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()
_ONE_POINT, _ONE_WEIGHT = np.zeros(1), np.ones(1)  # the same where all of them are known

ALLOWANCE = 0.4  # runs of the best known arm that looks may cost together, for each e-fold of runs so far
JUMPS = 0.2  # probability that epochs do at an arm what no law says
JUMP = 0.7  # standard deviation of that, in log epochs for an octave
SHORTEST_LOOK = 2  # epochs
LOOK_HORIZON = 20.0  # as `outlook.HORIZON`, for looks ...
LOOK_HORIZON_GROWTH = 0.02  # ... and as `outlook.HORIZON_GROWTH`
PATIENCE = 4.0  # looks that found nothing after which a jump is half as probable


@dataclass(frozen=True, slots=True)
class Look:
    """A trial of an arm that the belief expects little of.

    Attributes:
        arm: Which arm.
        epochs: How long; twice as long as the longest so far, up to what a run of the best known arm costs.
        price: What that costs, in runs of the best known arm.
        worth: What it is expected to bring, in the same units.
    """

    arm: int
    epochs: int
    price: float
    worth: float


def best_trial(outlook: Outlook, arms: Sequence[int]) -> Choice | None:
    """Return the arm whose trial is expected to pay most, or None where none is expected to pay.

    J of an arm (see `PlannedCut`) counts its cost up to the best cut, a run of the incumbent where it is stopped,
    and what a cheaper arm would save over the horizon; it pays where that is less than a run of the incumbent.
    """
    if not arms:
        return None
    best_j = outlook.best_cost_j
    expected = _trial_costs(outlook, arms)
    cheapest = int(expected.argmin())
    gain_j = best_j - float(expected[cheapest])
    if gain_j <= 0:
        return None
    job, best, arm = outlook.job, outlook.incumbent, arms[cheapest]
    assert best is not None
    batch_size, runs = job.batch_sizes[arm], outlook.belief.runs[arm]

    def tell() -> Explanation:
        text = (
            f"trying batch size {batch_size} is expected to pay by {cost_text(job, gain_j)} within "
            f"{outlook.horizon:.0f} recurrences: a run is believed to cost about "
            f"{cost_text(job, from_log(float(outlook.mu[arm])))} (give or take "
            f"{100 * float(outlook.deviation[arm]):.0f} %) against {cost_text(job, best_j)} for "
            f"{job.batch_sizes[best]}, the best known; {times(runs)} so far{outlook.law}"
        )
        gains = {a: best_j - j for a, j in zip(arms, expected.tolist(), strict=True)}
        return text, outlook.arms(gains=gains)

    kind = ReasonKind.RETRY if outlook.view.ask.attempt > 1 else ReasonKind.EXPLORE
    return Choice(
        batch_size,
        Reason.later(kind, tell, {**numbers(outlook), "gain_j": gain_j}),
        cut=trial_cut(outlook, arm),
        explores=True,
        run_cost=lambda: outlook.run_cost(arm),
    )


def _trial_costs(outlook: Outlook, arms: Sequence[int]) -> Floats:
    """Return J of some arms, in joules: averaged over the epoch cost where it has not been measured."""
    epochs = outlook.belief.posterior
    mean = outlook.costs[0]
    unprofiled = np.array([[outlook.unprofiled[arm]] for arm in arms])
    points, weights = (_POINTS, _WEIGHTS) if unprofiled.any() else (_ONE_POINT, _ONE_WEIGHT)
    column = np.array(arms)[:, None]
    deviation = np.sqrt(outlook.cost_variance[column])
    per_epoch = np.exp(np.minimum(mean[column] + deviation * points, LARGEST_LOG))
    _, planned = plan_many(
        log_epochs=epochs.mean[column],
        variance=epochs.variance[column],
        noise=epochs.noise[column],
        never=np.array([[outlook.never(arm)] for arm in arms]),
        epoch_cost_j=per_epoch,
        best_cost_j=outlook.best_cost_j,
        horizon=outlook.horizon,
        max_epochs=outlook.job.max_epochs,
        once_j=None if outlook.once is None else outlook.once[column],
    )
    profiling = (outlook.belief.profiling_ratio - 1) * unprofiled * per_epoch
    expected: Floats = (planned + profiling) @ weights
    return expected


def trial_cut(outlook: Outlook, arm: int) -> Cut:
    """Return the cut of a trial: one that is not stopped before its learning curve tells something, if that pays."""
    if outlook.belief.runs[arm] or outlook.belief.reference(arm) is None:
        return outlook.planned_cut(arm)
    look = look_at(outlook, arm)
    return outlook.planned_cut(arm, at_least=1 if look is None else look.epochs)


def best_look(outlook: Outlook) -> Choice | None:
    """Return a look at the arm where that is worth most beyond its price, or None where none pays.

    Arms that never reached the target are looked at, from one beyond the smallest that ever ran to one beyond the
    largest.
    """
    belief, job = outlook.belief, outlook.job
    if outlook.view.ask.attempt > 1:
        return None
    reach = range(max(outlook.tried[0] - 1, 0), min(outlook.tried[-1] + 2, len(job.batch_sizes)))
    arms = [arm for arm in reach if outlook.alive[arm] and not belief.runs[arm]]
    paying = [look for arm in arms if (look := look_at(outlook, arm)) is not None]
    look = max(paying, key=lambda look: (look.worth - look.price, look.arm), default=None)
    if look is None:
        return None
    batch_size, best = job.batch_sizes[look.arm], job.batch_sizes[outlook.incumbent or 0]

    def tell() -> Explanation:
        before = belief.stopped[look.arm]
        tried = f"was stopped after {before.longest} at most" if before.count else "has not run yet"
        text = (
            f"batch size {batch_size} {tried}, and nothing of its own has ruled it out: a look of up to {look.epochs} "
            f"epochs, for {100 * look.price:.0f} % of a run of {best}, the best known{outlook.law}"
        )
        return text, outlook.arms()

    return Choice(
        batch_size,
        Reason.later(ReasonKind.EXPLORE, tell, {**numbers(outlook), "price": look.price, "worth": look.worth}),
        cut=outlook.planned_cut(look.arm, at_least=look.epochs),
        explores=True,
        run_cost=lambda: outlook.run_cost(look.arm),
    )


def look_at(outlook: Outlook, arm: int) -> Look | None:
    """Return a look at an arm; None where it would not pay, or take more than looks may cost together.

    What it brings is E[(C_best - C)+] over the horizon, under the chance that epochs jump: log C is Gaussian, as wide
    as a jump from the nearest arm that ran, narrowed by what the arm's own runs said.
    """
    belief, best_j, epoch_j = outlook.belief, outlook.best_cost_j, outlook.epoch_j[arm]
    room = ALLOWANCE * math.log1p(belief.completions) - outlook.wasted
    if room * best_j < epoch_j:
        return None
    reference = belief.reference(arm)
    epochs = max(1, math.ceil(min(best_j / epoch_j, outlook.job.max_epochs)))
    if reference is not None:
        epochs = min(max(SHORTEST_LOOK, math.ceil(A_LOOK * reference.epochs), 2 * belief.stopped[arm].longest), epochs)
    price = epochs * epoch_j / best_j
    if price > room:
        return None
    mean, deviation = _jump(outlook, arm)
    off = mean - math.log(best_j)
    chance = float(ndtr(-off / deviation))
    gain = chance - math.exp(min(off + 0.5 * deviation**2, 50.0)) * float(ndtr(-off / deviation - deviation))
    jumps = JUMPS * PATIENCE / (PATIENCE + outlook.fruitless)
    if reference is None:
        price *= 1 - jumps * chance
    worth = jumps * (LOOK_HORIZON + LOOK_HORIZON_GROWTH * belief.completions) * gain
    return Look(arm, epochs, price, worth) if worth > price else None


def _jump(outlook: Outlook, arm: int) -> tuple[float, float]:
    """Return mean and deviation of an arm's log cost, should its epochs do what no law says."""
    belief, posterior = outlook.belief, outlook.belief.posterior
    x = octaves(outlook.job.batch_sizes)
    far = min(abs(x[i] - x[arm]) for i in outlook.tried if i != arm)
    variance = JUMP**2 * max(far, 0.5) + float(posterior.variance[arm])
    off, said = 0.0, belief.unfinished[arm]
    if said is not None:
        narrowed = 1 / (1 / variance + 1 / said.variance)
        off = narrowed / said.variance * (said.log_epochs - float(posterior.mean[arm]))
        variance = narrowed
    return float(outlook.mu[arm]) + off, math.sqrt(variance + float(outlook.cost_variance[arm]))
