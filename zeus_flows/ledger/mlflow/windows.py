"""Which drift window recurrences belong to, and what stops counting where observations stop being comparable."""

from __future__ import annotations

import logging

from zeus_flows.core.drift_windows import Cause
from zeus_flows.core.job import Job
from zeus_flows.ledger.mlflow import names, set_aside, snapshot
from zeus_flows.ledger.mlflow.attempts import Attempts
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.layout import Layout
from zeus_flows.ledger.mlflow.set_aside import Change
from zeus_flows.ledger.mlflow.window_run import CurrentWindow, snapshot_of
from zeus_flows.ledger.protocol import SetAside

log = logging.getLogger(__name__)


class Windows:
    """Opens a drift window where a job's observations are no longer comparable with the current one's.

    Args:
        job: Whose windows.
        store: MLflow, as bounded calls.
        layout: The chain that they are.
        attempts: What was observed in them.
    """

    def __init__(self, job: Job, store: Store, layout: Layout, attempts: Attempts) -> None:
        self._job, self._store, self._layout, self._attempts = job, store, layout, attempts

    def current(self) -> CurrentWindow:
        """Return the drift window that recurrences belong to now, opening one where comparability ended."""
        window = self._layout.current()
        while not self._layout.is_mine(window):
            window = self._open_comparable(window)
        words = set_aside.write_words(self._layout.comparable)
        if words and not set_aside.read_words(window.tags):  # an earlier version opened it
            window = self._layout.tag(window, words)
        return window

    def tags(self) -> dict[str, str]:
        """Return the tags of a run that begins now: what it is comparable with, and its drift window."""
        return {**self._layout.about, names.DRIFT_WINDOW: self.current().run_id}

    def run_of(self, recurrence: int) -> str:
        """Return the run of the drift window that a recurrence belongs to: where it ends late, not the current one."""
        window = self.current()
        if recurrence >= window.first:
            return window.run_id
        page = self._layout.read_page_of(recurrence)
        runs = (*page.attempts_of(recurrence).values(), *filter(None, [page.gates.get(recurrence)]))
        return str(self._store.run(runs[0]).data.tags.get(names.DRIFT_WINDOW, window.run_id)) if runs else window.run_id

    def would_set_aside(self, *, looked: bool = False) -> str | None:
        """Return, as a sentence, what would stop counting if a recurrence ran now; None: nothing. Writes nothing.

        Args:
            looked: Whether the current window was read just now.
        """
        if not self._layout.exists():
            return None
        if self._layout.is_mine(current := self._layout.current() if looked else self._layout.look()):
            return None
        found = self._set_aside(current)
        return found.text if found else None

    def _open_comparable(self, current: CurrentWindow) -> CurrentWindow:
        """Open a window for what is no longer comparable; one that was about the same before is taken up again."""
        found = self._set_aside(current)
        counts_from = max(current.counts_from, snapshot.covers(current.tags) + 1)  # others may be under way since then
        tags = set_aside.write_set_aside(found)
        if (earlier := self._layout.newest_of_mine()) is not None:
            counts_from, tags = earlier.counts_from, tags | snapshot_of(earlier)
        opened, stands = self._layout.open_after(
            current,
            Cause.FINGERPRINT,
            evidence="; ".join(f"{c.name} {c.was} became {c.now}" for c in self._changes(current)),
            first=max(self._layout.last_recurrence(), 1),
            counts_from=counts_from,
            tags=tags,
        )
        if stands and found is not None:
            log.warning("%s: %s", self._job.name, found.text)
        return opened

    def _set_aside(self, current: CurrentWindow) -> SetAside | None:
        """Return what a window has observed that this job's runs cannot be compared with; None where that is nothing.

        The snapshot knows how many, so only what came since is read.
        """
        upto, observations = snapshot.counted(current.tags)
        page = self._layout.read_pages(upto)
        first = max(upto + 1, current.counts_from)
        since = [run_id for (recurrence, _), run_id in page.attempts.items() if recurrence >= first]
        self._attempts.read(since)
        theirs = (current.tags.get(names.FINGERPRINT), current.tags.get(names.ENERGY_SOURCE))
        read = (self._attempts.observation_of(run_id) for run_id in since)
        observations += sum(o is not None and (o.fingerprint, o.energy_source.value) == theirs for o in read)
        return SetAside(observations, set_aside.why(self._changes(current))) if observations else None

    def _changes(self, current: CurrentWindow) -> tuple[Change, ...]:
        """Return what is not as a window's recurrences had it."""
        return set_aside.changes(current.tags, self._layout.about, words=self._layout.comparable)
