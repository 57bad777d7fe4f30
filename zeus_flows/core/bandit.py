"""Gaussian Thompson sampling (section 4.3, Algorithms 1 and 2), and the running statistics beliefs are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import erfcx

RELATIVE_NOISE = 0.1  # what one run's cost is expected to vary by before anything was seen
LEAST_NOISE = 0.01  # the same for draws: just enough that two equal costs make no arm certain
NOISE_WEIGHT = 2.0  # how many runs either expectation is worth
FAR = 30.0  # deviations; a run that was stopped so far below the mean says nothing, one so far above it is a whole run


@dataclass(frozen=True, slots=True)
class Runs:
    """Number, mean and sum of squared deviations of some values; all of them, or the newest `window`.

    Without a window nothing grows with the number of values; with one, only the newest are kept. The number is
    not whole where values have been discounted.

    >>> runs = Runs().add(1.0).add(3.0)
    >>> runs.count, runs.mean, runs.squares
    (2, 2.0, 2.0)
    >>> Runs().add(1.0, window=2).add(3.0, window=2).add(5.0, window=2).mean
    4.0
    """

    count: float = 0
    mean: float = 0.0
    squares: float = 0.0
    newest: tuple[float, ...] = ()

    def add(self, value: float, *, window: int | None = None) -> Runs:
        """Return the statistics with one more value."""
        if window is None:
            count = self.count + 1
            step = value - self.mean
            mean = self.mean + step / count
            return Runs(count, mean, self.squares + step * (value - mean))
        newest = (*self.newest, value)[-window:]
        mean = math.fsum(newest) / len(newest)
        return Runs(len(newest), mean, math.fsum((v - mean) ** 2 for v in newest), newest)

    def discounted(self, factor: float) -> Runs:
        """Return the statistics with every value counting for less."""
        return Runs(self.count * factor, self.mean, self.squares * factor, self.newest)

    @property
    def variance(self) -> float:
        """The population variance, as Algorithm 2 has it (line 2); 0 where there is at most one value."""
        return self.squares / self.count if self.count else 0.0


class Belief(NamedTuple):
    """What is believed of an arm's mean cost: a Gaussian."""

    mean: float
    variance: float


def learnt_variance(runs: Runs, *, expecting: float = RELATIVE_NOISE) -> float:
    """Return the variance of one run's cost (Algorithm 2, line 2), learnt without ever becoming certain.

    A variance of two nearly equal costs says little: the expectation that costs vary by some share of their mean
    weighs as much as `NOISE_WEIGHT` runs.

    Args:
        runs: The arm's costs.
        expecting: That share.
    """
    expected = (expecting * runs.mean) ** 2
    return (NOISE_WEIGHT * expected + runs.squares) / (NOISE_WEIGHT + max(runs.count - 1, 0))


def with_stopped(runs: Runs, stopped: Runs, *, variance: float) -> Runs:
    """Return an arm's runs with those that were stopped: right-censored, each greater than where it was stopped.

    With s² = `variance`, z = (stopped - mean)/s and the hazard h = phi(z)/(1 - Phi(z)) a stopped run weighs
    w = h (h - z) of a whole one, at mean + s/(h - z): one Newton step of the likelihood. One that was stopped far below
    the mean weighs nothing, one far above it is a run that just ended there. Stopped runs are taken at their mean.

    >>> costs = Runs().add(9.0).add(11.0)
    >>> [round(with_stopped(costs, Runs().add(at), variance=1.0).mean, 2) for at in (1.0, 10.0, 20.0)]
    [10.0, 10.3, 13.38]

    Args:
        runs: What reached the target; at least one.
        stopped: What did not, at what it took until then.
        variance: Of one run.
    """
    if not stopped.count or variance <= 0.0:
        return runs
    deviation = math.sqrt(variance)
    z = (stopped.mean - runs.mean) / deviation
    weight, value = 1.0, stopped.mean
    if z < FAR:
        z = max(z, -FAR)
        hazard = math.sqrt(2 / math.pi) / float(erfcx(z / math.sqrt(2)))
        weight, value = hazard * (hazard - z), runs.mean + deviation / (hazard - z)
    count = runs.count + stopped.count * weight
    mean = runs.mean + stopped.count * weight * (value - runs.mean) / count
    between = runs.count * (runs.mean - mean) ** 2 + stopped.count * weight * (value - mean) ** 2
    return Runs(count, mean, runs.squares + between)


def observe(runs: Runs, *, variance: float, prior: tuple[float, float] | None = None) -> Belief:
    """Return the posterior of an arm's mean cost after its runs (Algorithm 2, lines 3 and 4).

    Args:
        runs: The arm's costs.
        variance: Variance of one run's cost (line 2: learnt).
        prior: Mean and variance before any run; None: flat.

    >>> observe(Runs().add(1.0).add(3.0), variance=1.0)
    Belief(mean=2.0, variance=0.5)
    """
    count, mean = runs.count, runs.mean
    if count and variance == 0.0:
        return Belief(mean, 0.0)
    precision = count / variance if count else 0.0
    weighted = precision * mean
    if prior is not None:
        precision += 1 / prior[1]
        weighted += prior[0] / prior[1]
    if precision == 0.0:
        return Belief(0.0, math.inf)
    return Belief(weighted / precision, 1 / precision)


def predict(beliefs: Mapping[int, Belief], rng: np.random.Generator) -> dict[int, float]:
    """Return a mean cost drawn for every arm; the smallest draw is the arm to run (Algorithm 1)."""
    return {arm: float(rng.normal(b.mean, math.sqrt(b.variance))) for arm, b in beliefs.items()}
