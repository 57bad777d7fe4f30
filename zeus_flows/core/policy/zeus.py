"""`zeus`: the paper's Algorithm 3 without the published package's faults.

Pruning exploration in two rounds, then Gaussian Thompson sampling, with early stopping at beta times the minimum
cost of the window. It looks at each arm's runs as a set, so it does not matter in which order they were reported.
Costs are epochs x EpochCost: profiling is booked apart, and another GPU or eta only changes the second factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from zeus_flows.core.bandit import Belief, Runs, learnt_variance, observe, predict
from zeus_flows.core.early_stop import CostCut, Cut, NoCut
from zeus_flows.core.exploration import ROUNDS, next_in_round
from zeus_flows.core.job import Job
from zeus_flows.core.policy.base import Choice, Lesson, Policy, RunCost, View
from zeus_flows.core.policy.outlook import first_run
from zeus_flows.core.reasons import ArmBelief, ArmStatus, Explanation, Reason, ReasonKind
from zeus_flows.core.text import cost_text, times


@dataclass(frozen=True, slots=True)
class ArmRuns:
    """An arm's runs: epochs of all of them, how many converged, and the least epochs among those."""

    epochs: Runs = field(default_factory=Runs)
    converged: int = 0
    least: int | None = None
    newest: tuple[tuple[int, bool], ...] = ()  # (epochs, converged), kept only under a window

    def add(self, epochs: int, *, converged: bool, window: int | None) -> ArmRuns:
        """Return the runs with one more; under a window only the newest count."""
        if window is None:
            least = self.least
            if converged:
                least = epochs if least is None else min(least, epochs)
            return ArmRuns(self.epochs.add(epochs), self.converged + converged, least)
        newest = (*self.newest, (epochs, converged))[-window:]
        good = [e for e, ok in newest if ok]
        return ArmRuns(self.epochs.add(epochs, window=window), len(good), min(good, default=None), newest)


@dataclass(frozen=True, slots=True)
class ZeusBelief:
    """Each arm's runs, and under a window the newest runs of all (batch size, epochs, converged)."""

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
        epochs = max(lesson.epochs, 1)
        runs = belief.arms.get(lesson.batch_size, ArmRuns())
        arms = {
            **belief.arms,
            lesson.batch_size: runs.add(epochs, converged=lesson.converged, window=job.window),
        }
        if job.window is None:
            return ZeusBelief(arms)
        return ZeusBelief(arms, (*belief.newest, (lesson.batch_size, epochs, lesson.converged))[-job.window :])

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
        self.converged = {b: r for b in view.arms if (r := self.runs(b)).converged and b in self.costs}
        self.best = min(self.converged, key=self.expected_j, default=None)

    def count(self, arm: int) -> int:
        return round(self.runs(arm).epochs.count)

    def runs(self, arm: int) -> ArmRuns:
        return self.belief.arms.get(arm, _NO_RUNS)

    def expected_j(self, arm: int) -> float:
        return self.run_j(arm, self.runs(arm).epochs.mean)

    def run_j(self, arm: int, epochs: float) -> float:
        """Return what a run of so many epochs costs."""
        return self.once.get(arm, 0.0) + epochs * self.costs[arm]

    def cut(self) -> Cut:
        """Return the stop at beta times the minimum cost of the window; an unconverged run is not part of it."""
        if self.job.window is None:
            least = [self.run_j(b, r.least) for b, r in self.converged.items() if r.least is not None]
        else:
            least = [self.run_j(b, e) for b, e, ok in self.belief.newest if ok and b in self.costs]
        return CostCut(self.job.beta * min(least)) if least else NoCut()

    def without_best(self) -> Choice:
        """Choose before anything has reached the target: the arm with the fewest failures nearest to b0, uncut."""
        default = self.view.default
        arm = min(self.view.arms, key=lambda b: (self.runs(b).epochs.count, abs(math.log2(b / default)), b))
        text = f"no batch size has reached the target yet; {arm} has failed least, nearest to the default"
        return Choice(arm, Reason(ReasonKind.FIRST_RUN, text, arms=self.arms()), explores=True)

    def run_best(self, kind: ReasonKind, why: str, *, uncut: bool = False) -> Choice:
        assert self.best is not None
        best, cost, runs = self.best, self.expected_j(self.best), self.runs(self.best).epochs.count

        def tell() -> Explanation:
            known = f"about {cost_text(self.job, cost)} a run, {times(runs)} so far"
            return f"batch size {best} is the best known: {known}{why}", self.arms()

        return Choice(
            best,
            Reason.later(kind, tell, {"best_cost_j": cost}),
            cut=NoCut() if uncut else self.cut(),
            run_cost=lambda: self.run_cost(best),
        )

    def prune(self) -> Choice | None:
        """Return the next arm of Algorithm 3's two rounds (lines 2 to 9); None when both are over."""
        assert self.best is not None
        for number in range(1, min(ROUNDS, self.job.window or ROUNDS) + 1):
            arm = next_in_round(
                self.view.arms,
                start=self.view.default if number == 1 else self.best,
                round_number=number,
                runs=self.count,
                converged=lambda b: self.runs(b).converged > 0,
            )
            if arm is not None:
                return self.run_next(arm, number)
        return None

    def run_next(self, arm: int, number: int) -> Choice:
        assert self.best is not None
        best_j = self.expected_j(self.best)

        def tell() -> Explanation:
            which = "first" if number == 1 else "second"
            text = (
                f"batch size {arm} is next in the {which} round of trying out: smaller ones until one fails, then "
                f"larger ones; {self.best} is the best known so far at {cost_text(self.job, best_j)}"
            )
            return text, self.arms()

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
        fresh = [b for b in self.converged if b not in self.view.ask.tried] or list(self.converged)
        draws = predict({b: self.posterior(b) for b in fresh}, self.view.rng)
        arm = min(draws, key=lambda b: draws[b])
        best_j, runs = self.expected_j(self.best), self.runs(arm).epochs.count

        def tell() -> Explanation:
            if arm == self.best:
                text = f"batch size {arm}, the best known, drew the least cost ({cost_text(self.job, draws[arm])}); "
            else:
                text = (
                    f"batch size {arm} drew the least cost ({cost_text(self.job, draws[arm])}; {self.best}, the best "
                    f"known, is expected to cost {cost_text(self.job, best_j)}); "
                )
            return f"{text}{times(runs)} so far", self.arms(draws)

        kind = (
            ReasonKind.EXPLOIT
            if arm == self.best
            else ReasonKind.RETRY
            if self.view.ask.attempt > 1
            else ReasonKind.EXPLORE
        )
        return Choice(
            arm,
            Reason.later(kind, tell, {"drawn_cost_j": draws[arm], "best_cost_j": best_j}),
            cut=self.cut(),
            explores=arm != self.best,
            run_cost=lambda: self.run_cost(arm),
        )

    def posterior(self, arm: int) -> Belief:
        """Return the belief of an arm's mean cost (Algorithm 2), in joules on this GPU."""
        epochs, cost = self.runs(arm).epochs, self.costs[arm]
        costs = Runs(epochs.count, self.expected_j(arm), epochs.squares * cost**2)
        return observe(costs, variance=learnt_variance(costs), prior=self.job.prior)

    def run_cost(self, arm: int) -> RunCost | None:
        """Return what a run of an arm is believed to cost; None where it has not reached the target."""
        return self._known_cost(arm) if arm in self.converged else None

    def _known_cost(self, arm: int) -> RunCost:
        belief, epochs = self.posterior(arm), self.runs(arm).epochs
        spread = math.sqrt(belief.variance) / belief.mean if belief.mean > 0 else 0.0
        return RunCost(belief.mean, spread, math.sqrt(learnt_variance(epochs)) / epochs.mean)

    def arms(self, draws: Mapping[int, float] | None = None) -> tuple[ArmBelief, ...]:
        return tuple(self._arm(b, (draws or {}).get(b)) for b in self.job.batch_sizes)

    def _arm(self, arm: int, drawn: float | None) -> ArmBelief:
        runs = self.runs(arm)
        if arm not in self.view.arms:
            return ArmBelief(arm, runs.converged, status=ArmStatus.INFEASIBLE)
        if arm not in self.converged:
            stopped = self.count(arm)
            status = ArmStatus.PRUNED if stopped >= ROUNDS else ArmStatus.STOPPED if stopped else ArmStatus.UNTRIED
            return ArmBelief(arm, 0, status=status, stopped=stopped)
        cost, stopped = self._known_cost(arm), self.count(arm) - runs.converged
        spread = cost.spread if cost.expected_j > 0 else None
        return ArmBelief(
            arm, runs.converged, cost.expected_j, spread, drawn, ArmStatus.KNOWN, noise=cost.noise, stopped=stopped
        )


_NO_RUNS = ArmRuns()

_: Policy[ZeusBelief] = Zeus()
