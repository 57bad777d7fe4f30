"""Keeps a job's page in MLflow as it should be: its saved views and its description. Nothing is decided on either."""

from __future__ import annotations

from urllib.parse import quote

from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource, Observation
from zeus_flows.core.rollout import in_force
from zeus_flows.core.savings import Savings
from zeus_flows.ledger.mlflow import views
from zeus_flows.ledger.mlflow.client import MLFLOW_NOTE
from zeus_flows.ledger.mlflow.job_note import JobFacts, is_ours, job_note
from zeus_flows.ledger.mlflow.layout import Layout
from zeus_flows.ledger.mlflow.views import SavedView, ViewFate


class JobPage:
    """A job's page.

    Args:
        job: Whose.
        layout: Where.
        energy_source: What its joules are.
        workspace: Of MLflow's server, where it has any.
    """

    def __init__(self, job: Job, layout: Layout, energy_source: EnergySource, workspace: str = "") -> None:
        self._job, self._layout, self._energy_source, self._workspace = job, layout, energy_source, workspace

    def install(self, *, anew: bool = False) -> tuple[tuple[SavedView, ViewFate], ...]:
        """Write the views that are missing or were renewed; return what became of each.

        Args:
            anew: Whether those are written, too, that somebody changed or deleted.
        """
        self._layout.exists()  # reads what there is
        wanted, said = self._layout.views, dict(self._layout.said)
        told = tuple((view, views.standing(view, said, anew=anew)) for view in wanted)
        self._layout.say(views.due(wanted, said, anew=anew))
        return told

    def describe(
        self, recurrence: int, saved: Savings | None, newest: Observation | None = None, *, anew: bool = False
    ) -> bool:
        """Write the experiment's description, unless it is somebody's own; return whether it is ours.

        Args:
            recurrence: The newest one.
            saved: What is known once that is folded.
            newest: How its last attempt went; None where that is not known.
            anew: Whether it is written whosever it is.
        """
        if not anew and not is_ours(self._layout.said.get(MLFLOW_NOTE, "")):
            return False
        facts = JobFacts(
            job=in_force(self._job, max(recurrence, 1)),
            saved=saved,
            recurrence=recurrence,
            newest=newest,
            counts_from=self._layout.current().counts_from,
            began_ms=self._layout.began_ms,
            energy_source=self._energy_source,
            comparable=self._layout.comparable,
        )
        wanted = self._layout.views
        note = job_note(facts, {view.id: self.address(view) for view in wanted}, wanted)
        if self._layout.said.get(MLFLOW_NOTE) != note:
            self._layout.say({MLFLOW_NOTE: note})
        return True

    def installed(self) -> tuple[SavedView, ...]:
        """Return the views that are there, as far as was read; the first one is what a link to the job opens."""
        return tuple(view for view in self._layout.views if view.key in self._layout.said)

    def address(self, view: SavedView) -> str:
        """Return where a view is, from any page of MLflow's server."""
        within = f"&workspace={quote(self._workspace)}" if self._workspace else ""
        return view.address(self._layout.experiment_id) + within
