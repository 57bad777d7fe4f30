"""What `thompson` and `lookahead` believe: Cost(b) = Epochs(b) x EpochCost(b), shared between neighbouring arms.

Epochs(b) is random and does not depend on the GPU; what runs teach about it is here. EpochCost(b) is known once a
batch size has been profiled on it (`core.epoch_costs`). One run says something about its neighbours, by the laws in
`core.laws`. A run that was stopped early says that Epochs(b) is greater than what it got (right-censored), and its
learning curve says how much greater (`core.learning_curve`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from scipy.special import ndtr

from zeus_flows.core import laws
from zeus_flows.core.bandit import Runs
from zeus_flows.core.gaussian import nearest
from zeus_flows.core.job import Drift, Job, WindowOf
from zeus_flows.core.lazy import lazy
from zeus_flows.core.learning_curve import ROUNDING, Curve, Reference, forecast, seen_by
from zeus_flows.core.surprise import Surprises, surprise

# run-to-run noise of log epochs
NOISE = 0.1
NOISE_POOL_WEIGHT = 6.0
NOISE_ARM_WEIGHT = 4.0

DISCOUNT = 0.95  # what a run's weight is multiplied by with each run after it, where runs are discounted
PROFILING_RATIO = 1.15  # what a profiling epoch costs, in epochs at the best limit, before any was seen

A_LOOK = 0.2  # share of a reference's epochs after which curves are compared
FIRST_RUNS = 3  # of an arm, whose curves are compared with what came of them
DOUBT_WEIGHT = 2.0  # how many comparisons the usual variance of curves is worth
DOUBT = (0.25, 25.0)  # least and greatest factor on that variance

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run that did not complete says, as a Gaussian pseudo-observation of log epochs."""

    log_epochs: float
    variance: float

    def __add__(self, other: Seen) -> Seen:
        """Return both together."""
        precision = 1 / self.variance + 1 / other.variance
        weighted = self.log_epochs / self.variance + other.log_epochs / other.variance
        return Seen(weighted / precision, 1 / precision)


@dataclass(frozen=True, slots=True)
class StoppedRuns:
    """Runs of an arm that were stopped since the last reset.

    Attributes:
        count: How many.
        epochs: What they trained together.
        longest: What the longest of them trained.
        newest: How many runs of the job had completed when the newest of them was stopped.
    """

    count: int = 0
    epochs: int = 0
    longest: int = 0
    newest: int = 0

    def add(self, epochs: int, *, completions: int) -> StoppedRuns:
        """Return them with one more."""
        return StoppedRuns(self.count + 1, self.epochs + epochs, max(self.longest, epochs), completions)


@dataclass(frozen=True)
class EpochsBelief:
    """What runs have taught about Epochs(b); all tuples are parallel to `batch_sizes`.

    Attributes:
        completed: log epochs of the runs that reached the target.
        unfinished: What runs that did not say, where the arm has not completed since.
        dead: Arms that trained max_epochs, or diverged, without ever completing.
        stopped: Runs that were stopped.
        curves: The newest completed run's learning curve.
        completions: Runs completed since the last reset (t of the horizon).
        last: Arm and log epochs of the newest completed run.
        surprises: How surprising completed runs were, since the last reset.
        resets: How often drift made the belief start again.
        profiling_ratio: Running ratio of a profiling epoch's cost to an epoch's at the best limit.
        misses: Squared errors of what curves foretold of completed runs, in units of the usual variance.
        newest: Arm and log epochs of the runs in the job's window, where the window is of the job.
    """

    batch_sizes: tuple[int, ...]
    default_batch_size: int
    completed: tuple[Runs, ...]
    unfinished: tuple[Seen | None, ...]
    dead: tuple[bool, ...]
    stopped: tuple[StoppedRuns, ...]
    curves: tuple[Curve, ...]
    completions: int = 0
    last: tuple[int, float] | None = None
    surprises: Surprises = field(default_factory=Surprises)
    resets: int = 0
    profiling_ratio: float = PROFILING_RATIO
    misses: Runs = field(default_factory=Runs)
    newest: tuple[tuple[int, float], ...] = ()

    @classmethod
    def empty(cls, batch_sizes: tuple[int, ...], default_batch_size: int) -> EpochsBelief:
        """Return the belief before any run."""
        n = len(batch_sizes)
        return cls(
            batch_sizes, default_batch_size, (Runs(),) * n, (None,) * n, (False,) * n, (StoppedRuns(),) * n, ((),) * n
        )

    @lazy
    def runs(self) -> tuple[float, ...]:
        """How many runs of each arm reached the target."""
        return tuple(arm.count for arm in self.completed)

    def complete(self, job: Job, batch_size: int, epochs: float, *, curve: Curve = ()) -> EpochsBelief:
        """Return the belief after a run that reached the target."""
        arm = self.batch_sizes.index(batch_size)
        value = math.log(max(epochs, 1))
        belief, surprises = self, self.surprises
        if job.drift is Drift.DISCOUNT:
            belief = replace(self, completed=tuple(runs.discounted(DISCOUNT) for runs in self.completed))
        if job.drift is Drift.RESET and self.completed[arm].count:
            surprises = surprises.add(self._surprise(arm, value))
            if surprises.drifted:
                belief = self._reset(keep_last=surprises.lasting, window=job.window)
                surprises = Surprises()
        completed, newest = belief._counted(job, arm, value)
        return EpochsBelief(
            batch_sizes=self.batch_sizes,
            default_batch_size=self.default_batch_size,
            completed=completed,
            unfinished=_put(belief.unfinished, arm, None),
            dead=_put(belief.dead, arm, False),
            stopped=belief.stopped,
            curves=_put(belief.curves, arm, curve) if curve else belief.curves,
            completions=belief.completions + 1,
            last=(arm, value),
            surprises=surprises,
            resets=belief.resets,
            profiling_ratio=belief.profiling_ratio,
            misses=belief._missed(arm, value, curve) if curve else belief.misses,
            newest=newest,
        )

    def stop(self, batch_size: int, epochs: int, *, max_epochs: int, curve: Curve = ()) -> EpochsBelief:
        """Return the belief after a run that was stopped after `epochs`: Epochs(b) is greater than that.

        What its curve foretells is seen through noise. Then the posterior given E > k, matched in mean and variance,
        becomes a pseudo-observation. Curves of one arm mislead alike: the longest of them counts, not their sum.
        """
        arm = self.batch_sizes.index(batch_size)
        said, longest = self.unfinished[arm], self.stopped[arm].longest
        reference = self.reference(arm) if epochs >= longest else None
        foretold = forecast(reference, curve, epochs) if reference is not None else None
        posterior = self.posterior
        if said is not None and foretold is not None:
            posterior, said = replace(self, unfinished=_put(self.unfinished, arm, None)).posterior, None
        mean, variance = float(posterior.mean[arm]), max(float(posterior.covariance[arm, arm]), 1e-6)
        noise = float(posterior.noise[arm])
        if foretold is not None:
            said = Seen(foretold.log_epochs, foretold.variance + noise)
            both = Seen(mean, variance) + said
            mean, variance = both.log_epochs, both.variance
        beyond = censored(math.log(epochs + 0.5), mean=mean, variance=variance, noise=noise)
        return replace(
            self,
            unfinished=_put(self.unfinished, arm, beyond if said is None else said + beyond),
            dead=_put(self.dead, arm, self.dead[arm] or (epochs >= max_epochs and not self.completed[arm].count)),
            stopped=_put(self.stopped, arm, self.stopped[arm].add(epochs, completions=self.completions)),
        )

    def profiled(self, ratio: float) -> EpochsBelief:
        """Return the belief after a run that profiled at `ratio` times the cost of an ordinary epoch."""
        return replace(self, profiling_ratio=0.5 * self.profiling_ratio + 0.5 * min(max(ratio, 0.5), 3.0))

    def reference(self, arm: int) -> Reference | None:
        """Return the nearest other arm's completed run to compare a run of this arm with; None where there is none."""
        others = [i for i in self._with_curves if i != arm]
        return Reference(self.curves[nearest(self.batch_sizes, others, arm)], self._doubt) if others else None

    @lazy
    def _with_curves(self) -> list[int]:
        """Completed arms whose learning curve is known."""
        return [i for i, curve in enumerate(self.curves) if curve and self.completed[i].count]

    @property
    def _doubt(self) -> float:
        """How many times the usual variance comparisons of curves have had."""
        squares = self.misses.count * self.misses.mean
        doubt = (DOUBT_WEIGHT + squares) / (DOUBT_WEIGHT + self.misses.count)
        return min(max(doubt, DOUBT[0]), DOUBT[1])

    @lazy
    def posterior(self) -> laws.Posterior:
        """Log Epochs(b) of every arm, given all runs."""
        noise = _noise(self.completed)
        seen, values, variances = [], [], []
        for arm, (runs, said, each) in enumerate(zip(self.completed, self.unfinished, noise, strict=True)):
            if not runs.count and said is None:
                continue
            precision = runs.count / each
            weighted = precision * runs.mean
            if said is not None:
                precision += 1 / said.variance
                weighted += said.log_epochs / said.variance
            seen.append(arm)
            values.append(weighted / precision)
            variances.append(1 / precision)
        return laws.posterior(
            self.batch_sizes,
            self.default_batch_size,
            seen=tuple(seen),
            values=np.array(values),
            variances=np.array(variances),
            noise=np.array(noise),
        )

    def _counted(self, job: Job, arm: int, value: float) -> tuple[tuple[Runs, ...], tuple[tuple[int, float], ...]]:
        """Return the completed runs with one more, and the job's newest where the window is the job's."""
        if job.window is None or job.window_of is WindowOf.ARM:
            return _put(self.completed, arm, self.completed[arm].add(value, window=job.window)), ()
        newest = (*self.newest, (arm, value))[-job.window :]
        completed = [Runs() for _ in self.batch_sizes]
        for i, log_epochs in newest:
            completed[i] = completed[i].add(log_epochs)
        return tuple(completed), newest

    def _missed(self, arm: int, value: float, curve: Curve) -> Runs:
        """Return how far curves were off, with what this completed run's would have foretold after a look.

        An arm's first runs are looked at: those are what curves are asked about.
        """
        epochs = math.exp(value)
        at = max(math.ceil(A_LOOK * epochs), 2)
        reference = self.reference(arm) if at < epochs and self.completed[arm].count < FIRST_RUNS else None
        if reference is None:
            return self.misses
        foretold = forecast(replace(reference, doubt=1.0), seen_by(curve, at), at)
        if foretold is None:
            return self.misses
        missed = (value - foretold.log_epochs) ** 2 / (foretold.variance + 2 * NOISE**2)
        return self.misses.add(min(missed, DOUBT[1]))

    def _surprise(self, arm: int, log_epochs: float) -> float:
        """Return how surprising a completed run is; that epochs are whole numbers is not."""
        p = self.posterior
        mean = float(p.mean[arm])
        rounding = (ROUNDING * math.exp(-max(mean, 0.0))) ** 2
        return surprise(
            log_epochs, mean=mean, variance=float(p.covariance[arm, arm]), noise=float(p.noise[arm]) + rounding
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
        kept = _put(fresh.completed, arm, Runs().add(value, window=window))
        return replace(fresh, completed=kept, newest=(self.last,) if self.newest else ())


def censored(log_epochs: float, *, mean: float, variance: float, noise: float) -> Seen:
    """Return what a Gaussian is told by a run that was not over at some log epochs, matched in mean and variance.

    With z = (log_epochs - mean)/sqrt(v + s²) and h = phi(z)/(1 - Phi(z)): m' = mean + v h/sqrt(v + s²) and
    v' = v - v² h (h - z)/(v + s²).
    """
    spread = variance + noise
    z = (log_epochs - mean) / math.sqrt(spread)
    beyond = 1.0 - float(ndtr(z))
    hazard = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) / beyond if beyond > 1e-10 else z + 1 / z
    matched_mean = mean + variance * hazard / math.sqrt(spread)
    matched_variance = variance - variance**2 * hazard * (hazard - z) / spread
    matched_variance = min(max(matched_variance, 1e-4 * variance), 0.999 * variance)
    width = 1 / (1 / matched_variance - 1 / variance)
    return Seen(mean + (matched_mean - mean) * (variance + width) / variance, width)


def _put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _noise(arms: Sequence[Runs]) -> list[float]:
    """Return each arm's run-to-run variance of log epochs, shrunk towards what all arms share."""
    spare = [arm.count - 1 if arm.count > 1 else 0.0 for arm in arms]
    squares = [arm.squares for arm in arms]
    pool = (NOISE_POOL_WEIGHT * NOISE**2 + sum(squares)) / (NOISE_POOL_WEIGHT + sum(spare))
    shared = NOISE_ARM_WEIGHT * pool
    return [(shared + own) / (NOISE_ARM_WEIGHT + more) for own, more in zip(squares, spare, strict=True)]
