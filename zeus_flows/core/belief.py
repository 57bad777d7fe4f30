"""What `thompson` and `lookahead` believe: Cost(b) = Epochs(b) x EpochCost(b), shared between neighbouring arms.

Epochs(b) is random and does not depend on the GPU; EpochCost(b) is known once a batch size has been profiled on
it. Both logarithms are Gaussian processes over x = log2 b, so that one run says something about its neighbours.
A run that was stopped early says that Epochs(b) is greater than what it got (right-censored).

The constants are tuned priors (see docs/policies.md for what they were tuned on).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from scipy.linalg.lapack import dposv
from scipy.special import ndtr

from zeus_flows.core.bandit import Runs
from zeus_flows.core.early_stop import Floats
from zeus_flows.core.job import Drift
from zeus_flows.core.lazy import lazy
from zeus_flows.core.surprise import Surprises, surprise

# log Epochs(b): a mean with a slope, and a kernel in octaves from b0
EPOCHS_MEAN = 2.0
EPOCHS_MEAN_SLOPE = 0.1
EPOCHS_LEVEL = 3.0
EPOCHS_SLOPE = 0.1
EPOCHS_BEND = 0.08
EPOCHS_STEP = 0.03
EPOCHS_OWN = 0.03  # an independent deviation of each arm, so that enough runs always win over neighbours
EPOCHS_SCALES = (1.0, 2.0, 4.0)  # widths of that kernel to choose from
ARMS_TO_CHOOSE_SCALE = 3

# log EpochCost(b)
COST_BOW = 0.03
COST_SLOPE = 0.4
COST_BEND = 0.25
COST_STEP = 0.06
COST_NOISE = 1e-4  # standard deviation of a measured log epoch cost
COST_TRANSLATED = 0.15  # the same where it comes from another GPU's profile

# run-to-run noise of log epochs
NOISE = 0.1
NOISE_POOL_WEIGHT = 6.0
NOISE_ARM_WEIGHT = 4.0

T = TypeVar("T")

DISCOUNT = 0.95  # what a run's weight is multiplied by with each run after it, where runs are discounted

PROFILING_RATIO = 1.15  # what a profiling epoch costs, in epochs at the best limit, before any was seen


@dataclass(frozen=True, slots=True)
class Censored:
    """Runs that stopped early, as one Gaussian pseudo-observation of log epochs."""

    log_epochs: float
    variance: float


@dataclass(frozen=True)
class Posterior:
    """log Epochs(b) of every arm: means, covariance, and the run-to-run noise variance."""

    mean: Floats
    covariance: Floats
    noise: Floats

    @lazy
    def variance(self) -> Floats:
        """The posterior variance of every arm."""
        return np.maximum(self.covariance.diagonal(), 1e-9)


@dataclass(frozen=True)
class EpochsBelief:
    """What runs have taught about Epochs(b); all tuples are parallel to `batch_sizes`.

    Attributes:
        completed: log epochs of the runs that reached the target.
        censored: Runs that were stopped, where the arm has not completed since.
        dead: Arms that trained max_epochs, or diverged, without ever completing.
        completions: Runs completed since the last reset (t of the horizon).
        last: Arm and log epochs of the newest completed run.
        surprises: How surprising completed runs were, since the last reset.
        resets: How often drift made the belief start again.
        profiling_ratio: Running ratio of a profiling epoch's cost to an epoch's at the best limit.
        stopped: How many runs of each arm were stopped since the last reset; empty: none.
    """

    batch_sizes: tuple[int, ...]
    default_batch_size: int
    completed: tuple[Runs, ...]
    censored: tuple[Censored | None, ...]
    dead: tuple[bool, ...]
    completions: int = 0
    last: tuple[int, float] | None = None
    surprises: Surprises = field(default_factory=Surprises)
    resets: int = 0
    profiling_ratio: float = PROFILING_RATIO
    stopped: tuple[int, ...] = ()

    @classmethod
    def empty(cls, batch_sizes: tuple[int, ...], default_batch_size: int) -> EpochsBelief:
        """Return the belief before any run."""
        n = len(batch_sizes)
        return cls(batch_sizes, default_batch_size, (Runs(),) * n, (None,) * n, (False,) * n)

    @lazy
    def runs(self) -> tuple[float, ...]:
        """How many runs of each arm reached the target."""
        return tuple(arm.count for arm in self.completed)

    def complete(
        self, batch_size: int, epochs: float, *, window: int | None = None, drift: Drift = Drift.RESET
    ) -> EpochsBelief:
        """Return the belief after a run that reached the target."""
        arm = self.batch_sizes.index(batch_size)
        value = math.log(max(epochs, 1))
        belief, surprises = self, self.surprises
        if drift is Drift.DISCOUNT:
            belief = replace(self, completed=tuple(runs.discounted(DISCOUNT) for runs in self.completed))
        if drift is Drift.RESET and self.completed[arm].count:
            surprises = surprises.add(self._surprise(arm, value))
            if surprises.drifted:
                belief = self._reset(keep_last=surprises.lasting, window=window)
                surprises = Surprises()
        return EpochsBelief(
            batch_sizes=self.batch_sizes,
            default_batch_size=self.default_batch_size,
            completed=_put(belief.completed, arm, belief.completed[arm].add(value, window=window)),
            censored=_put(belief.censored, arm, None),
            dead=_put(belief.dead, arm, False),
            completions=belief.completions + 1,
            last=(arm, value),
            surprises=surprises,
            resets=belief.resets,
            profiling_ratio=belief.profiling_ratio,
            stopped=belief.stopped,
        )

    def stop(self, batch_size: int, epochs: float, *, max_epochs: int) -> EpochsBelief:
        """Return the belief after a run that was stopped after `epochs`: Epochs(b) is greater than that.

        The posterior given E > k, matched in mean and variance, becomes a pseudo-observation.
        """
        arm = self.batch_sizes.index(batch_size)
        at_most = self.posterior
        mean, variance = float(at_most.mean[arm]), max(float(at_most.covariance[arm, arm]), 1e-6)
        spread = variance + float(at_most.noise[arm])
        z = (math.log(max(epochs, 0) + 0.5) - mean) / math.sqrt(spread)
        beyond = 1.0 - float(ndtr(z))
        hazard = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) / beyond if beyond > 1e-10 else z + 1 / z
        matched_mean = mean + variance * hazard / math.sqrt(spread)
        matched_variance = variance - variance**2 * hazard * (hazard - z) / spread
        matched_variance = min(max(matched_variance, 1e-4 * variance), 0.999 * variance)
        width = 1 / (1 / matched_variance - 1 / variance)
        site = Censored(mean + (matched_mean - mean) * (variance + width) / variance, width)
        if (before := self.censored[arm]) is not None:
            site = _combine(before, site)
        stopped = self.stopped or (0,) * len(self.batch_sizes)
        hopeless = epochs >= max_epochs and not self.completed[arm].count
        return replace(
            self,
            censored=_put(self.censored, arm, site),
            dead=_put(self.dead, arm, self.dead[arm] or hopeless),
            stopped=_put(stopped, arm, stopped[arm] + 1),
        )

    def profiled(self, ratio: float) -> EpochsBelief:
        """Return the belief after a run that profiled at `ratio` times the cost of an ordinary epoch."""
        return replace(self, profiling_ratio=0.5 * self.profiling_ratio + 0.5 * min(max(ratio, 0.5), 3.0))

    @lazy
    def posterior(self) -> Posterior:
        """Log Epochs(b) of every arm, given all runs."""
        prior = _epochs_prior(self.batch_sizes, self.default_batch_size)
        counts, means, squares = np.array(
            [self.runs, [arm.mean for arm in self.completed], [arm.squares for arm in self.completed]], dtype=float
        )
        noise = _noise(counts, squares)
        precision = counts / noise
        weighted = precision * means
        for arm, site in enumerate(self.censored):
            if site is not None:
                precision[arm] += 1 / site.variance
                weighted[arm] += site.log_epochs / site.variance
        seen = precision.nonzero()[0]
        covariance = prior.covariances[_scale(prior, counts, means, noise)]
        mean, covariance = condition(
            prior.mean, covariance, seen, weighted[seen] / precision[seen], 1 / precision[seen]
        )
        return Posterior(mean, covariance, noise)

    def _surprise(self, arm: int, log_epochs: float) -> float:
        p = self.posterior
        return surprise(
            log_epochs, mean=float(p.mean[arm]), variance=float(p.covariance[arm, arm]), noise=float(p.noise[arm])
        )

    def _reset(self, *, keep_last: bool, window: int | None) -> EpochsBelief:
        """Forget epochs; EpochCost is kept elsewhere and survives. The first of two surprises is kept."""
        fresh = replace(
            EpochsBelief.empty(self.batch_sizes, self.default_batch_size),
            resets=self.resets + 1,
            profiling_ratio=self.profiling_ratio,
        )
        if not (keep_last and self.last is not None):
            return fresh
        arm, value = self.last
        return replace(fresh, completed=_put(fresh.completed, arm, Runs().add(value, window=window)))


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
    return np.log(whole), _plus_diagonal(spread, ((1 - share) * doubt) ** 2)


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
    noise = np.array([COST_NOISE if batch_sizes[i] in measured else COST_TRANSLATED for i in seen]) ** 2
    bow, covariance = _costs_prior(batch_sizes, anchor)
    return condition(bow + math.log(known[anchor]), covariance, np.array(seen), values, noise)


def condition(
    mean: Floats, covariance: Floats, seen: np.typing.NDArray[np.intp], values: Floats, noise: Floats
) -> tuple[Floats, Floats]:
    """Return mean and covariance of a Gaussian after seeing some of its components through noise."""
    if not len(seen):
        return mean, covariance
    cross = covariance[seen]
    gain = np.linalg.solve(_plus_diagonal(cross[:, seen], noise), cross)
    return mean + (values - mean[seen]) @ gain, covariance - cross.T @ gain


def _plus_diagonal(matrix: Floats, diagonal: Floats) -> Floats:
    """Add to the diagonal of a square matrix, in place."""
    matrix.flat[:: len(matrix) + 1] += diagonal
    return matrix


def _put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _combine(a: Censored, b: Censored) -> Censored:
    precision = 1 / a.variance + 1 / b.variance
    return Censored((a.log_epochs / a.variance + b.log_epochs / b.variance) / precision, 1 / precision)


def _noise(counts: Floats, squares: Floats) -> Floats:
    """Return each arm's run-to-run variance of log epochs, shrunk towards what all arms share."""
    spare = np.maximum(counts - 1, 0)
    pool = (NOISE_POOL_WEIGHT * NOISE**2 + squares.sum()) / (NOISE_POOL_WEIGHT + spare.sum())
    noise: Floats = (NOISE_ARM_WEIGHT * pool + squares) / (NOISE_ARM_WEIGHT + spare)
    return noise


@dataclass(frozen=True, slots=True)
class _EpochsPrior:
    mean: Floats
    covariances: Floats  # one for each of EPOCHS_SCALES


@lru_cache(maxsize=256)
def _epochs_prior(batch_sizes: tuple[int, ...], default_batch_size: int) -> _EpochsPrior:
    octaves = np.log2(np.array(batch_sizes, dtype=float)) - math.log2(default_batch_size)
    shape = _kernel(octaves, EPOCHS_SLOPE, EPOCHS_BEND, EPOCHS_STEP) + EPOCHS_OWN**2 * np.eye(len(octaves))
    return _EpochsPrior(
        mean=EPOCHS_MEAN + EPOCHS_MEAN_SLOPE * octaves,
        covariances=np.stack([EPOCHS_LEVEL**2 + scale**2 * shape for scale in EPOCHS_SCALES]),
    )


@lru_cache(maxsize=256)
def _costs_prior(batch_sizes: tuple[int, ...], anchor: int) -> tuple[Floats, Floats]:
    octaves = np.log2(np.array(batch_sizes, dtype=float)) - math.log2(anchor)
    return COST_BOW * octaves**2, _kernel(octaves, COST_SLOPE, COST_BEND, COST_STEP)


def _kernel(octaves: Floats, slope: float, bend: float, step: float) -> Floats:
    """Return a covariance: linear, plus an integrated and a plain random walk away from octave 0 on either side."""
    far = np.abs(octaves)
    near, off = np.minimum.outer(far, far), np.maximum.outer(far, far)
    same_side = np.multiply.outer(np.sign(octaves), np.sign(octaves)) > 0
    walks = bend**2 * near**2 * (3 * off - near) / 6 + step**2 * near
    kernel: Floats = slope**2 * np.multiply.outer(octaves, octaves) + same_side * walks
    return kernel + 1e-9 * np.eye(len(octaves))


def _scale(prior: _EpochsPrior, counts: Floats, means: Floats, noise: Floats) -> int:
    """Return which width of the kernel the completed runs are most likely under, less log of the width."""
    done = counts.nonzero()[0]
    if len(done) < ARMS_TO_CHOOSE_SCALE:
        return 0
    residual, each = means[done] - prior.mean[done], noise[done] / counts[done]
    covariances = prior.covariances[:, done[:, None], done]
    likelihoods = [
        _log_likelihood(residual, _plus_diagonal(covariance, each)) - math.log(scale)
        for covariance, scale in zip(covariances, EPOCHS_SCALES, strict=True)
    ]
    return likelihoods.index(max(likelihoods))


def _log_likelihood(residual: Floats, covariance: Floats) -> float:
    """Return the log density of a Gaussian at a residual, less what does not depend on the covariance.

    Straight from LAPACK: for a handful of arms, `numpy.linalg` takes longer to begin than to compute.
    """
    root, solution, _ = dposv(covariance, residual)
    return -0.5 * float(residual @ solution) - sum(map(math.log, root.diagonal().tolist()))
