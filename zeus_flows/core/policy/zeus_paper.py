"""`zeus-paper`: the published policy with its faults, for benchmarks.

It agrees with the published package (zeus 0.16, `zeus._legacy`) wherever that neither raises nor hangs: one
failure prunes an arm and all beyond it, two equal costs make an arm certain, the first run's cost includes its
profiling, the minimum cost is of all time and adds up the attempts of a recurrence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from zeus_flows.core.bandit import Runs, observe
from zeus_flows.core.early_stop import CostCut, Cut, NoCut
from zeus_flows.core.exploration import PublishedPruning
from zeus_flows.core.job import Job
from zeus_flows.core.policy.base import Choice, Lesson, Policy, View
from zeus_flows.core.reasons import Explanation, Reason, ReasonKind
from zeus_flows.core.text import cost_text, times

REFUSED = 100.0  # a run that may not train a single epoch counts as this many times the threshold
ENOUGH = 2  # an arm is sampled only with this many runs; until then it runs


@dataclass(frozen=True, slots=True)
class PaperBelief:
    """The published optimizer's state: pruning, costs per arm, and the minimum cost of a recurrence."""

    pruning: PublishedPruning
    costs: Mapping[int, Runs] = field(default_factory=dict)
    least_cost: float | None = None
    best: int | None = None
    recurrence: int = 0
    spent: float = 0.0


class ZeusPaper:
    """The published policy.

    Args:
        prunes: Whether a batch size that did not reach the target is dropped, with those beyond it. Keeping it is the
            ablation "no pruning" of section 6.7.
    """

    belief_type = PaperBelief

    def __init__(self, *, prunes: bool = True) -> None:
        self._prunes = prunes

    def initial(self, job: Job) -> PaperBelief:
        """Return the belief before any observation."""
        return PaperBelief(PublishedPruning.begin(job.batch_sizes, job.default_batch_size))

    def learn(self, job: Job, belief: PaperBelief, lesson: Lesson) -> PaperBelief:
        """Return the belief after one more run."""
        spent = lesson.cost_j + (belief.spent if lesson.recurrence == belief.recurrence else 0.0)
        cost = lesson.cost_j
        if lesson.refused and belief.least_cost is not None:
            cost = REFUSED * job.beta * belief.least_cost
        least, best = belief.least_cost, belief.best
        if lesson.converged and (least is None or spent < least):
            least, best = spent, lesson.batch_size
        runs = belief.costs.get(lesson.batch_size, Runs()).add(cost, window=job.window)
        return PaperBelief(
            pruning=belief.pruning.report(lesson.batch_size, cost=cost, converged=lesson.converged or not self._prunes),
            costs={**belief.costs, lesson.batch_size: runs},
            least_cost=least,
            best=best,
            recurrence=lesson.recurrence,
            spent=spent,
        )

    def choose(self, job: Job, belief: PaperBelief, view: View) -> Choice:
        """Return what the published package would: the next pruning step, or the greatest sampled reward."""
        cut: Cut = NoCut() if belief.least_cost is None else CostCut(job.beta * belief.least_cost)
        if not view.may_explore:
            best = belief.best if belief.best in view.arms else view.default
            return Choice(
                best or view.default, Reason(ReasonKind.EXPLOIT, f"batch size {best} is the best known"), cut=cut
            )
        expecting = belief.pruning.expecting
        if expecting in view.arms and expecting is not None:
            number = belief.pruning.round_number
            kind = ReasonKind.PRUNING if belief.costs else ReasonKind.FIRST_RUN
            text = f"batch size {expecting} is next in pruning round {number} of 2"
            return Choice(expecting, Reason(kind, text), cut=cut, explores=bool(belief.costs))
        arms = [b for b in belief.pruning.arms if b in view.arms]
        if not arms:
            text = f"every batch size was pruned, where the published package raises; {view.default} stands in"
            return Choice(view.default, Reason(ReasonKind.FIRST_RUN, text))
        # The published bandit shuffles its arms before every draw; the same calls keep its stream of numbers.
        rng = view.rng
        for arm in rng.choice(arms, len(arms), replace=False).tolist():
            if arm not in belief.costs or belief.costs[arm].count < ENOUGH:
                return Choice(arm, Reason(ReasonKind.EXPLORE, f"batch size {arm} has less than two runs"), cut=cut)
        draws = {b: _draw(belief.costs[b], job.prior, rng) for b in arms}
        arm = min(draws, key=draws.__getitem__)
        drawn_j, runs = draws[arm], belief.costs[arm].count

        def tell() -> Explanation:
            return f"batch size {arm} drew the least cost ({cost_text(job, drawn_j)}); {times(runs)} so far", ()

        return Choice(arm, Reason.later(ReasonKind.SAMPLED, tell, {"drawn_cost_j": drawn_j}), cut=cut)


def _draw(costs: Runs, prior: tuple[float, float] | None, rng: np.random.Generator) -> float:
    """Return a mean cost drawn as published: as a reward, the negative cost, with the variance taken at its word."""
    mean, variance = observe(costs, variance=costs.variance, prior=prior)
    return -rng.normal(-mean, math.sqrt(variance))


_: Policy[PaperBelief] = ZeusPaper()
