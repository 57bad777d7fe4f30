"""What is believed of EpochCost(b): measured where a batch size was profiled, guessed from its neighbours elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from zeus_flows.core.gaussian import Floats, condition, kernel, plus_diagonal

# log EpochCost(b), in octaves from the arm that stands for b0: a mean that bows upwards, and a kernel
BOW = 0.03
SLOPE = 0.4
BEND = 0.25
STEP = 0.06
NOISE = 1e-4  # standard deviation of a measured log epoch cost

# log of the ratio between two GPUs' epoch costs: one factor for all arms, and what it does from octave to octave
RATIO = 1.0
RATIO_SLOPE = 0.05
RATIO_STEP = 0.04


def epoch_costs(
    batch_sizes: tuple[int, ...],
    default_batch_size: int,
    measured: Mapping[int, float],
    elsewhere: Sequence[Mapping[int, float]] = (),
) -> tuple[Floats, Floats]:
    """Return mean and covariance of log EpochCost(b) of every arm, in log joules.

    Args:
        batch_sizes: The arms.
        default_batch_size: b0; the nearest arm with a cost stands in for it where it has none.
        measured: Epoch costs from profiles on this GPU, in joules.
        elsewhere: Epoch costs from other GPUs' profiles, one mapping for each.
    """
    others = tuple(tuple(costs.items()) for costs in elsewhere if costs)
    return _epoch_costs(batch_sizes, default_batch_size, tuple(measured.items()), others)


def whole_epochs(mean: Floats, covariance: Floats, beside: Floats, doubt: Floats) -> tuple[Floats, Floats]:
    """Return mean and covariance of the log of a sum: what steps cost, and what lies beside them in an epoch.

    Args:
        mean: Of the log cost of an epoch's steps.
        covariance: Of the same.
        beside: What an epoch costs beside its steps.
        doubt: Standard deviation of the log of that.
    """
    steps = np.exp(mean)
    whole = steps + beside
    share = steps / whole
    spread = covariance * np.multiply.outer(share, share)
    return np.log(whole), plus_diagonal(spread, ((1 - share) * doubt) ** 2)


@lru_cache(maxsize=1024)
def _epoch_costs(
    batch_sizes: tuple[int, ...],
    default_batch_size: int,
    measured: tuple[tuple[int, float], ...],
    elsewhere: tuple[tuple[tuple[int, float], ...], ...],
) -> tuple[Floats, Floats]:
    if not measured and not elsewhere:
        return np.zeros(len(batch_sizes)), np.zeros((len(batch_sizes), len(batch_sizes)))
    x0 = math.log2(default_batch_size)
    known = dict(measured or elsewhere[0])
    anchor = min(known, key=lambda b: (abs(math.log2(b) - x0), b))
    bow, covariance = _prior(batch_sizes, anchor)
    seen = np.array([batch_sizes.index(b) for gpu in (measured, *elsewhere) for b, _ in gpu])
    values = np.log([cost for gpu in (measured, *elsewhere) for _, cost in gpu])
    mean, noise = bow + math.log(known[anchor]), np.full(len(seen), NOISE**2)
    if not elsewhere:
        return condition(mean, covariance, seen, values, noise)
    ratios = np.zeros((len(seen), len(seen)))
    begin = len(measured)
    for gpu in elsewhere:
        its = slice(begin, begin + len(gpu))
        ratios[its, its] = _ratio(batch_sizes, anchor)[np.ix_(seen[its], seen[its])]
        if begin:  # else the level is this GPU's, and its factor is in what is returned
            ratios[its, its] += RATIO**2
        begin += len(gpu)
    cross = covariance[seen]
    gain = np.linalg.solve(plus_diagonal(cross[:, seen] + ratios, noise), cross)
    factor = 0.0 if measured else RATIO**2
    return mean + (values - mean[seen]) @ gain, covariance - cross.T @ gain + factor


@lru_cache(maxsize=256)
def _prior(batch_sizes: tuple[int, ...], anchor: int) -> tuple[Floats, Floats]:
    octaves = np.log2(np.array(batch_sizes, dtype=float)) - math.log2(anchor)
    return BOW * octaves**2, kernel(octaves, slope=SLOPE, bend=BEND, step=STEP)


@lru_cache(maxsize=256)
def _ratio(batch_sizes: tuple[int, ...], anchor: int) -> Floats:
    """Return the covariance of the log ratio between GPUs, beside the factor that all arms share."""
    octaves = np.log2(np.array(batch_sizes, dtype=float)) - math.log2(anchor)
    return kernel(octaves, slope=RATIO_SLOPE, bend=0.0, step=RATIO_STEP)
