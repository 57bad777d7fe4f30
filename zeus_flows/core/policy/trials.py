"""Trying an arm to learn: because it is expected to pay, or because nothing has ruled it out.

A belief can be too sure of itself. An arm that never reached the target is ruled out only by its own runs, so that it
gets a look now and then: a few epochs where learning curves can be compared, else as many as a run of the best known
arm costs. A job whose looks find nothing looks less. Looks are rare but never over: what they may cost together grows
with the logarithm of the number of runs, and one takes place whenever that number has doubled since the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from zeus_flows.core.belief import A_LOOK
from zeus_flows.core.early_stop import Cut, plan_many
from zeus_flows.core.gaussian import Floats, nearest
from zeus_flows.core.policy.base import LARGEST_LOG, Choice, from_log
from zeus_flows.core.policy.outlook import Outlook, numbers, octaves
from zeus_flows.core.reasons import Explanation, Reason, ReasonKind
from zeus_flows.core.text import cost_text, times

# five-point Gauss-Hermite quadrature over an unknown log epoch cost
_POINTS, _WEIGHTS = np.polynomial.hermite_e.hermegauss(5)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()

ALLOWANCE = 0.4  # runs of the best known arm that looks may cost together, for each e-fold of runs so far
JUMPS = 0.2  # probability that epochs do at an arm what no law says
JUMP = 0.7  # standard deviation of that, in log epochs for an octave
SHORTEST_LOOK = 2  # epochs
LOOK_HORIZON = 20.0  # as `outlook.HORIZON`, for looks ...
LOOK_HORIZON_GROWTH = 0.02  # ... and as `outlook.HORIZON_GROWTH`
LATEST = 200  # runs after which a look is due, whatever it is worth: ...
TIMES = 2  # ... the first one, and then whenever so many times the runs have completed as at the last one
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

    @property
    def pays(self) -> bool:
        """Whether it is expected to bring more than it costs."""
        return self.worth > self.price


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
    epochs, chosen = outlook.belief.posterior, np.array(arms)
    mean, variance, noise = epochs.mean[chosen], epochs.variance[chosen], epochs.noise[chosen]
    never = np.array([outlook.never(arm) for arm in arms])
    log_j, once_j = outlook.costs[0][chosen], None if outlook.once is None else outlook.once[chosen]
    unprofiled = [outlook.unprofiled[arm] for arm in arms]
    if any(unprofiled):
        mean, variance, noise, never, log_j = (v[:, None] for v in (mean, variance, noise, never, log_j))
        log_j = log_j + np.sqrt(outlook.cost_variance[chosen])[:, None] * _POINTS
        once_j = None if once_j is None else once_j[:, None]
    per_epoch = np.exp(np.minimum(log_j, LARGEST_LOG))
    planned = plan_many(
        log_epochs=mean,
        variance=variance,
        noise=noise,
        never=never,
        epoch_cost_j=per_epoch,
        best_cost_j=outlook.best_cost_j,
        horizon=outlook.horizon,
        max_epochs=outlook.job.max_epochs,
        once_j=once_j,
    )
    if not any(unprofiled):
        return planned
    profiling = (outlook.belief.profiling_ratio - 1) * np.array(unprofiled)[:, None] * per_epoch
    expected: Floats = (planned + profiling) @ _WEIGHTS
    return expected


def trial_cut(outlook: Outlook, arm: int) -> Cut:
    """Return the cut of a trial: one that is not stopped before its learning curve tells something, if that pays."""
    if outlook.belief.runs[arm] or outlook.belief.reference(arm) is None:
        return outlook.planned_cut(arm)
    looks = _looks(outlook, [arm], room=_room(outlook))
    return outlook.planned_cut(arm, at_least=looks[0].epochs if looks and looks[0].pays else 1)


def best_look(outlook: Outlook) -> Choice | None:
    """Return a look at the arm where that is worth most beyond its price, or one that is due, or None.

    Arms that never reached the target are looked at, from one beyond the smallest that ever ran to one beyond the
    largest. Whatever is believed of them, one is due after `LATEST` runs, and again whenever the job has run `TIMES` as
    long as at the last look; then those that were looked at least are weighed.
    """
    belief, job = outlook.belief, outlook.job
    if outlook.view.ask.attempt > 1:
        return None
    reach = range(max(outlook.tried[0] - 1, 0), min(outlook.tried[-1] + 2, len(job.batch_sizes)))
    arms = [arm for arm in reach if not belief.runs[arm] and outlook.alive[arm]]
    if not arms:
        return None
    looks = [look for look in _looks(outlook, arms, room=_room(outlook)) if look.pays]
    if not looks and belief.completions >= max(LATEST, TIMES * outlook.last_look):
        fewest = min(belief.stopped[arm].count for arm in arms)
        looks = _looks(outlook, [arm for arm in arms if belief.stopped[arm].count == fewest])
    if not looks:
        return None
    look = max(looks, key=lambda look: (look.worth - look.price, look.arm))
    batch_size, best = job.batch_sizes[look.arm], job.batch_sizes[outlook.incumbent or 0]

    def tell() -> Explanation:
        before = belief.stopped[look.arm]
        tried = f"was stopped after {before.longest} at most" if before.count else "has not run yet"
        why = "nothing of its own has ruled it out"
        if not look.pays:
            why = f"looks are never over (the last was {belief.completions - outlook.last_look} runs ago)"
        text = (
            f"batch size {batch_size} {tried}, and {why}: a look of up to {look.epochs} "
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


def _looks(outlook: Outlook, arms: Sequence[int], *, room: float = math.inf) -> list[Look]:
    """Return looks at some arms, without those that would cost more than there is `room` for.

    What one brings is E[(C_best - C)+] over the horizon, under the chance that epochs jump: log C is Gaussian, as wide
    as a jump from the nearest arm that ran, narrowed by what the arm's own runs said. Where no curve tells before the
    end, it goes on to the end, and is no look but a run where the arm is no dearer.
    """
    belief, best_j = outlook.belief, outlook.best_cost_j
    jumps = JUMPS * PATIENCE / (PATIENCE + outlook.fruitless)
    horizon = LOOK_HORIZON + LOOK_HORIZON_GROWTH * belief.completions
    looks = []
    for arm in arms:
        epoch_j, reference = outlook.epoch_j(arm), belief.reference(arm)
        epochs = max(1, math.ceil(min(best_j / epoch_j, outlook.job.max_epochs)))
        if reference is not None:
            longer = max(SHORTEST_LOOK, math.ceil(A_LOOK * reference.epochs), 2 * belief.stopped[arm].longest)
            epochs = min(longer, epochs)
        price = epochs * epoch_j / best_j
        if price > room:
            continue
        mean, deviation = _jump(outlook, arm)
        off = mean - math.log(best_j)
        chance = float(ndtr(-off / deviation))
        gain = chance - math.exp(min(off + 0.5 * deviation**2, 50.0)) * float(ndtr(-off / deviation - deviation))
        spared = price * chance if reference is None else 0.0
        looks.append(Look(arm, epochs, price, worth=jumps * (horizon * gain + spared)))
    return looks


def _room(outlook: Outlook) -> float:
    """Return what looks may still cost together, in runs of the best known arm."""
    return ALLOWANCE * math.log1p(outlook.belief.completions) - outlook.wasted


def _jump(outlook: Outlook, arm: int) -> tuple[float, float]:
    """Return mean and deviation of an arm's log cost, should its epochs do what no law says.

    Then they are as at the nearest arm that completed, give or take a jump: where laws expect more with each octave,
    what lies behind a dearer arm would never be looked at.
    """
    belief, posterior = outlook.belief, outlook.belief.posterior
    arms = outlook.job.batch_sizes
    x, ran = octaves(arms), [i for i in outlook.tried if i != arm]
    far = abs(x[nearest(arms, ran, arm)] - x[arm])
    mean = float(posterior.mean[nearest(arms, outlook.done, arm)])
    variance, said = JUMP**2 * max(far, 0.5) + float(posterior.variance[arm]), belief.unfinished[arm]
    off = mean - float(posterior.mean[arm])
    if said is not None:
        narrowed = 1 / (1 / variance + 1 / said.variance)
        off += narrowed / said.variance * (said.log_epochs - mean)
        variance = narrowed
    return float(outlook.mu[arm]) + off, math.sqrt(variance + float(outlook.cost_variance[arm]))
