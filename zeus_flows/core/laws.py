"""How epochs to the target may depend on the batch size: a mixture of laws, and what runs say of it.

Theory and data agree on E(b) = E_min (1 + b / B_crit): epochs hardly change below the critical batch size and double
with each doubling far above it. Where B_crit lies is not known, so each place it may have, from far below b0 to far
above, is one law. Around its law a job strays as a Gaussian process over octaves: a little, twice or four times
as far. Runs say how likely each law and each way to stray is; the belief is the mixture of them all.

Above b0 all laws have the same mean, a slight growth: with laws on that side too, a single unlucky run there looks
like a critical batch size and keeps the job from larger ones.

The constants are priors that were tuned; docs/policies.md says on what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zeus_flows.core.gaussian import Floats, kernel, plus_diagonal
from zeus_flows.core.lazy import lazy

CRITICAL = tuple(range(-4, 9))  # octaves from b0 at which the critical batch size may lie: one law each
MEAN = 2.0  # log epochs at b0 ...
LEVEL = 3.0  # ... of which nothing is known beforehand
SLOPE_ABOVE = 0.1  # growth of log epochs per octave above b0


class Stray(NamedTuple):
    """A way to stray from a law: deviations of log epochs over octaves from b0, and how likely it is before any run.

    `own` is an independent deviation of each arm, so that enough runs always win over neighbours.
    """

    odds: float
    slope: float
    bend: float
    step: float
    own: float


STRAYS = (
    Stray(4.0, slope=0.1, bend=0.08, step=0.03, own=0.03),
    Stray(2.0, slope=0.2, bend=0.16, step=0.06, own=0.06),
    Stray(1.0, slope=0.4, bend=0.32, step=0.12, own=0.12),
)


@dataclass(frozen=True)
class Posterior:
    """log Epochs(b) of every arm: means, covariance, run-to-run noise variance; weights of strays and laws."""

    mean: Floats
    covariance: Floats
    noise: Floats
    weights: Floats

    @property
    def laws(self) -> Floats:
        """How likely each law is."""
        likely: Floats = self.weights.sum(axis=0)
        return likely

    @lazy
    def variance(self) -> Floats:
        """The posterior variance of every arm."""
        return np.maximum(self.covariance.diagonal(), 1e-9)


def posterior(
    batch_sizes: tuple[int, ...],
    default_batch_size: int,
    *,
    seen: tuple[int, ...],
    values: Floats,
    variances: Floats,
    noise: Floats,
) -> Posterior:
    """Return what is believed of log Epochs(b) after some arms were seen.

    With r_q the residuals from law q and S = K + diag(variances) for a way to stray, that pair's weight is its odds
    times |S|^-1/2 exp(-r_q' S^-1 r_q / 2), and its Gaussian is conditioned as usual. Mean and covariance are the
    mixture's: within and between.

    Args:
        batch_sizes: The arms.
        default_batch_size: b0.
        seen: Which arms.
        values: Their mean log epochs.
        variances: Of those means.
        noise: Run-to-run variance of log epochs of every arm.
    """
    prior = _prior(batch_sizes, default_batch_size)
    if not seen:
        return _mixed(prior.odds, np.stack([prior.means] * len(STRAYS)), prior.covariances, noise)
    expected, cross, square, one = _looked_up(batch_sizes, default_batch_size, seen)
    residuals = values - expected
    spread = square + one * variances
    inverse = np.linalg.inv(spread)
    whitened = residuals @ inverse
    misfits = np.add.reduce(whitened * residuals, axis=-1) + np.linalg.slogdet(spread)[1][:, None]
    weights = prior.odds * np.exp(0.5 * (np.minimum.reduce(misfits, axis=None) - misfits))
    weights /= np.add.reduce(weights, axis=None)
    means = prior.means + whitened @ cross
    covariances = prior.covariances - cross.transpose(0, 2, 1) @ inverse @ cross
    return _mixed(weights, means, covariances, noise)


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
    """Return the mixture: weights by stray and law, means by stray, law and arm, covariances by stray."""
    each, of_each = weights.ravel(), means.reshape(-1, means.shape[-1])
    mean = each @ of_each
    off = of_each - mean
    of_strays = np.add.reduce(weights, axis=1)
    within = (of_strays @ covariances.reshape(len(covariances), -1)).reshape(covariances.shape[1:])
    return Posterior(mean, within + (off.T * each) @ off, noise, weights)


@dataclass(frozen=True, slots=True)
class _Prior:
    means: Floats  # of each law
    covariances: Floats  # of each way to stray
    odds: Floats  # of each of them and law


@lru_cache(maxsize=1024)  # with `_prior`, a third of a replay's time
def _looked_up(
    batch_sizes: tuple[int, ...], default_batch_size: int, seen: tuple[int, ...]
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return what each law expects of some arms, by stray their covariances with all arms and each other, and a one."""
    prior, arms = _prior(batch_sizes, default_batch_size), list(seen)
    cross = prior.covariances[:, arms]
    return prior.means[:, arms], cross, cross[:, :, arms], np.eye(len(arms))


@lru_cache(maxsize=256)
def _prior(batch_sizes: tuple[int, ...], default_batch_size: int) -> _Prior:
    octaves = np.log2(np.array(batch_sizes, dtype=float)) - math.log2(default_batch_size)
    critical = np.array(CRITICAL, dtype=float)[:, None]
    laws = np.log1p(2.0 ** (octaves - critical)) - np.log1p(2.0**-critical)
    odds = np.array([stray.odds for stray in STRAYS])
    return _Prior(
        means=MEAN + np.where(octaves <= 0, laws, SLOPE_ABOVE * octaves),
        covariances=np.stack([LEVEL**2 + _straying(octaves, stray) for stray in STRAYS]),
        odds=np.repeat(odds[:, None] / odds.sum(), len(CRITICAL), axis=1) / len(CRITICAL),
    )


def _straying(octaves: Floats, stray: Stray) -> Floats:
    shared = kernel(octaves, slope=stray.slope, bend=stray.bend, step=stray.step)
    return plus_diagonal(shared, np.full(len(octaves), stray.own**2))
