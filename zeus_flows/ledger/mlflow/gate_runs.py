"""The runs of drift gates: that one is being asked, by whom, and what it found."""

from __future__ import annotations

from collections.abc import Mapping

from zeus_flows.core.gate import GateCheck
from zeus_flows.killpoints import reached
from zeus_flows.ledger.lease import Holder
from zeus_flows.ledger.mlflow import charts, names
from zeus_flows.ledger.mlflow.attempts import Attempts
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.layout import Layout
from zeus_flows.ledger.mlflow.names import RunKind
from zeus_flows.ledger.mlflow.record_text import fits_tag
from zeus_flows.ledger.mlflow.windows import Windows


class GateRuns:
    """Makes a recurrence's gate run, and writes to it and to the drift window's series.

    Args:
        store: MLflow, as bounded calls.
        layout: The pages that name the runs.
        attempts: When runs start.
        windows: Which window recurrences belong to.
    """

    def __init__(self, store: Store, layout: Layout, attempts: Attempts, windows: Windows) -> None:
        self._store, self._layout, self._attempts, self._windows = store, layout, attempts, windows

    def begin(self, recurrence: int, holder: Holder, context: Mapping[str, str]) -> str:
        """Make the run of a recurrence's gate, unless it has one; return its id."""
        standing = self._layout.read_page_of(recurrence).gates.get(recurrence)
        if standing is not None:
            return standing
        tags = {
            names.KIND: RunKind.GATE,
            names.RECURRENCE: str(recurrence),
            **self._windows.tags(),
            names.LEASE: holder.dump(),
            **{name: value for name, value in context.items() if value},
        }
        run_id = self._store.create_run(
            self._layout.experiment_id,
            name=f"{recurrence} · gate",
            tags={name: fits_tag(value) for name, value in tags.items()},
            start_ms=self._attempts.next_start_ms(),
        )
        reached("after-create-gate")
        standing = self._store.set_once(self._layout.page_of(recurrence), names.gate_run(recurrence), run_id)
        reached("after-link-gate")
        if standing != run_id:
            self._store.delete(run_id)
        return standing

    def end(self, run_id: str, check: GateCheck, *, at_s: float | None = None) -> None:
        """Write what a gate found on its run and in the series."""
        number, values = check.question.recurrence, charts.of_check(check)
        tags = {
            names.GATE: check.verdict,
            names.DETAIL: fits_tag(check.text),
            names.TRAINED_IN: str(check.question.trained_in),
            "mlflow.runName": f"{number} · gate: {check.verdict}",
        }
        shown = charts.metrics({**charts.of_scores(check), **values}, step=number, at_s=at_s)
        self._store.log(run_id, metrics=shown, tags=tags)
        self._store.log(self._windows.run_of(number), metrics=charts.metrics(values, step=number, at_s=at_s))
        reached("after-gate")
        self._store.end(run_id)

    def lease(self, run_id: str) -> str:
        """Return the lease of the process that asks, as it last wrote it."""
        return str(self._store.run(run_id).data.tags.get(names.LEASE, ""))
