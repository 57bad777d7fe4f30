"""How epochs to the target may depend on the batch size: a mixture of laws, and what runs say of it.

Theory and data agree on E(b) = E_min (1 + b / B_crit): epochs hardly change below the critical batch size and double
with each doubling far above it. Where B_crit lies is not known, so each place it may have, from far below b0 to far
above, is one law. Around its law a job deviates as a Gaussian process over octaves, narrow or wide. Runs say how
likely each law and each width is; the belief is the mixture of them all.

Above b0 all laws have the same mean, a slight growth: with laws on that side too, a single unlucky run there looks
like a critical batch size and keeps the job from larger ones.

The constants are priors that were tuned; docs/policies.md says on what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from zeus_flows.core.gaussian import Floats, Integers, kernel
from zeus_flows.core.lazy import lazy

CRITICAL = tuple(range(-4, 9))  # octaves from b0 at which the critical batch size may lie: one law each
MEAN = 2.0  # log epochs at b0 ...
LEVEL = 3.0  # ... of which nothing is known beforehand
SLOPE_ABOVE = 0.1  # growth of log epochs per octave above b0

# deviations from a law, in octaves from b0
SLOPE = 0.1
BEND = 0.08
STEP = 0.03
OWN = 0.03  # an independent deviation of each arm, so that enough runs always win over neighbours
WIDTHS = (1.0, 2.0, 4.0)
ODDS = (4.0, 2.0, 1.0)  # of each width, before any run


@dataclass(frozen=True)
class Posterior:
    """log Epochs(b) of every arm: means, covariance, run-to-run noise variance, and how likely each law is."""

    mean: Floats
    covariance: Floats
    noise: Floats
    laws: Floats

    @lazy
    def variance(self) -> Floats:
        """The posterior variance of every arm."""
        return np.maximum(self.covariance.diagonal(), 1e-9)


def posterior(
    batch_sizes: tuple[int, ...],
    default_batch_size: int,
    *,
    seen: Integers,
    values: Floats,
    variances: Floats,
    noise: Floats,
) -> Posterior:
    """Return what is believed of log Epochs(b) after some arms were seen.

    With r_q the residuals from law q and S = K + diag(variances) for a width, that pair's weight is its odds times
    |S|^-1/2 exp(-r_q' S^-1 r_q / 2), and its Gaussian is conditioned as usual. Mean and covariance are the mixture's:
    within and between.

    Args:
        batch_sizes: The arms.
        default_batch_size: b0.
        seen: Which arms.
        values: Their mean log epochs.
        variances: Of those means.
        noise: Run-to-run variance of log epochs of every arm.
    """
    prior = _prior(batch_sizes, default_batch_size)
    if not len(seen):
        share = prior.odds[:, None] * np.full(len(CRITICAL), 1 / len(CRITICAL))
        return _mixed(share, np.stack([prior.means] * len(WIDTHS)), prior.covariances, noise)
    arms = len(batch_sizes)
    cross = prior.covariances[:, seen]
    spread = cross[:, :, seen]
    spread[:, np.arange(len(seen)), np.arange(len(seen))] += variances
    residuals = values - prior.means[:, seen]
    both = np.concatenate([cross, np.broadcast_to(residuals.T, (len(WIDTHS), *residuals.T.shape))], axis=2)
    solved = np.linalg.solve(spread, both)
    gain, whitened = solved[:, :, :arms], solved[:, :, arms:]
    logs = np.log(prior.odds)[:, None] - 0.5 * (residuals.T * whitened).sum(axis=1)
    logs -= 0.5 * np.linalg.slogdet(spread)[1][:, None]
    weights = np.exp(logs - logs.max())
    return _mixed(
        weights / weights.sum(),
        prior.means + residuals @ gain,
        prior.covariances - cross.transpose(0, 2, 1) @ gain,
        noise,
    )


def growth_text(change: float) -> str:
    """Return in words what a doubling of the batch size does to epochs.

    >>> growth_text(math.log(1.4)), growth_text(0.01)
    ('epochs grow about 40 % per doubling here', 'epochs hardly change here')
    """
    percent = 100 * math.expm1(min(change, 10.0))
    if abs(percent) < 3:
        return "epochs hardly change here"
    return f"epochs {'grow' if percent > 0 else 'fall'} about {abs(percent):.0f} % per doubling here"


def _mixed(weights: Floats, means: Floats, covariances: Floats, noise: Floats) -> Posterior:
    """Return the mixture: weights by width and law, means by width, law and arm, covariances by width."""
    each, of_each = weights.ravel(), means.reshape(-1, means.shape[-1])
    mean = each @ of_each
    off = of_each - mean
    within = np.tensordot(weights.sum(axis=1), covariances, 1)
    return Posterior(mean, within + (off * each[:, None]).T @ off, noise, weights.sum(axis=0))


@dataclass(frozen=True, slots=True)
class _Prior:
    means: Floats  # of each law
    covariances: Floats  # of each width
    odds: Floats  # of each width


@lru_cache(maxsize=256)
def _prior(batch_sizes: tuple[int, ...], default_batch_size: int) -> _Prior:
    octaves = np.log2(np.array(batch_sizes, dtype=float)) - math.log2(default_batch_size)
    critical = np.array(CRITICAL, dtype=float)[:, None]
    laws = np.log1p(2.0 ** (octaves - critical)) - np.log1p(2.0**-critical)
    shape = kernel(octaves, slope=SLOPE, bend=BEND, step=STEP) + OWN**2 * np.eye(len(octaves))
    return _Prior(
        means=MEAN + np.where(octaves <= 0, laws, SLOPE_ABOVE * octaves),
        covariances=np.stack([LEVEL**2 + width**2 * shape for width in WIDTHS]),
        odds=np.array(ODDS) / sum(ODDS),
    )
