"""Noticing that epochs to the target have changed: a reset by surprise.

A run is surprising when its log epochs lie many standard deviations from what was believed. One great surprise,
or two lesser ones in a row of the same sign, and what was learnt about epochs no longer holds.
"""

from __future__ import annotations

import math

GREAT_SURPRISE = 5.0
SURPRISE_IN_A_ROW = 2.5
LEAST_NOISE = 0.06  # standard deviation of log epochs below which nothing is a surprise


def surprise(log_epochs: float, *, mean: float, variance: float, noise: float) -> float:
    """Return how many standard deviations a run lies from what was believed of its arm.

    >>> round(surprise(1.0, mean=0.0, variance=0.0, noise=0.25), 6)
    2.0
    """
    return (log_epochs - mean) / math.sqrt(max(variance, 0.0) + max(noise, LEAST_NOISE**2))


def drifted(now: float, before: float | None) -> bool:
    """Return whether the newest surprise, with the one before it, says that epochs have changed.

    >>> drifted(5.5, None), drifted(3.0, None), drifted(3.0, 2.6), drifted(3.0, -2.6)
    (True, False, True, False)
    """
    return abs(now) > GREAT_SURPRISE or twice(now, before)


def twice(now: float, before: float | None) -> bool:
    """Return whether two surprises in a row have one sign."""
    return before is not None and now * before > 0 and min(abs(now), abs(before)) > SURPRISE_IN_A_ROW
