"""`grid`: the paper's baseline that tries one (batch size, power limit) a recurrence, then keeps the cheapest.

Batch sizes that fail to reach the target are left out of what remains. Where the GPU's limits are not known
(`Ask.power_limits_w`), only batch sizes are tried, each at its best limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zeus_flows.core.bandit import Runs
from zeus_flows.core.job import Job
from zeus_flows.core.policy.base import Choice, Lesson, Policy, View
from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.text import cost_text


@dataclass(frozen=True, slots=True)
class GridCell:
    """One configuration and its costs; a limit of None is the one the GPU had."""

    batch_size: int
    power_limit_w: float | None
    costs: Runs = field(default_factory=Runs)


@dataclass(frozen=True, slots=True)
class GridBelief:
    """The configurations that converged, and the batch sizes that failed."""

    cells: tuple[GridCell, ...] = ()
    failed: tuple[int, ...] = ()


class Grid:
    """Exhaustive search."""

    belief_type = GridBelief

    def initial(self, job: Job) -> GridBelief:
        """Return the belief before any observation."""
        return GridBelief()

    def learn(self, job: Job, belief: GridBelief, lesson: Lesson) -> GridBelief:
        """Return the belief after one more run."""
        if not lesson.converged:
            return GridBelief(belief.cells, tuple(sorted({*belief.failed, lesson.batch_size})))
        limit = lesson.power_limit_w
        others = tuple(c for c in belief.cells if (c.batch_size, c.power_limit_w) != (lesson.batch_size, limit))
        same = [c.costs for c in belief.cells if (c.batch_size, c.power_limit_w) == (lesson.batch_size, limit)]
        costs = (same[0] if same else Runs()).add(lesson.cost_j, window=job.window)
        failed = tuple(b for b in belief.failed if b != lesson.batch_size)
        return GridBelief((*others, GridCell(lesson.batch_size, limit, costs)), failed)

    def choose(self, job: Job, belief: GridBelief, view: View) -> Choice:
        """Return the next untried configuration, or the cheapest one."""
        limits: tuple[float | None, ...] = tuple(sorted(view.ask.power_limits_w, reverse=True)) or (None,)
        known = [c for c in belief.cells if c.batch_size in view.arms]
        if view.may_explore and (view.ask.attempt == 1 or not known):
            tried = {(c.batch_size, c.power_limit_w) for c in known} if view.ask.power_limits_w else set()
            seen = {c.batch_size for c in known}
            for b in (view.default, *(a for a in view.arms if a != view.default)):
                if b in belief.failed:
                    continue
                for limit in limits:
                    if ((b, limit) in tried) if limit is not None else (b in seen):
                        continue
                    text = f"batch size {b}{f' at {limit:.0f} W' if limit else ''} is next in the grid"
                    kind = ReasonKind.EXPLORE if known else ReasonKind.FIRST_RUN
                    return Choice(b, Reason(kind, text), explores=bool(known), power_limit_w=limit)
        if not known:
            text = f"nothing in the grid has reached the target; the default batch size {view.default} stands in"
            return Choice(view.default, Reason(ReasonKind.FIRST_RUN, text))
        best = min(known, key=lambda c: (c.costs.mean, c.batch_size))
        text = f"the grid's cheapest is batch size {best.batch_size} at {cost_text(job, best.costs.mean)} a run"
        numbers = {"best_cost_j": best.costs.mean}
        fixed = best.power_limit_w if view.ask.power_limits_w else None
        return Choice(best.batch_size, Reason(ReasonKind.EXPLOIT, text, numbers=numbers), power_limit_w=fixed)


_: Policy[GridBelief] = Grid()
