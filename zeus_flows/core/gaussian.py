"""Gaussian processes over octaves of the batch size, for a handful of arms."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]


def kernel(octaves: Floats, *, slope: float, bend: float, step: float) -> Floats:
    """Return a covariance: linear, plus an integrated and a plain random walk away from octave 0 on either side."""
    far = np.abs(octaves)
    near, off = np.minimum.outer(far, far), np.maximum.outer(far, far)
    same_side = np.multiply.outer(np.sign(octaves), np.sign(octaves)) > 0
    walks = bend**2 * near**2 * (3 * off - near) / 6 + step**2 * near
    covariance: Floats = slope**2 * np.multiply.outer(octaves, octaves) + same_side * walks
    return covariance + 1e-9 * np.eye(len(octaves))


def condition(mean: Floats, covariance: Floats, seen: Integers, values: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """Return mean and covariance of a Gaussian after seeing some of its components through noise."""
    if not len(seen):
        return mean, covariance
    cross = covariance[seen]
    gain = np.linalg.solve(plus_diagonal(cross[:, seen], noise), cross)
    return mean + (values - mean[seen]) @ gain, covariance - cross.T @ gain


def plus_diagonal(matrix: Floats, diagonal: Floats) -> Floats:
    """Add to the diagonal of a square matrix, in place."""
    matrix.flat[:: len(matrix) + 1] += diagonal
    return matrix


def nearest(batch_sizes: Sequence[int], arms: Sequence[int], arm: int) -> int:
    """Return which of some other arms, ascending, is the fewest octaves from an arm; of two as near the smaller.

    >>> nearest((8, 16, 32, 64), (0, 1, 3), 2)
    1
    """
    above = bisect(arms, arm)
    if above == 0 or above == len(arms):
        return arms[above - 1 if above else 0]
    low, high = arms[above - 1], arms[above]
    return low if batch_sizes[arm] ** 2 <= batch_sizes[low] * batch_sizes[high] else high
