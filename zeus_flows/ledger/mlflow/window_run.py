"""A drift window, as its run says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlflow.entities import Run

from zeus_flows.ledger.mlflow import names, snapshot


@dataclass(frozen=True, slots=True)
class CurrentWindow:
    """The drift window that recurrences belong to now."""

    run_id: str
    number: int
    first: int
    counts_from: int
    tags: Mapping[str, str]


def read_window(run: Run) -> CurrentWindow:
    """Return the drift window that a run is."""
    params = run.data.params
    return CurrentWindow(
        run_id=str(run.info.run_id),
        number=int(params[names.WINDOW]),
        first=int(params[names.FIRST_RECURRENCE]),
        counts_from=int(params[names.COUNTS_FROM]),
        tags=dict(run.data.tags),
    )


def of_window(window: CurrentWindow) -> str:
    """Return what a snapshot that ends a page is of: which observations count in a window, and from when on."""
    return f"{window.tags.get(names.FINGERPRINT)} {window.tags.get(names.ENERGY_SOURCE)} from {window.counts_from}"


def snapshot_of(window: CurrentWindow) -> dict[str, str]:
    """Return the tags of a window's snapshot."""
    return {name: value for name, value in window.tags.items() if value and name.startswith(snapshot.HEAD)}
