"""Gaussian processes over octaves of the batch size, for a handful of arms."""

from __future__ import annotations

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
