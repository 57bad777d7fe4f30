"""Which runs are part of a ledger: the rest were created by processes that died before they linked them."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow.entities import Run

from zeus_flows.ledger.mlflow import names, pages
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.layout import Layout
from zeus_flows.ledger.mlflow.names import RunKind


def unended_runs(layout: Layout, store: Store, *, most: int) -> Sequence[Run]:
    """Return the newest runs of a ledger that look as if something were running.

    Args:
        layout: The ledger's.
        store: Where they are.
        most: How many are looked at.
    """
    if not layout.exists():
        return ()
    found = store.search(layout.experiment_ids, "attributes.status = 'RUNNING'", most=most)
    return [run for run in found if run.info.lifecycle_stage == "active" and names.KIND in run.data.tags]


def is_linked(layout: Layout, run: Run) -> bool:
    """Return whether a run is part of a ledger, by what the pages, the root or the chain of windows say."""
    tags, run_id = run.data.tags, str(run.info.run_id)
    match tags[names.KIND]:
        case RunKind.ATTEMPT | RunKind.GATE:
            recurrence = int(tags[names.RECURRENCE])
            if pages.number_of(recurrence) not in layout.page_ids():
                return False
            page = layout.read_page_of(recurrence)
            if tags[names.KIND] == RunKind.GATE:
                return page.gates.get(recurrence) == run_id
            return page.attempts.get((recurrence, int(tags[names.ATTEMPT]))) == run_id
        case RunKind.PAGE:
            return run_id in layout.page_ids().values()
        case RunKind.DRIFT_WINDOW:
            return run_id in layout.windows()
    return True
