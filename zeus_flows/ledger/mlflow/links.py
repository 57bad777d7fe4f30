"""What a run that holds a ledger together says, after people and `zeus-flows ledger repair` were at it."""

from __future__ import annotations

from typing import Final

from mlflow.entities import Run

from zeus_flows.errors import LedgerDamaged
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.names import RunKind

_HOLDS: Final = frozenset({RunKind.PAGE.value, RunKind.DRIFT_WINDOW.value})


def intact(run: Run) -> Run:
    """Return a run, after checking that it was not deleted, where it is one that holds a ledger together.

    A param that names another run cannot be changed. Where that is gone for good, a tag of the same name, which a
    repair wrote, names the one that took its place.

    Raises:
        LedgerDamaged: it was deleted.
    """
    tags = run.data.tags
    if tags.get(names.KIND) not in _HOLDS:
        return run
    if run.info.lifecycle_stage != "active":
        raise LedgerDamaged(
            f"{run.info.run_name} was deleted (run {run.info.run_id}): the job's history cannot be told without it\n"
            f"  type `zeus-flows ledger repair` with the job's file: it brings it back"
        )
    run.data.params.update({name: value for name, value in tags.items() if is_link(name)})
    return run


def is_link(name: str) -> bool:
    """Return whether a param of a drift window names another run of the ledger.

    >>> is_link("zf.page.3"), is_link("zf.next_window"), is_link("zf.window")
    (True, True, False)
    """
    return name == names.NEXT_WINDOW or names.page_number(name) is not None
