"""What `thompson` and `lookahead` share: one belief, one set of candidates, one way to cut and to explain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from zeus_flows.core.belief import EpochsBelief
from zeus_flows.core.early_stop import Cut, NoCut, PlannedCut
from zeus_flows.core.epoch_costs import epoch_costs, whole_epochs
from zeus_flows.core.gaussian import Floats
from zeus_flows.core.job import Job
from zeus_flows.core.laws import growth_text
from zeus_flows.core.lazy import lazy
from zeus_flows.core.policy.base import LARGEST_LOG, Choice, Lesson, RunCost, View, from_log
from zeus_flows.core.reasons import ArmBelief, ArmStatus, Explanation, Reason, ReasonKind
from zeus_flows.core.text import cost_text, times

HORIZON = 10.0  # recurrences over which a better arm would pay, at least ...
HORIZON_GROWTH = 0.3  # ... and the share of the recurrences so far that is added to it
REACH = 1.0  # octaves beyond what has completed that may be tried
WORTH_A_LOOK = 3.5  # standard deviations by which an arm may look dearer than the best known one
NEVER = 0.05  # probability that an untried arm never reaches the target
LENIENCE = 1.5  # an arm that has completed before may take this many times its usual epochs
EXPLORING_RETRIES = 1  # attempts after a stopped one, within a recurrence, that may explore again
CHANCES = 64  # draws behind the chance to be best


def learn(job: Job, belief: EpochsBelief, lesson: Lesson) -> EpochsBelief:
    """Return the belief after a lesson: epochs only, so that it holds on any GPU and for any eta."""
    if lesson.profiled and lesson.epoch_cost_j and lesson.epochs:
        extra = lesson.cost_j - lesson.beside_j - lesson.epochs * lesson.epoch_cost_j
        belief = belief.profiled(1 + extra / lesson.epoch_cost_j)
    if lesson.converged:
        return belief.complete(job, lesson.batch_size, lesson.epochs, curve=lesson.curve)
    return belief.stop(lesson.batch_size, lesson.epochs, max_epochs=job.max_epochs, curve=lesson.curve)


class OnSharedBelief:
    """What the policies on this belief have in common; each adds its own `choose`."""

    belief_type = EpochsBelief

    def initial(self, job: Job) -> EpochsBelief:
        """Return the belief before any observation."""
        return EpochsBelief.empty(job.batch_sizes, job.default_batch_size)

    def learn(self, job: Job, belief: EpochsBelief, lesson: Lesson) -> EpochsBelief:
        """Return the belief after one more lesson."""
        return learn(job, belief, lesson)


@dataclass(frozen=True)
class Outlook:
    """The belief about cost, on the GPU that was asked for.

    Arrays are parallel to the job's batch sizes; costs are logarithms of joules.
    """

    job: Job
    belief: EpochsBelief
    view: View

    @lazy
    def costs(self) -> tuple[Floats, Floats]:
        """Mean and covariance of log EpochCost, evaluation included."""
        known, arms = self.view.costs, self.job.batch_sizes
        steps = epoch_costs(arms, self.job.default_batch_size, known.training, known.elsewhere)
        if not known.beside or not (known.training or known.elsewhere):
            return steps
        beside, doubt = ([values.get(b, 0.0) for b in arms] for values in (known.beside, known.doubt))
        return whole_epochs(*steps, np.array(beside), np.array(doubt))

    @lazy
    def once(self) -> Floats | None:
        """What an attempt costs before its first step; None where that is nothing."""
        known = self.view.costs.once
        return np.array([known.get(b, 0.0) for b in self.job.batch_sizes]) if any(known.values()) else None

    @lazy
    def running(self) -> Floats:
        """Logarithm of the expected cost of a run's epochs."""
        epochs = self.belief.posterior
        return epochs.mean + self.costs[0] + 0.5 * epochs.noise

    @lazy
    def mu(self) -> Floats:
        """Logarithm of the expected cost of a run, known of every arm or guessed from its neighbours."""
        if self.once is None:
            return self.running
        mu: Floats = np.log(np.exp(np.minimum(self.running, LARGEST_LOG)) + self.once)
        return mu

    @lazy
    def covariance(self) -> Floats:
        """Covariance of the log costs."""
        spread: Floats = self.belief.posterior.covariance + self.costs[1]
        if self.once is None:
            return spread
        share = np.exp(np.minimum(self.running - self.mu, 0.0))
        return spread * np.multiply.outer(share, share)

    @lazy
    def deviation(self) -> Floats:
        """Standard deviation of each log cost."""
        return np.sqrt(np.maximum(self.covariance.diagonal(), 0.0))

    @lazy
    def root(self) -> Floats:
        """A square root of the covariance, for draws."""
        try:
            raised = self.covariance.copy()
            raised.flat[:: len(raised) + 1] += 1e-9
            root: Floats = np.linalg.cholesky(raised).astype(float, copy=False)
        except np.linalg.LinAlgError:  # rounding made it indefinite: leave out what is below zero
            values, vectors = np.linalg.eigh(self.covariance)
            root = vectors * np.sqrt(np.maximum(values, 0.0))
        return root

    @lazy
    def feasible(self) -> list[bool]:
        """Which arms may run on this GPU."""
        return [b in self.view.arms for b in self.job.batch_sizes]

    @lazy
    def alive(self) -> list[bool]:
        """Feasible arms that are not known to fail."""
        return [fits and not dead for fits, dead in zip(self.feasible, self.belief.dead, strict=True)]

    @lazy
    def done(self) -> list[int]:
        """Feasible arms that have reached the target."""
        runs = self.belief.runs
        return [arm for arm, fits in enumerate(self.feasible) if fits and runs[arm] > 0]

    @lazy
    def tried(self) -> list[int]:
        """Arms that have run, whether they reached the target or not."""
        stopped = self.belief.stopped
        return [arm for arm, runs in enumerate(self.belief.runs) if runs or stopped[arm].count]

    @lazy
    def incumbent(self) -> int | None:
        """The completed arm that is expected to cost least; None before any has.

        Where some of them have been measured on this GPU, it is one of those: what another GPU says of the rest is
        reason to try them. Where no GPU may say anything, it is the one nearest to the default.
        """
        known, here = self.view.costs, [arm for arm in self.done if not self.unprofiled[arm]]
        if known.new_gpu and not known.elsewhere:
            x, x0 = octaves(self.job.batch_sizes), math.log2(self.view.default)
            return min(self.done, key=lambda arm: (abs(x[arm] - x0), arm), default=None)
        return min(here or self.done, key=self.mu.tolist().__getitem__, default=None)

    @lazy
    def best_cost_j(self) -> float:
        """What a run of the incumbent is expected to cost."""
        assert self.incumbent is not None
        return from_log(float(self.mu[self.incumbent]))

    def epoch_j(self, arm: int) -> float:
        """Return what an epoch of an arm is believed to cost."""
        return from_log(float(self.costs[0][arm]))

    @lazy
    def in_vain(self) -> list[int]:
        """Arms that never reached the target, and of which runs were stopped."""
        belief = self.belief
        return [arm for arm, stopped in enumerate(belief.stopped) if stopped.count and not belief.runs[arm]]

    @property
    def wasted(self) -> float:
        """What was spent on arms that never reached the target, in runs of the incumbent."""
        return sum(self.belief.stopped[arm].epochs * self.epoch_j(arm) for arm in self.in_vain) / self.best_cost_j

    @property
    def fruitless(self) -> int:
        """How many runs of arms that never reached the target were stopped."""
        return sum(self.belief.stopped[arm].count for arm in self.in_vain)

    @property
    def last_look(self) -> int:
        """How many runs had completed when one of an arm that never reached the target was stopped last."""
        return max((self.belief.stopped[arm].newest for arm in self.in_vain), default=0)

    @property
    def horizon(self) -> float:
        """Recurrences over which a better arm would pay."""
        return HORIZON + HORIZON_GROWTH * self.belief.completions

    @lazy
    def candidates(self) -> list[int]:
        """Arms beside the incumbent that are near what has completed, alive, and not plainly dearer.

        An arm next to the incumbent is not plainly dearer by what another GPU measured.
        """
        best, low, high = self.incumbent, self.done[0], self.done[-1]
        assert best is not None
        x = octaves(self.job.batch_sizes)
        least, most = x[low] - REACH - 1e-9, x[high] + REACH + 1e-9
        spread = self.deviation
        if self.unprofiled[best]:
            spread = np.sqrt(self.belief.posterior.variance + self.cost_variance)
        at_best = (self.mu - WORTH_A_LOOK * spread).tolist()
        bound = float(self.mu[best])
        beside = (best - 1, best + 1) if self.view.costs.elsewhere else ()
        return [
            arm
            for arm, alive in enumerate(self.alive)
            if alive
            and arm != best
            and (at_best[arm] < bound or (arm in beside and self.unprofiled[arm]))
            and (least <= x[arm] <= most or low - 1 <= arm <= high + 1)
        ]

    @lazy
    def unprofiled(self) -> list[bool]:
        """Arms whose epoch cost has not been measured on this GPU."""
        measured = self.view.costs.training
        return [b not in measured for b in self.job.batch_sizes]

    @lazy
    def cost_variance(self) -> Floats:
        """Variance of each log EpochCost beside the incumbent's: a factor that all arms share says nothing."""
        covariance, best = self.costs[1], self.incumbent
        variance: Floats = covariance.diagonal()
        if best is not None and self.unprofiled[best]:
            variance = variance - 2 * covariance[best] + covariance[best, best]
        return np.maximum(variance, 0.0)

    def never(self, arm: int) -> float:
        """Return the probability that an arm never reaches the target."""
        runs = self.belief.runs[arm]
        return 0.5 * NEVER / (runs + 1) if runs else NEVER

    def planned_cut(self, arm: int, *, at_least: int = 1) -> Cut:
        """Return the cut whose number of epochs is planned once the epoch cost is known.

        Args:
            arm: Which arm.
            at_least: Epochs that it may train anyhow; more, where it has completed before and its cost is known here.
        """
        epochs, known = self.belief.posterior, self.belief.runs[arm] > 0
        lenient = known and (arm == self.incumbent or not self.unprofiled[arm])
        mean = float(epochs.mean[arm])
        return PlannedCut(
            log_epochs=mean,
            variance=float(epochs.variance[arm]),
            noise=float(epochs.noise[arm]),
            never=self.never(arm),
            best_cost_j=self.best_cost_j,
            horizon=self.horizon,
            at_least=math.ceil(LENIENCE * math.exp(min(mean, 30.0))) if lenient else at_least,
            reference=None if known else self.belief.reference(arm),
        )

    def growth(self, arm: int) -> float:
        """Return what a doubling of the batch size adds to log epochs around an arm."""
        x, mean = octaves(self.job.batch_sizes), self.belief.posterior.mean
        low, high = max(arm - 1, 0), min(arm + 1, len(x) - 1)
        return float(mean[high] - mean[low]) / (x[high] - x[low]) if high > low else 0.0

    @property
    def law(self) -> str:
        """What the runs so far say about epochs around the best known arm, in words; empty where one arm has run."""
        return "" if self.incumbent is None or len(self.done) < 2 else f"; {growth_text(self.growth(self.incumbent))}"

    def run_cost(self, arm: int) -> RunCost:
        """Return what a run of an arm is believed to cost."""
        expected = np.exp(np.minimum(self.mu, LARGEST_LOG))
        noise = np.sqrt(self.belief.posterior.noise)
        return RunCost(float(expected[arm]), float(self.deviation[arm]), float(noise[arm]))

    def chances(self) -> Floats:
        """Return each feasible arm's probability of being the cheapest, by a fixed set of draws."""
        draws = self.mu + _standard_normals(len(self.mu)) @ self.root.T
        draws[:, [not alive for alive in self.alive]] = np.inf
        cheapest = draws.argmin(axis=1)
        return np.bincount(cheapest, minlength=len(self.mu)) / CHANCES

    def arms(self, *, drawn: Floats | None = None, gains: dict[int, float] | None = None) -> tuple[ArmBelief, ...]:
        """Return what is believed of every arm, for the reason of a decision."""
        expected, chances = np.exp(np.minimum(self.mu, LARGEST_LOG)).tolist(), self.chances().tolist()
        sampled = [None] * len(expected) if drawn is None else np.exp(np.minimum(drawn, LARGEST_LOG)).tolist()
        noise, spread = np.sqrt(self.belief.posterior.noise).tolist(), self.deviation.tolist()
        statuses, gained = self._statuses(), gains or {}
        stopped = self.belief.stopped
        return tuple(
            ArmBelief(b, round(runs), cost, off, draw, status, chance, gained.get(i), each, stopped[i].count)
            for i, (b, runs, cost, off, draw, status, chance, each) in enumerate(
                zip(
                    *(self.job.batch_sizes, self.belief.runs, expected, spread, sampled, statuses, chances, noise),
                    strict=True,
                )
            )
        )

    def _statuses(self) -> list[ArmStatus]:
        tried = zip(self.feasible, self.belief.dead, self.belief.runs, strict=True)
        statuses = [
            ArmStatus.INFEASIBLE
            if not fits
            else ArmStatus.DEAD
            if dead
            else ArmStatus.KNOWN
            if runs
            else ArmStatus.OUT_OF_REACH
            for fits, dead, runs in tried
        ]
        for arm in self.candidates:
            if statuses[arm] == ArmStatus.OUT_OF_REACH:
                statuses[arm] = ArmStatus.UNTRIED
        for arm, stopped in enumerate(self.belief.stopped):
            if stopped.count and statuses[arm] in (ArmStatus.UNTRIED, ArmStatus.OUT_OF_REACH):
                statuses[arm] = ArmStatus.STOPPED
        return statuses


def without_incumbent(outlook: Outlook) -> Choice:
    """Choose before anything has reached the target: b0, or the living arm nearest to it, uncut."""
    belief, view = outlook.belief, outlook.view
    dead = {b for b, d in zip(belief.batch_sizes, belief.dead, strict=True) if d}
    stopped = {b for b, said in zip(belief.batch_sizes, belief.unfinished, strict=True) if said is not None}
    alive = [b for b in view.arms if b not in dead] or list(view.arms)
    arm = min(alive, key=lambda b: (b in stopped and b in view.ask.tried, abs(math.log2(b / view.default)), b))
    if any(belief.runs):
        text = f"no batch size that has reached the target fits this GPU; {arm} is the nearest to the default that may"
        return Choice(arm, Reason(ReasonKind.FIRST_RUN, text))
    if not dead and not stopped:
        text = first_run(outlook.job, arm)
        return Choice(arm, Reason(ReasonKind.FIRST_RUN, text))
    text = f"no batch size has reached the target yet; {arm} is the nearest to the default that may still"
    return Choice(
        arm, Reason(ReasonKind.FIRST_RUN, text, numbers={"failed": float(len(dead | stopped))}), explores=True
    )


def first_run(job: Job, arm: int) -> str:
    """Return why an arm runs where nothing is known.

    >>> first_run(Job("t", (8, 16), 16, 1), 8)
    'nothing is known yet: batch size 8, the nearest to the default that fits, runs first, without an early stop'
    """
    what = "the default batch size" if arm == job.default_batch_size else "batch size"
    which = "" if arm == job.default_batch_size else ", the nearest to the default that fits,"
    return f"nothing is known yet: {what} {arm}{which} runs first, without an early stop"


def without_exploring(outlook: Outlook) -> Choice | None:
    """Choose where there is nothing to weigh: before any run has completed, at the last retry, or by order."""
    if outlook.incumbent is None:
        return without_incumbent(outlook)
    if outlook.view.costs.new_gpu:
        return exploit(outlook, uncut=False, why="; nothing was measured on this GPU yet, so that it runs here first")
    if outlook.view.ask.attempt - 1 > EXPLORING_RETRIES:
        return exploit(
            outlook,
            uncut=True,
            kind=ReasonKind.RETRY,
            why="; it runs without an early stop, so that this recurrence ends",
        )
    if not outlook.view.may_explore:
        return exploit(outlook, uncut=False)
    return None


def exploit(outlook: Outlook, *, uncut: bool, kind: ReasonKind = ReasonKind.EXPLOIT, why: str = "") -> Choice:
    """Choose the incumbent."""
    assert outlook.incumbent is not None
    best = outlook.incumbent
    batch_size, runs = outlook.job.batch_sizes[best], outlook.belief.runs[best]

    def tell() -> Explanation:
        known = f"about {cost_text(outlook.job, outlook.best_cost_j)} a run, {times(runs)} so far"
        return f"batch size {batch_size} is the best known: {known}{outlook.law}{why}", outlook.arms()

    return Choice(
        batch_size,
        Reason.later(kind, tell, numbers(outlook)),
        cut=NoCut() if uncut else outlook.planned_cut(best),
        run_cost=lambda: outlook.run_cost(best),
    )


def numbers(outlook: Outlook) -> dict[str, float]:
    """Return the numbers behind a decision."""
    return {
        "best_cost_j": outlook.best_cost_j,
        "completions": float(outlook.belief.completions),
        "horizon": outlook.horizon,
        "resets": float(outlook.belief.resets),
    }


@lru_cache(maxsize=256)
def octaves(batch_sizes: tuple[int, ...]) -> list[float]:
    """Return log2 of every batch size."""
    logs: list[float] = np.log2(np.array(batch_sizes, dtype=float)).tolist()
    return logs


@lru_cache(maxsize=64)
def _standard_normals(arms: int) -> Floats:
    return np.random.default_rng(0).standard_normal((CHANCES, arms))
