"""What a learning curve says before it ends: how far a run is ahead of, or behind, one that reached the target.

Runs of one job pass the same levels of the metric on the way to the same target. A run that took kb epochs to a level
for which a completed one, the reference, took ka of its A epochs, is taken to need A kb / ka in all. If it has not
passed the reference's next level by now, it is at least that much behind. How far this is to be trusted is learnt from
runs of the job that completed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Curve = tuple[tuple[int, float], ...]  # (epoch, best metric so far), ascending

DEVIATION = 0.15  # of what is foretold, in log epochs, just before the end ...
PER_WAY_LEFT = 0.3  # ... and what is added for each unit of log epochs that the reference had still to go
ROUNDING = 0.29  # standard deviation of a number of epochs that is told as a whole one


@dataclass(frozen=True, slots=True)
class Reference:
    """The learning curve of a completed run, to compare another one with.

    Attributes:
        curve: Its last point is where it reached the target.
        doubt: How many times the usual variance such comparisons have had in this job.
    """

    curve: Curve
    doubt: float = 1.0

    @property
    def epochs(self) -> int:
        """Epochs to the target."""
        return self.curve[-1][0]


@dataclass(frozen=True, slots=True)
class Forecast:
    """How many epochs a run will need, as a Gaussian of their logarithm."""

    log_epochs: float
    variance: float


def forecast(reference: Reference, curve: Curve, epoch: int) -> Forecast | None:
    """Return what a run's curve so far foretells; None where the two have nothing to compare.

    Args:
        reference: A completed run of the same job.
        curve: The run's own, so far.
        epoch: Epochs it has trained.

    >>> reference = Reference(((1, 0.2), (4, 0.5), (16, 0.8)))
    >>> ahead, behind = forecast(reference, ((2, 0.5),), 2), forecast(reference, ((8, 0.5),), 8)
    >>> round(math.exp(ahead.log_epochs)), round(math.exp(behind.log_epochs))
    (8, 32)
    """
    if len(reference.curve) < 2 or not curve or epoch < 1:
        return None
    sign = 1.0 if reference.curve[-1][1] > reference.curve[0][1] else -1.0
    level = sign * curve[-1][1]
    passed = [(at, sign * metric) for at, metric in reference.curve if sign * metric >= level]
    if not passed:
        return None
    there = passed[0][0]
    beyond = next((at for at, metric in passed if metric > level), reference.epochs)
    here = curve[-1][0]
    if epoch / beyond > here / there:
        here, there = epoch, beyond
    way_left = math.log(reference.epochs / there)
    variance = reference.doubt * (DEVIATION**2 + (PER_WAY_LEFT * way_left) ** 2)
    rounding = (ROUNDING / here) ** 2 + (ROUNDING / there) ** 2
    return Forecast(math.log(reference.epochs) + math.log(here / there), variance + rounding)


def seen_by(curve: Curve, epoch: int) -> Curve:
    """Return a curve as far as it was known after an epoch.

    >>> seen_by(((1, 0.2), (4, 0.5), (16, 0.8)), 5)
    ((1, 0.2), (4, 0.5))
    """
    return tuple(point for point in curve if point[0] <= epoch)
