"""Noticing that epochs to the target have changed: a reset by surprise.

A run is surprising when its log epochs lie many standard deviations from what was believed. One great surprise, two
lesser ones in a row of the same sign, or many small ones that keep to one side (a cumulative sum, CUSUM), and what
was learnt about epochs no longer holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GREAT_SURPRISE = 5.0
SURPRISE_IN_A_ROW = 2.5
ALLOWANCE = 0.75  # deviations that a run may lie off without adding to the cumulative sum
MOST_AT_ONCE = 3.0  # deviations that one run may add at most: the sum is about many
ENOUGH = 6.0  # cumulative sum that says drift
LEAST_NOISE = 0.06  # standard deviation of log epochs below which nothing is a surprise


def surprise(log_epochs: float, *, mean: float, variance: float, noise: float) -> float:
    """Return how many standard deviations a run lies from what was believed of its arm.

    >>> round(surprise(1.0, mean=0.0, variance=0.0, noise=0.25), 6)
    2.0
    """
    return (log_epochs - mean) / math.sqrt(max(variance, 0.0) + max(noise, LEAST_NOISE**2))


@dataclass(frozen=True, slots=True)
class Surprises:
    """What the surprises so far add up to.

    Attributes:
        last: The newest one.
        twice: It and the one before it are great and of one sign.
        rise: How far runs have kept above what was believed.
        fall: How far below.
    """

    last: float | None = None
    twice: bool = False
    rise: float = 0.0
    fall: float = 0.0

    def add(self, now: float) -> Surprises:
        """Return them with one more.

        >>> Surprises().add(3.0).add(2.6).drifted, Surprises().add(3.0).add(-2.6).drifted
        (True, False)
        >>> Surprises().add(5.5).drifted, Surprises().add(4.0).drifted
        (True, False)
        """
        before = self.last
        step = min(max(now, -MOST_AT_ONCE), MOST_AT_ONCE)
        return Surprises(
            last=now,
            twice=before is not None and now * before > 0 and min(abs(now), abs(before)) > SURPRISE_IN_A_ROW,
            rise=max(0.0, self.rise + step - ALLOWANCE),
            fall=max(0.0, self.fall - step - ALLOWANCE),
        )

    @property
    def lasting(self) -> bool:
        """Whether more than the newest run says that epochs have changed."""
        return self.twice or max(self.rise, self.fall) > ENOUGH

    @property
    def drifted(self) -> bool:
        """Whether epochs have changed."""
        return self.lasting or (self.last is not None and abs(self.last) > GREAT_SURPRISE)
