"""`zeus`: the paper's Algorithm 3 without the published package's faults.

Pruning exploration in two rounds, then Gaussian Thompson sampling among what reached the target in both, with early
stopping at beta times the minimum cost of the window. A stopped run is a lower bound of what it would have cost. It
looks at each arm's runs as a set, so it does not matter in which order they were reported. Costs are epochs x
EpochCost: profiling is booked apart, and another GPU or eta only changes the second factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from zeus_flows.core.bandit import LEAST_NOISE, Belief, Runs, learnt_variance, observe, predict, with_stopped
from zeus_flows.core.early_stop import CostCut, Cut, NoCut
from zeus_flows.core.exploration import Step, Tries, next_to_explore, survivors
from zeus_flows.core.job import Job, WindowOf
from zeus_flows.core.policy.base import Choice, Lesson, Policy, RunCost, View
from zeus_flows.core.policy.outlook import first_run
from zeus_flows.core.reasons import ArmBelief, ArmStatus, Explanation, Reason, ReasonKind
from zeus_flows.core.text import cost_text, times


@dataclass(frozen=True, slots=True)
class ArmRuns:
    """An arm's runs.

    Attributes:
        epochs: Epochs of the runs that reached the target.
        stopped: Epochs that the others trained: they would have taken more.
        least: The fewest epochs that reached the target.
        newest: (epochs, whether they reached the target), kept only under a window of each arm.
        reached: How many runs ever reached the target; pruning has no window.
        failed: How many ever did not.
    """

    epochs: Runs = field(default_factory=Runs)
    stopped: Runs = field(default_factory=Runs)
    least: int | None = None
    newest: tuple[tuple[int, bool], ...] = ()
    reached: int = 0
    failed: int = 0

    @property
    def tries(self) -> Tries:
        """What pruning looks at."""
        return Tries(self.reached, self.failed)

    def add(self, epochs: int, *, converged: bool, window: int | None) -> ArmRuns:
        """Return the runs with one more; under a window only the arm's newest count."""
        reached, failed = self.reached + converged, self.failed + (not converged)
        if window is not None:
            newest = (*self.newest, (epochs, converged))[-window:]
            return replace(ArmRuns(reached=reached, failed=failed).only(newest), newest=newest)
        if not converged:
            return ArmRuns(self.epochs, self.stopped.add(epochs), self.least, reached=reached, failed=failed)
        least = epochs if self.least is None else min(self.least, epochs)
        return ArmRuns(self.epochs.add(epochs), self.stopped, least, reached=reached, failed=failed)

    def only(self, runs: Iterable[tuple[int, bool]]) -> ArmRuns:
        """Return the arm as if only these runs counted; what pruning looks at stays."""
        counting = ArmRuns()
        for epochs, converged in runs:
            counting = counting.add(epochs, converged=converged, window=None)
        return replace(counting, reached=self.reached, failed=self.failed)


@dataclass(frozen=True, slots=True)
class ZeusBelief:
    """Each arm's runs, and under a window the newest runs of the job (batch size, epochs, converged)."""

    arms: Mapping[int, ArmRuns] = field(default_factory=dict)
    newest: tuple[tuple[int, int, bool], ...] = ()


class Zeus:
    """Algorithm 3, order-free."""

    belief_type = ZeusBelief

    def initial(self, job: Job) -> ZeusBelief:
        """Return the belief before any observation."""
        return ZeusBelief()

    def learn(self, job: Job, belief: ZeusBelief, lesson: Lesson) -> ZeusBelief:
        """Return the belief after one more run (Algorithm 2, line 1)."""
        b, epochs, converged = lesson.batch_size, max(lesson.epochs, 1), lesson.converged
        runs = belief.arms.get(b, _NO_RUNS).add(epochs, converged=converged, window=job.window)
        arms = {**belief.arms, b: runs}
        if job.window is None:
            return ZeusBelief(arms)
        newest = (*belief.newest, (b, epochs, converged))[-job.window :]
        if job.window_of is WindowOf.JOB:
            arms = {arm: runs.only((e, ok) for x, e, ok in newest if x == arm) for arm, runs in arms.items()}
        return ZeusBelief(arms, newest)

    def choose(self, job: Job, belief: ZeusBelief, view: View) -> Choice:
        """Return the next arm of the pruning rounds, or the one whose drawn cost is least."""
        look = _Look(job, belief, view)
        if not belief.arms:
            return Choice(view.default, Reason(ReasonKind.FIRST_RUN, first_run(job, view.default)))
        if look.best is None:
            return look.without_best()
        if view.ask.attempt >= max(job.max_attempts, 2):
            return look.run_best(
                ReasonKind.RETRY, "; it runs without an early stop, so that this recurrence ends", uncut=True
            )
        if not view.may_explore:
            return look.run_best(ReasonKind.EXPLOIT, "")
        return look.prune() or look.sample()


class _Look:
    """The belief, on the GPU that was asked for."""

    def __init__(self, job: Job, belief: ZeusBelief, view: View) -> None:
        self.job, self.belief, self.view = job, belief, view
        known = view.costs
        self.costs = {b: cost for b in job.batch_sizes if (cost := known.epoch(b)) is not None}
        self.once = known.once
        self.epochs = {
            b: _epochs(r) for b in view.arms if (r := belief.arms.get(b)) and r.epochs.count and b in self.costs
        }
        self.step = self._pruning_step() if self.epochs else None
        kept = self.epochs if self.step else survivors(view.arms, self.tries)
        self.arms = [b for b in kept if b in self.epochs] or list(self.epochs)
        self.forgotten = [b for b in kept if not sum(self.counts(b))] if job.window else []
        self.best = min(self.arms, key=self.expected_j, default=None)

    def _pruning_step(self) -> Step | None:
        cheapest = min(self.epochs, key=lambda b: self.run_j(b, self.runs(b).least or 0))
        return next_to_explore(self.view.arms, default=self.view.default, cheapest=cheapest, tries=self.tries)

    def runs(self, arm: int) -> ArmRuns:
        return self.belief.arms.get(arm, _NO_RUNS)

    def tries(self, arm: int) -> Tries:
        return self.runs(arm).tries

    def counts(self, arm: int) -> tuple[int, int]:
        """Return how many runs that count reached the target, and how many did not."""
        runs = self.runs(arm)
        return round(runs.epochs.count), round(runs.stopped.count)

    def expected_j(self, arm: int) -> float:
        return self.run_j(arm, self.epochs[arm].mean)

    def run_j(self, arm: int, epochs: float) -> float:
        """Return what a run of so many epochs costs."""
        return self.once.get(arm, 0.0) + epochs * self.costs[arm]

    def cut(self) -> Cut:
        """Return the stop at beta times the minimum cost of the window; an unconverged run is not part of it."""
        if self.job.window is None:
            least = [self.run_j(b, r) for b in self.epochs if (r := self.runs(b).least) is not None]
        else:
            least = [self.run_j(b, e) for b, e, ok in self.belief.newest if ok and b in self.costs]
        return CostCut(self.job.beta * min(least)) if least else NoCut()

    def without_best(self) -> Choice:
        """Choose before anything has reached the target: the arm with the fewest failures nearest to b0, uncut."""
        default = self.view.default
        arm = min(self.view.arms, key=lambda b: (sum(self.counts(b)), abs(math.log2(b / default)), b))
        text = f"no batch size has reached the target yet; {arm} has failed least, nearest to the default"
        return Choice(arm, Reason(ReasonKind.FIRST_RUN, text, arms=self.told()), explores=True)

    def run_best(self, kind: ReasonKind, why: str, *, uncut: bool = False) -> Choice:
        assert self.best is not None
        best, cost, runs = self.best, self.expected_j(self.best), sum(self.counts(self.best))

        def tell() -> Explanation:
            known = f"about {cost_text(self.job, cost)} a run, {times(runs)} so far"
            return f"batch size {best} is the best known: {known}{why}", self.told()

        return Choice(
            best,
            Reason.later(kind, tell, {"best_cost_j": cost}),
            cut=NoCut() if uncut else self.cut(),
            run_cost=lambda: self.run_cost(best),
        )

    def prune(self) -> Choice | None:
        """Return the next arm of Algorithm 3's two rounds (lines 2 to 9); None when both are over."""
        if self.step is None:
            return None
        assert self.best is not None
        (number, arm), best_j = self.step, self.expected_j(self.best)

        def tell() -> Explanation:
            which = "first" if number == 1 else "second"
            text = (
                f"batch size {arm} is next in the {which} round of trying out: smaller ones until one fails, then "
                f"larger ones; {self.best} is the best known so far at {cost_text(self.job, best_j)}"
            )
            return text, self.told()

        return Choice(
            arm,
            Reason.later(ReasonKind.PRUNING, tell, {"round": float(number), "best_cost_j": best_j}),
            cut=self.cut(),
            explores=arm != self.best,
            run_cost=lambda: self.run_cost(arm),
        )

    def sample(self) -> Choice:
        """Return the arm whose drawn mean cost is least (Algorithm 1); a retry takes another arm."""
        assert self.best is not None
        arms = [*self.arms, *self.forgotten]
        fresh = [b for b in arms if b not in self.view.ask.tried] or arms
        draws = predict({b: self.posterior(b) for b in fresh}, self.view.rng)
        arm = min(draws, key=lambda b: draws[b])
        drawn_j, best_j, runs = draws[arm], self.expected_j(self.best), sum(self.counts(arm))

        def tell() -> Explanation:
            best = f"{self.best}, the best known, is expected to cost {cost_text(self.job, best_j)}"
            if arm in self.forgotten:
                text = f"batch size {arm} has no run in the window, and any cost may be drawn for it; {best}"
            elif arm == self.best:
                text = f"batch size {arm}, the best known, drew the least cost ({cost_text(self.job, drawn_j)}); "
                text += f"{times(runs)} so far"
            else:
                text = f"batch size {arm} drew the least cost ({cost_text(self.job, drawn_j)}; {best}); "
                text += f"{times(runs)} so far"
            return text, self.told(draws)

        kind = (
            ReasonKind.EXPLOIT
            if arm == self.best
            else ReasonKind.RETRY
            if self.view.ask.attempt > 1
            else ReasonKind.EXPLORE
        )
        drawn = {"drawn_cost_j": drawn_j} if math.isfinite(drawn_j) else {}
        return Choice(
            arm,
            Reason.later(kind, tell, {**drawn, "best_cost_j": best_j}),
            cut=self.cut(),
            explores=arm != self.best,
            alone=False,
            run_cost=lambda: self.run_cost(arm),
        )

    def posterior(self, arm: int) -> Belief:
        """Return the belief of an arm's mean cost (Algorithm 2), in joules on this GPU; the prior without a run."""
        if arm not in self.epochs:
            return observe(Runs(), variance=0.0, prior=self.job.prior)
        epochs, cost = self.epochs[arm], self.costs[arm]
        costs = Runs(epochs.count, self.expected_j(arm), epochs.squares * cost**2)
        return observe(costs, variance=learnt_variance(costs, expecting=LEAST_NOISE), prior=self.job.prior)

    def run_cost(self, arm: int) -> RunCost | None:
        """Return what a run of an arm is believed to cost; None where it has not reached the target."""
        return self._known_cost(arm) if arm in self.epochs else None

    def _known_cost(self, arm: int) -> RunCost:
        belief, epochs = self.posterior(arm), self.epochs[arm]
        spread = math.sqrt(belief.variance) / belief.mean if belief.mean > 0 else 0.0
        return RunCost(belief.mean, spread, math.sqrt(learnt_variance(epochs)) / epochs.mean)

    def told(self, draws: Mapping[int, float] | None = None) -> tuple[ArmBelief, ...]:
        return tuple(self._told(b, (draws or {}).get(b)) for b in self.job.batch_sizes)

    def _told(self, arm: int, drawn: float | None) -> ArmBelief:
        reached, stopped = self.counts(arm)
        if arm not in self.view.arms:
            return ArmBelief(arm, reached, status=ArmStatus.INFEASIBLE)
        if arm not in self.epochs:
            status = ArmStatus.PRUNED if self.runs(arm).failed else ArmStatus.STOPPED if stopped else ArmStatus.UNTRIED
            return ArmBelief(arm, 0, status=status, stopped=stopped)
        cost = self._known_cost(arm)
        spread = cost.spread if cost.expected_j > 0 else None
        status = ArmStatus.KNOWN if arm in self.arms else ArmStatus.PRUNED
        return ArmBelief(arm, reached, cost.expected_j, spread, drawn, status, noise=cost.noise, stopped=stopped)


def _epochs(runs: ArmRuns) -> Runs:
    """Return an arm's epochs, with what stopped runs say of them."""
    return with_stopped(runs.epochs, runs.stopped, variance=learnt_variance(runs.epochs))


_NO_RUNS = ArmRuns()

_: Policy[ZeusBelief] = Zeus()
