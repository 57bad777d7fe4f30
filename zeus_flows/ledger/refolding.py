"""Folds a history anew in the background, where an earlier version wrote its snapshot."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from zeus_flows.errors import StoreError
from zeus_flows.ledger.mlflow.ledger import MlflowLedger

log = logging.getLogger(__name__)


class Refolding:
    """Runs `MlflowLedger.refold` in a thread, at most once in a recurrence.

    Args:
        open_ledger: Opens a ledger of the thread's own.

    Attributes:
        thread: The one that folds, or did last; None where none was needed yet.
    """

    def __init__(self, open_ledger: Callable[[], MlflowLedger]) -> None:
        self._open_ledger = open_ledger
        self._last = ""
        self._stop = threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self, recurrence: str) -> None:
        """Begin to fold, unless that was begun in this recurrence, by its token, or still goes on."""
        if self._last == recurrence or (self.thread is not None and self.thread.is_alive()):
            return
        self._last = recurrence
        self.thread = threading.Thread(target=self._run, name="zeus-flows-refold", daemon=True)
        self.thread.start()

    def close(self, *, wait_s: float = 1.0) -> None:
        """Stop folding; what was folded is kept."""
        self._stop.set()
        if self.thread is not None:
            self.thread.join(timeout=wait_s)

    def _run(self) -> None:
        try:
            self._open_ledger().refold(self._stop.is_set)
        except Exception as error:  # decisions do without
            what = error if isinstance(error, StoreError) else type(error).__name__
            log.warning("%s; the next recurrence goes on folding the history anew", what)
