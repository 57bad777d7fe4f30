"""Says when an attempt has trained enough: at its cut, or at max_epochs."""

from __future__ import annotations

import math

from zeus_flows.core.early_stop import CostCut, Cut, NoCut, PlannedCut, epochs_allowed, expected_excess
from zeus_flows.core.job import Job
from zeus_flows.core.learning_curve import Curve, forecast
from zeus_flows.core.text import cost_text


class Stopper:
    """Turns a decision's cut into a number of epochs. It does so again before each epoch.

    Args:
        job: Whose objective the costs are by.
        cut: The decision's.

    Attributes:
        allowed: The epochs that the cut came to; None while the cost of an epoch was never known.
    """

    def __init__(self, job: Job, cut: Cut) -> None:
        self._job, self._cut = job, cut
        self.allowed: int | None = None

    @property
    def cuts(self) -> bool:
        """Whether the attempt may be stopped at all."""
        return not isinstance(self._cut, NoCut)

    def why_stop(
        self, epoch: int, *, epoch_cost: float | None, once_cost: float = 0.0, curve: Curve = ()
    ) -> str | None:
        """Return why another epoch would be one too many, or None where it is not.

        Args:
            epoch: Epochs trained so far.
            epoch_cost: What one epoch costs, evaluation included; None while that is not known.
            once_cost: What the attempt cost before its first step.
            curve: Its learning curve so far.
        """
        if epoch_cost is None or not self.cuts:
            return None
        self.allowed = epochs_allowed(
            self._cut,
            epoch_cost_j=epoch_cost,
            max_epochs=self._job.max_epochs,
            once_j=once_cost,
            curve=curve,
            epoch=epoch,
        )
        if epoch < self.allowed:
            return None
        return why_stopped(self._job, self._cut, epochs=epoch, epoch_cost_j=epoch_cost, curve=curve)


def why_stopped(job: Job, cut: Cut, *, epochs: int, epoch_cost_j: float, curve: Curve = ()) -> str:
    """Return why an attempt was stopped after so many epochs, with the threshold that it met.

    >>> job = Job("t", (8,), 8, 9)
    >>> why_stopped(job, CostCut(1e5), epochs=3, epoch_cost_j=3e4)
    'stopped after 3 epochs: another, at 30 kJ, would cross the threshold of 100 kJ'
    """
    after = f"stopped after {epochs} epoch{'' if epochs == 1 else 's'}"
    another = cost_text(job, epoch_cost_j)
    match cut:
        case CostCut(threshold_j):
            return f"{after}: another, at {another}, would cross the threshold of {cost_text(job, threshold_j)}"
        case PlannedCut():
            best = cost_text(job, cut.best_cost_j)
            if cut.at_most_j is not None and (epochs + 1) * epoch_cost_j > cut.at_most_j:
                left = cost_text(job, max(cut.at_most_j, 0.0))
                return f"{after}: another, at {another}, would cross the {left} that the deadline leaves"
            over = cut.saved_j is not None and expected_excess(cut, epochs + 1, epoch_cost_j=epoch_cost_j) > cut.saved_j
            if over and cut.saved_j is not None:
                saved = cost_text(job, max(cut.saved_j, 0.0))
                return f"{after}: with another, at {another}, it is expected to cost more than the {saved} saved up"
            foretold = forecast(cut.reference, curve, epochs) if cut.reference is not None else None
            believed = f"was believed to take about {math.exp(min(cut.log_epochs, 30.0)):.1f}"
            if foretold is not None:
                believed += f", its learning curve says about {math.exp(min(foretold.log_epochs, 30.0)):.1f}"
            return (
                f"{after}: the target {believed}, and at {another} an epoch more would "
                f"not pay against the threshold of {best} for a run of the best known batch size"
            )
        case _:
            return after
