"""Reading a job's attempts: which have their observation, which of those count, which recurrences have none."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.records import Decision, EnergySource, Gap, Observation
from zeus_flows.errors import StoreError, UnreadableRecord
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.layout import Layout
from zeus_flows.ledger.mlflow.pages import Page

log = logging.getLogger(__name__)

#: Deleted runs that are looked at.
_DELETED: Final = 200
#: Attempts between two words on how far reading them is.
_TOGETHER: Final = 100

#: Told how many of how many are done.
Progress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt that has a decision and no observation, and what its holder last said."""

    run_id: str
    decision: Decision
    lease: str


def untold(_done: int, _total: int) -> None:
    """Tell nobody."""


class Attempts:
    """Reads attempts by the ids of their runs; keeps what it has read of closed ones.

    Args:
        job: Whose they are.
        store: MLflow, as bounded calls.
        energy_source: Only observations of this source count.
        layout: The job's windows and pages.
    """

    def __init__(self, job: Job, store: Store, energy_source: EnergySource, layout: Layout) -> None:
        self._job, self._store, self._energy_source, self._layout = job, store, energy_source, layout
        self._closed: dict[str, Observation | None] = {}  # None: it was deleted, or cannot be read
        self._last_start_ms: int | None = None

    def read(self, run_ids: Iterable[str], *, newest: str | None = None) -> tuple[OpenAttempt, ...]:
        """Read those attempts that are not known to be closed; return those that are open.

        Args:
            run_ids: Which.
            newest: An attempt of which it is read when it started, where that of none is known.
        """
        wanted = [run_id for run_id in run_ids if run_id not in self._closed]
        timed = [newest] if newest is not None and self._last_start_ms is None else []
        looked_up = list(dict.fromkeys((*wanted, *timed)))
        found = self._store.runs(self._layout.experiment_id, looked_up) if looked_up else {}
        if found:
            self.started(max(int(run.info.start_time) for run in found.values()))
        still_open = []
        for run_id in wanted:
            run = found.get(run_id)
            if run is None or run.info.lifecycle_stage != "active" or names.DECISION not in run.data.params:
                self._leave_out(run_id, "it is gone" if run is None else "it was deleted")
                continue
            params = run.data.params
            try:
                if names.OBSERVATION in params:
                    self._closed[run_id] = codec.load_observation(params[names.OBSERVATION])
                else:
                    decision = codec.load_decision(params[names.DECISION])
                    still_open.append(OpenAttempt(run_id, decision, run.data.tags.get(names.LEASE, "")))
            except UnreadableRecord as error:
                self._leave_out(run_id, str(error))
            except StoreError as error:
                raise StoreError(f"run {run_id} of {self._job.name}: {error}") from None
        return tuple(still_open)

    def read_many(self, run_ids: Iterable[str], told: Progress = untold) -> None:
        """Read a whole history's attempts: what was observed straight from the tables, where MLflow has any.

        Args:
            run_ids: Which.
            told: How far it is.
        """
        wanted = [run_id for run_id in run_ids if run_id not in self._closed]
        done = 0
        for found in self._store.params_of(wanted, names.OBSERVATION):
            for run_id, params in found.items():
                try:
                    self._closed[run_id] = codec.load_observation(params[names.OBSERVATION])
                except StoreError:
                    continue  # read below, which says what is wrong
            done += len(found)
            told(done, len(wanted))
        rest = [run_id for run_id in wanted if run_id not in self._closed]
        for start in range(0, len(rest), _TOGETHER):
            self.read(rest[start : start + _TOGETHER])
            told(min(done + start + _TOGETHER, len(wanted)), len(wanted))

    def _leave_out(self, run_id: str, why: str) -> None:
        """Let an attempt count for nothing, and say so."""
        log.warning("run %s of %s does not count: %s", run_id, self._job.name, why)
        self._closed[run_id] = None

    def deleted(self) -> str:
        """Return a name for the attempts that were observed and then deleted by hand; empty where none were.

        Looks at the newest that were deleted. What was read of them before is forgotten, and so is that others were.
        """
        found = self._store.deleted(self._layout.experiment_id, most=_DELETED)
        gone = sorted(str(run.info.run_id) for run in found if names.OBSERVATION in run.data.params)
        self._closed = {run_id: known for run_id, known in self._closed.items() if known is not None}
        self._closed |= dict.fromkeys(gone)
        return hashlib.sha256(",".join(gone).encode()).hexdigest()[:16] if gone else ""

    def close(self, run_id: str, observation: Observation) -> None:
        """Keep an attempt's observation, as everybody else will read it."""
        self._closed[run_id] = observation

    def observation_of(self, run_id: str) -> Observation | None:
        """Return what was read of an attempt; None where it is open, unread or left out."""
        return self._closed.get(run_id)

    def counting(self, page: Page, *, after: int, upto: int | None = None) -> tuple[Observation, ...]:
        """Return the observations after a recurrence that are comparable with this job's, in the fold's order."""
        first = max(after + 1, self._layout.current().counts_from)
        mine = (self._job.fingerprint, self._energy_source)
        read = (
            self._closed.get(run_id)
            for (r, _), run_id in page.attempts.items()
            if r >= first and (upto is None or r <= upto)
        )
        counting = (o for o in read if o is not None and (o.fingerprint, o.energy_source) == mine)
        return tuple(sorted(counting, key=lambda o: o.order))

    def gaps(self, page: Page, *, after: int, upto: int | None = None) -> tuple[Gap, ...]:
        """Return the recurrences after one that have ended with nothing that counts, ascending.

        A page does not say whose recurrence was skipped. Those from the first one on that counts are taken to be this
        fingerprint's: others lie among them only where it changed to and fro, or changed just now.
        """
        first = max(after + 1, self._layout.current().counts_from)
        found = {r: gap for r, gap in page.gaps.items() if r >= first and (upto is None or r <= upto)}
        if not found:
            return ()
        counting = {o.recurrence for o in self.counting(page, after=after, upto=upto)}
        unread = {r for (r, _), run_id in page.attempts.items() if run_id not in self._closed}  # it may yet count
        return tuple(gap for r, gap in sorted(found.items()) if gap.skipped or r not in counting | unread)

    def advanced(self, state: policy.State, page: Page, *, after: int, upto: int | None = None) -> policy.State:
        """Return the state after the observations and gaps behind a recurrence, in the fold's order."""
        events: list[tuple[tuple[int, int], Observation | Gap]]
        events = [(o.order, o) for o in self.counting(page, after=after, upto=upto)]
        events += [((gap.recurrence, 0), gap) for gap in self.gaps(page, after=after, upto=upto)]
        for _, event in sorted(events, key=lambda item: item[0]):
            if isinstance(event, Gap):
                state = policy.pass_over(self._job, state, event)
            else:
                state = policy.advance(self._job, state, event)
        return state

    def next_start_ms(self, at_s: float | None = None) -> int:
        """Return when the next run starts: now, and never before the newest attempt."""
        return max(int((time.time() if at_s is None else at_s) * 1000), self._newest_start_ms() + 1)

    def started(self, start_ms: int) -> None:
        """Remember that an attempt started; those that follow start later."""
        self._last_start_ms = max(self._last_start_ms or 0, start_ms)

    def _newest_start_ms(self) -> int:
        """Return when the newest attempt started, by the clock of whoever decided it; 0 where there is none."""
        if self._last_start_ms is None:
            known = self._layout.page_ids()
            page = self._layout.read_page(max(known)) if known else Page()
            self.read((), newest=page.newest_attempt())
        return self._last_start_ms or 0
