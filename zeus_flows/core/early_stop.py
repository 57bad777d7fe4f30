"""When to stop an attempt: a decision's cut and a measured epoch cost give a number of epochs.

A policy cannot know an untried arm's epoch cost when it decides; the session knows it after the profile.
So the decision carries a rule (numbers only), and the session asks `epochs_allowed` once it can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from scipy.special import ndtr

from zeus_flows.core.gaussian import Floats
from zeus_flows.core.learning_curve import Curve, Forecast, Reference, forecast


@dataclass(frozen=True, slots=True)
class NoCut:
    """Train until the target or max_epochs."""

    tag: ClassVar = "none"


@dataclass(frozen=True, slots=True)
class CostCut:
    """Stop before the attempt's cost would exceed `threshold_j` (beta times the minimum cost, section 4.4)."""

    tag: ClassVar = "cost"
    threshold_j: float


@dataclass(frozen=True, slots=True)
class PlannedCut:
    """Stop after the number of epochs with the least expected cost J(K), given what the run may teach.

    J(K) = sum_{e<=K} P(e) [e c - H (C_best - C'_e)+] + P(E > K) [K c + C_best], where the number of epochs E
    is lognormal(mean, variance + noise) with mass `never` on not reaching the target at all, c is the cost of an
    epoch (evaluation included), H the horizon over which a better arm would pay, and C'_e the cost we would expect
    of the arm after seeing it take e epochs.

    Attributes:
        log_epochs: Posterior mean of log Epochs(b).
        variance: Its posterior variance.
        noise: Run-to-run variance of log epochs.
        never: Probability that the arm never reaches the target.
        best_cost_j: Expected cost of the incumbent.
        horizon: Recurrences over which a better arm would be used.
        at_least: Epochs that are always allowed (an arm that has completed before).
        at_most_j: What the attempt may cost where it may well have to be stopped, whatever the plan says: a deadline
            that must leave enough for the run that follows. None: no bound.
        room_j: Not set any more; decisions of earlier versions carry it.
        reference: A completed run whose learning curve tells, while the attempt trains, how many epochs it will need.
            The plan is made anew with each epoch: one that leads goes on, one that lags is stopped.
        saved_j: What a budget has saved up: the recurrence is expected to cost at most so much more than a run of the
            incumbent (`expected_excess`). None: no bound.
    """

    tag: ClassVar = "planned"
    log_epochs: float
    variance: float
    noise: float
    never: float
    best_cost_j: float
    horizon: float
    at_least: int = 1
    at_most_j: float | None = None
    room_j: float | None = None
    reference: Reference | None = None
    saved_j: float | None = None


MOST_OF_A_TRIAL = 2.0  # runs of the incumbent that an attempt may cost at most, however well its curve looks
LIKELY = 0.5  # under a bound, an attempt less likely to complete is stopped after its profile
EVERY_EPOCH = 10_000  # up to so many, J(K) is computed for every K; beyond, plans must not grow with max_epochs: ...
FINE, COARSE = 2_000, 2_000  # ... every K up to the first, then so many in equal ratios

Cut = NoCut | CostCut | PlannedCut


def epochs_allowed(
    cut: Cut, *, epoch_cost_j: float, max_epochs: int, once_j: float = 0.0, curve: Curve = (), epoch: int = 0
) -> int:
    """Return how many epochs an attempt may train, from 0 to `max_epochs`.

    Args:
        cut: The decision's.
        epoch_cost_j: What an epoch costs, evaluation included.
        max_epochs: An attempt never trains longer.
        once_j: What an attempt costs before its first epoch.
        curve: Its learning curve so far.
        epoch: Epochs it has trained.

    >>> epochs_allowed(CostCut(threshold_j=100.0), epoch_cost_j=30.0, max_epochs=10)
    3
    >>> epochs_allowed(NoCut(), epoch_cost_j=30.0, max_epochs=10)
    10
    """
    match cut:
        case NoCut():
            return max_epochs
        case CostCut(threshold_j):
            if not math.isfinite(threshold_j):
                return max_epochs
            return int(min(max(threshold_j - once_j, 0.0) // epoch_cost_j, max_epochs))
        case PlannedCut():
            allowed = max_epochs
            if cut.at_least < max_epochs:
                foretold = forecast(cut.reference, curve, epoch) if cut.reference is not None else None
                planned, _ = plan(
                    cut,
                    epoch_cost_j=epoch_cost_j,
                    max_epochs=max_epochs,
                    once_j=once_j,
                    foretold=foretold,
                    epoch=epoch,
                )
                if foretold is not None:
                    most = MOST_OF_A_TRIAL * max(cut.best_cost_j - once_j, 0.0) / epoch_cost_j
                    planned = min(planned, max(1, math.ceil(min(most, max_epochs))))
                allowed = max(planned, cut.at_least)
            return _within_bounds(cut, allowed, epoch_cost_j, once_j)


def chance_to_complete(cut: PlannedCut, epochs: int) -> float:
    """Return the probability that the target is reached within so many epochs."""
    z = (math.log(epochs + 0.5) - cut.log_epochs) / math.sqrt(max(cut.variance + cut.noise, 1e-12))
    return (1 - cut.never) * float(ndtr(z))


def expected_excess(cut: PlannedCut, epochs: int, *, epoch_cost_j: float, once_j: float = 0.0) -> float:
    """Return what a recurrence that tries up to so many epochs is expected to cost beyond a run of the incumbent.

    It is J(K) without what the run may teach; below 0 where the arm is expected to be cheaper at once.

    >>> cut = PlannedCut(2.0, 0.01, 0.01, 0.5, best_cost_j=100.0, horizon=10.0)
    >>> round(expected_excess(cut, 1, epoch_cost_j=10.0))  # an epoch for nothing
    10
    >>> round(expected_excess(cut, 12, epoch_cost_j=10.0))  # 12 of them in one case, 7.5 and no other run in the other
    47
    """
    k, _, log_k_half = _epochs_up_to(max(epochs, 1))
    deviation = math.sqrt(max(cut.variance + cut.noise, 1e-12))
    reached = (1 - cut.never) * ndtr((log_k_half - cut.log_epochs) / deviation)
    fails = 1 - float(reached[-1])
    trained = float(np.diff(reached, prepend=0.0) @ k) + fails * epochs
    return once_j + trained * epoch_cost_j - (1 - fails) * cut.best_cost_j


def _within_bounds(cut: PlannedCut, allowed: int, epoch_cost_j: float, once_j: float) -> int:
    if cut.at_most_j is not None:
        allowed = _in_time(cut, cut.at_most_j, allowed, epoch_cost_j, once_j)
    if cut.saved_j is None:
        return allowed
    shorter = range(allowed, 1, -1) if allowed <= EVERY_EPOCH else _epochs_up_to(allowed)[0][:0:-1].astype(int).tolist()
    for epochs in shorter:
        if expected_excess(cut, epochs, epoch_cost_j=epoch_cost_j, once_j=once_j) <= cut.saved_j:
            return epochs
        if chance_to_complete(cut, epochs - 1) < LIKELY:
            break
    return min(allowed, 1)


def _in_time(cut: PlannedCut, at_most_j: float, allowed: int, epoch_cost_j: float, once_j: float) -> int:
    bounded = min(allowed, int(max(at_most_j - once_j, 0.0) // epoch_cost_j))
    return bounded if chance_to_complete(cut, bounded) >= LIKELY else min(bounded, 1)


def capped(cut: Cut, *, at_most_j: float | None = None, saved_j: float | None = None) -> Cut:
    """Return the cut with bounds on what the attempt may cost; see `PlannedCut`.

    >>> capped(NoCut(), at_most_j=100.0, saved_j=200.0)
    CostCut(threshold_j=100.0)
    """
    least = min((j for j in (at_most_j, saved_j) if j is not None), default=math.inf)
    match cut:
        case NoCut():
            return CostCut(least)
        case CostCut(threshold_j):
            return CostCut(min(threshold_j, least))
        case PlannedCut():
            return replace(cut, at_most_j=at_most_j, saved_j=saved_j)


def plan(
    cut: PlannedCut,
    *,
    epoch_cost_j: float,
    max_epochs: int,
    once_j: float = 0.0,
    foretold: Forecast | None = None,
    epoch: int = 0,
) -> tuple[int, float]:
    """Return K* = argmin J(K) and J(K*), in epochs and joules.

    With what a curve has `foretold` after `epoch` epochs, the run's own number of epochs is believed by both, and K* is
    among what is still to come: that `epoch` epochs were not enough changes J(K) by the same for all of those.
    """
    spread = max(cut.variance + cut.noise, 1e-12)
    mean, width, first = cut.log_epochs, spread, 0
    k, _, _ = _epochs_up_to(max_epochs)
    if foretold is not None:
        width = 1 / (1 / spread + 1 / foretold.variance)
        mean = width * (cut.log_epochs / spread + foretold.log_epochs / foretold.variance)
        first = min(int(np.searchsorted(k, epoch)), len(k) - 1)
    expected = _expected_costs(
        mean=mean,
        deviation=math.sqrt(width),
        arm_mean=cut.log_epochs,
        shrink=cut.variance / spread,
        noise=cut.noise,
        never=cut.never,
        per_epoch=epoch_cost_j,
        best_cost_j=cut.best_cost_j,
        horizon=cut.horizon,
        max_epochs=max_epochs,
        once=once_j or None,
    )
    cheapest = first + int(expected[first:].argmin())
    return int(k[cheapest]), float(expected[cheapest])


def plan_many(
    *,
    log_epochs: Floats,
    variance: Floats,
    noise: Floats,
    never: Floats,
    epoch_cost_j: Floats,
    best_cost_j: float,
    horizon: float,
    max_epochs: int,
    once_j: Floats | None = None,
) -> Floats:
    """Return J(K*) for many arms at once; the arrays broadcast against each other."""
    spread = np.maximum(variance + noise, 1e-12)
    expected = _expected_costs(
        mean=log_epochs[..., None],
        deviation=np.sqrt(spread)[..., None],
        arm_mean=log_epochs[..., None],
        shrink=(variance / spread)[..., None],
        noise=noise[..., None],
        never=never[..., None],
        per_epoch=epoch_cost_j[..., None],
        best_cost_j=best_cost_j,
        horizon=horizon,
        max_epochs=max_epochs,
        once=None if once_j is None else once_j[..., None],
    )
    least: Floats = expected.min(axis=-1)
    return least


def _expected_costs(
    *,
    mean: Floats | float,
    deviation: Floats | float,
    arm_mean: Floats | float,
    shrink: Floats | float,
    noise: Floats | float,
    never: Floats | float,
    per_epoch: Floats | float,
    best_cost_j: float,
    horizon: float,
    max_epochs: int,
    once: Floats | float | None,
) -> Floats:
    """Return J(K) for the K of `_epochs_up_to(max_epochs)`, along the last axis; see `PlannedCut`.

    `mean` and `deviation` are those of this run's log epochs, `arm_mean` is the arm's, and `shrink` the share of what
    a run deviates by that is doubt about the arm. What an attempt
    costs `once` is part of what is spent, of every run to come, and of `best_cost_j`.
    """
    k, log_k, log_k_half = _epochs_up_to(max_epochs)
    reached = (1 - never) * ndtr((log_k_half - mean) / deviation)
    at = reached.copy()
    at[..., 1:] -= reached[..., :-1]
    after = per_epoch * np.exp((1 - shrink) * arm_mean + 0.5 * noise + shrink * log_k)
    spent = per_epoch * k
    if once is not None:
        after, spent = after + once, spent + once
    gain = horizon * np.maximum(best_cost_j - after, 0.0)
    expected: Floats = (at * (spent - gain)).cumsum(axis=-1) + (1 - reached) * (spent + best_cost_j)
    return expected


@lru_cache(maxsize=64)
def _epochs_up_to(max_epochs: int) -> tuple[Floats, Floats, Floats]:
    """Return k = 1 .. max_epochs, log k and log(k + 1/2); some thousands of k where max_epochs is far greater."""
    k = np.arange(1, (max_epochs if max_epochs <= EVERY_EPOCH else FINE) + 1, dtype=float)
    if max_epochs > EVERY_EPOCH:
        k = np.concatenate([k, np.round(np.geomspace(FINE, max_epochs, COARSE + 1)[1:])])
    return k, np.log(k), np.log(k + 0.5)
