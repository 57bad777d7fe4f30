"""What is believed of EpochCost(b): measured where a batch size was profiled, guessed from its neighbours elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from zeus_flows.core.gaussian import Floats, condition, kernel, plus_diagonal

# log EpochCost(b), in octaves from the arm that stands for b0: a mean that bows upwards, and a kernel
BOW = 0.03
SLOPE = 0.4
BEND = 0.25
STEP = 0.06
NOISE = 1e-4  # standard deviation of a measured log epoch cost
TRANSLATED = 0.15  # the same where it comes from another GPU's profile


def epoch_costs(
    batch_sizes: tuple[int, ...],
    default_batch_size: int,
    measured: Mapping[int, float],
    translated: Mapping[int, float],
) -> tuple[Floats, Floats]:
    """Return mean and covariance of log EpochCost(b) of every arm, in log joules.

    Args:
        batch_sizes: The arms.
        default_batch_size: b0; the nearest arm with a cost stands in for it where it has none.
        measured: Epoch costs from profiles on this GPU, in joules.
        translated: Estimates from another GPU's profiles, for arms without a measured one.
    """
    guessed = tuple((b, c) for b, c in translated.items() if b not in measured)
    return _epoch_costs(batch_sizes, default_batch_size, tuple(measured.items()), guessed)


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
    measured_items: tuple[tuple[int, float], ...],
    translated_items: tuple[tuple[int, float], ...],
) -> tuple[Floats, Floats]:
    measured = dict(measured_items)
    known = {**dict(translated_items), **measured}
    seen = [i for i, b in enumerate(batch_sizes) if b in known]
    if not seen:
        return np.zeros(len(batch_sizes)), np.zeros((len(batch_sizes), len(batch_sizes)))
    x0 = math.log2(default_batch_size)
    anchor = batch_sizes[min(seen, key=lambda i: (abs(math.log2(batch_sizes[i]) - x0), i))]
    values = np.log([known[batch_sizes[i]] for i in seen])
    noise = np.array([NOISE if batch_sizes[i] in measured else TRANSLATED for i in seen]) ** 2
    bow, covariance = _prior(batch_sizes, anchor)
    return condition(bow + math.log(known[anchor]), covariance, np.array(seen), values, noise)


@lru_cache(maxsize=256)
def _prior(batch_sizes: tuple[int, ...], anchor: int) -> tuple[Floats, Floats]:
    octaves = np.log2(np.array(batch_sizes, dtype=float)) - math.log2(anchor)
    return BOW * octaves**2, kernel(octaves, slope=SLOPE, bend=BEND, step=STEP)
