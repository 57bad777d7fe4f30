"""`grid`: the paper's Grid Search with Pruning (section 6.1): each (batch size, power limit) in turn, then the best.

A batch size that fails to reach the target is dropped with all its power limits. Failing is what section 4.4 calls
it: a run is stopped before its cost would exceed beta times the cost of the cheapest configuration so far. Where the
GPU's limits are not known (`Ask.power_limits_w`), only batch sizes are tried, each at its best limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from zeus_flows.core.bandit import Runs
from zeus_flows.core.early_stop import CostCut
from zeus_flows.core.job import Job, WindowOf
from zeus_flows.core.policy.base import Choice, Lesson, Policy, View
from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.text import cost_text

Run = tuple[int, float | None, float]  # batch size, power limit and cost of a run that reached the target


@dataclass(frozen=True, slots=True)
class GridCell:
    """One configuration and its costs; a limit of None is the one the GPU had."""

    formerly: ClassVar[Mapping[str, str]] = {"setting": "power_limit_w"}

    batch_size: int
    setting: float | None
    costs: Runs = field(default_factory=Runs)


@dataclass(frozen=True, slots=True)
class GridBelief:
    """The configurations that converged, and the batch sizes that failed.

    Attributes:
        cells: One for each configuration that has a run.
        failed: Batch sizes whose newest run did not reach the target.
        newest: The newest runs, kept only under a window of the job.
    """

    cells: tuple[GridCell, ...] = ()
    failed: tuple[int, ...] = ()
    newest: tuple[Run, ...] = ()


class Grid:
    """Exhaustive search."""

    belief_type = GridBelief

    def initial(self, job: Job) -> GridBelief:
        """Return the belief before any observation."""
        return GridBelief()

    def learn(self, job: Job, belief: GridBelief, lesson: Lesson) -> GridBelief:
        """Return the belief after one more run."""
        if not lesson.converged:
            return GridBelief(belief.cells, tuple(sorted({*belief.failed, lesson.batch_size})), belief.newest)
        run = (lesson.batch_size, lesson.setting, lesson.cost_j)
        failed = tuple(b for b in belief.failed if b != lesson.batch_size)
        if job.window is None or job.window_of is WindowOf.ARM:
            return GridBelief(_with(belief.cells, run, window=job.window), failed)
        newest = (*belief.newest, run)[-job.window :]
        cells: tuple[GridCell, ...] = ()
        for one in newest:
            cells = _with(cells, one)
        return GridBelief(cells, failed, newest)

    def choose(self, job: Job, belief: GridBelief, view: View) -> Choice:
        """Return the next untried configuration, or the cheapest one; a retry is the cheapest one."""
        known = [c for c in belief.cells if c.batch_size in view.arms]
        reliable = [c for c in known if c.batch_size not in belief.failed] or known
        best = min(reliable, key=lambda c: (c.costs.mean, c.batch_size), default=None)
        if view.may_explore and (view.ask.attempt == 1 or best is None):
            choice = _next(job, belief, view, known, best)
            if choice is not None:
                return choice
        if best is None:
            text = f"nothing in the grid has reached the target; the default batch size {view.default} stands in"
            return Choice(view.default, Reason(ReasonKind.FIRST_RUN, text))
        text = f"the grid's cheapest is batch size {best.batch_size} at {cost_text(job, best.costs.mean)} a run"
        numbers = {"best_cost_j": best.costs.mean}
        fixed = best.setting if view.ask.power_limits_w else None
        return Choice(best.batch_size, Reason(ReasonKind.EXPLOIT, text, numbers=numbers), setting=fixed)


def _next(job: Job, belief: GridBelief, view: View, known: list[GridCell], best: GridCell | None) -> Choice | None:
    """Return the next configuration of the grid, b0 first; None where none is left."""
    limits: tuple[float | None, ...] = tuple(sorted(view.ask.power_limits_w, reverse=True)) or (None,)
    tried = {(c.batch_size, c.setting) for c in known} if view.ask.power_limits_w else set()
    seen = {c.batch_size for c in known}
    for b in (view.default, *(a for a in view.arms if a != view.default)):
        if b in belief.failed:
            continue
        for limit in limits:
            if ((b, limit) in tried) if limit is not None else (b in seen):
                continue
            text = f"batch size {b}{f' at {limit:.0f} W' if limit else ''} is next in the grid"
            if best is None:
                return Choice(b, Reason(ReasonKind.FIRST_RUN, text), setting=limit)
            cut = CostCut(job.beta * best.costs.mean)
            return Choice(b, Reason(ReasonKind.EXPLORE, text), cut=cut, explores=True, setting=limit)
    return None


def _with(cells: tuple[GridCell, ...], run: Run, *, window: int | None = None) -> tuple[GridCell, ...]:
    """Return the cells with one more run; the newest configuration is last."""
    b, limit, cost_j = run
    others = tuple(c for c in cells if (c.batch_size, c.setting) != (b, limit))
    same = [c.costs for c in cells if (c.batch_size, c.setting) == (b, limit)]
    return (*others, GridCell(b, limit, (same[0] if same else Runs()).add(cost_j, window=window)))


_: Policy[GridBelief] = Grid()
