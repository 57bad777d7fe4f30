"""Writes snapshots of the fold to the runs that hold a ledger together: drift windows and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.ledger.mlflow import names, pages, snapshot
from zeus_flows.ledger.mlflow.attempts import Attempts
from zeus_flows.ledger.mlflow.layout import Layout
from zeus_flows.ledger.mlflow.window_run import CurrentWindow, of_window


class SnapshotWriter:
    """Writes a job's snapshots. Which one is due is its caller's to know.

    Args:
        job: Whose history.
        layout: Its root, pages and chain of windows.
        attempts: What is read of its attempts: those that were deleted do not count.
    """

    def __init__(self, job: Job, layout: Layout, attempts: Attempts) -> None:
        self._job, self._layout, self._attempts = job, layout, attempts

    def grown(self, window: CurrentWindow, known: snapshot.Snapshot) -> tuple[dict[str, str], bool]:
        """Return the tags of a snapshot that grew from a window's, or those that mark that one; and which they are."""
        deleted = self._attempts.deleted()
        if overtaken := snapshot.overtake(self._job, window.tags, deleted):
            return overtaken, False
        return snapshot.dump(replace(known, deleted=deleted), over=window.tags), True

    def keep_page(self, window: CurrentWindow, number: int, state: policy.State) -> None:
        """Write the snapshot that ends a page to its run."""
        kept = snapshot.dump(snapshot.Snapshot(pages.last_of(number), state))
        self._layout.tag_page(number, kept | {names.SNAPSHOT_OF: of_window(window)})

    def keep(
        self,
        window: CurrentWindow,
        known: snapshot.Snapshot,
        *,
        head: str = snapshot.HEAD,
        also: Mapping[str, str] | None = None,
    ) -> None:
        """Write a snapshot to a window's run."""
        tags = snapshot.dump(known, head=head, over=window.tags) | dict(also or {})
        self._layout.tag(window, tags)
