"""Reading a job's history from its runs: the fold that decisions are taken on, what is open, what was never linked.

A decision reads runs by id only: the root, the current drift window, one or two pages, and the attempts since the
snapshot. None of that grows with the history. `zeus_flows.ledger.mlflow` has what is promised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mlflow.entities import Run

from zeus_flows.core import policy
from zeus_flows.core.records import Decision, EnergySource, InFlight, Job, Observation
from zeus_flows.core.windows import Boundary, boundary
from zeus_flows.ledger import codec, pages, snapshot
from zeus_flows.ledger.pages import Page
from zeus_flows.ledger.points import reached
from zeus_flows.ledger.protocol import History
from zeus_flows.ledger.store import Store
from zeus_flows.ledger.structure import Structure, Window

log = logging.getLogger(__name__)

#: Closed recurrences between two snapshots while a long history is folded anew; what is folded then is kept.
_STRIDE: Final = 5 * pages.SIZE


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt that has a decision and no observation, and what its holder last said."""

    run_id: str
    decision: Decision
    lease: str


@dataclass(frozen=True, slots=True)
class Learnt:
    """The state after a recurrence, and the boundary that it makes, if any."""

    after: policy.State
    boundary: Boundary | None


class Reader(Structure):
    """Folds a job's history; keeps what it has read of closed attempts.

    Args:
        job: Whose history.
        store: MLflow, as bounded calls.
        energy_source: Only observations of this source are folded.
    """

    def __init__(self, job: Job, store: Store, energy_source: EnergySource) -> None:
        super().__init__(job, store, energy_source)
        self._closed: dict[str, Observation | None] = {}  # None: its run is gone
        self._last_start_ms: int | None = None

    def history(self) -> History:
        """Return the fold of all closed attempts, and what is in flight."""
        self._look()
        state, still_open, _ = self._fold(self.window(), keep=True)
        decisions = (attempt.decision for attempt in still_open)
        return History(state, tuple(InFlight(d.recurrence, d.attempt, d.batch_size, d.explores) for d in decisions))

    def unfinished(self) -> tuple[tuple[OpenAttempt, ...], Page]:
        """Return the attempts without an observation, and the pages on which recurrences may not have ended."""
        if self._find_root(make=False) is None:
            return (), Page()
        _, still_open, page = self._fold(self._look(), keep=False)
        return still_open, page

    def open_attempts(self) -> tuple[OpenAttempt, ...]:
        """Return the attempts without an observation."""
        return self.unfinished()[0]

    def open_attempts_of(self, recurrence: int) -> tuple[OpenAttempt, ...]:
        """Return a recurrence's attempts without an observation."""
        return self._read_attempts(self._read_page_of(recurrence).attempts_of(recurrence).values())

    def open_claims(self) -> Mapping[int, str]:
        """Return recurrences that were taken and have not ended, with who took them."""
        page = self.unfinished()[1]
        return {number: holder for number, holder in page.claims.items() if number not in page.ended}

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation that counts, in the fold's order, read from the runs."""
        if self._find_root(make=False) is None:
            return ()
        window = self._look()
        page = self._read_pages(0)
        self._read_attempts(run_id for (r, _), run_id in page.attempts.items() if r >= window.counts_from)
        return self._counting(page, after=window.counts_from - 1)

    def verify(self) -> tuple[bool, int]:
        """Return whether the state by snapshot is the fold of all runs, and how many observations that has."""
        if self._find_root(make=False) is None:
            return True, 0
        state, _, _ = self._fold(self._look(), keep=False)
        folded = policy.fold(self._job, self.observations())
        return policy.to_json(state) == policy.to_json(folded), folded.observations

    def _fold(self, window: Window, *, keep: bool) -> tuple[policy.State, tuple[OpenAttempt, ...], Page]:
        """Return the state, what is open, and the pages since the snapshot; `keep` a new snapshot where it is time.

        Page by page: where a long history must be folded anew, what was folded before time ran out is kept.
        """
        page, still_open = Page(), list[OpenAttempt]()
        known = snapshot.load(self._job, window.tags) if self._is_mine(window) else None
        upto = saved = known.upto if known else window.counts_from - 1
        state = known.state if known else policy.initial(self._job)
        numbers = [n for n in sorted(self._pages) if n >= pages.number_of(max(upto, 1))]
        for number in numbers:
            fresh = Page().read(self._store.params(self._pages[number]))
            page.add(fresh)
            still_open += self._read_attempts(self._worth_reading(fresh, window, after=upto))
            covered = page.closed_upto(upto, {attempt.decision.recurrence for attempt in still_open})
            for observation in self._counting(page, after=upto, upto=covered):
                state = policy.advance(self._job, state, observation)
            upto = covered
            if (
                keep
                and self._is_mine(window)
                and upto - saved >= (snapshot.EVERY if number == numbers[-1] else _STRIDE)
            ):
                tags = snapshot.dump(snapshot.Snapshot(upto, state))
                self._store.log(window.run_id, tags=tags)
                self._window = replace(window, tags={**window.tags, **tags})
                saved = upto
                reached("after-snapshot")
        for observation in self._counting(page, after=upto):
            state = policy.advance(self._job, state, observation)
        return state, tuple(still_open), page

    def _worth_reading(self, page: Page, window: Window, *, after: int) -> list[str]:
        """Return the attempts that a fold must read: those that may count or are open, and the newest for its time."""
        newest = max(page.attempts, default=None)
        wanted = {
            run_id: None
            for (r, m), run_id in sorted(page.attempts.items())
            if (r > after and (r >= window.counts_from or r not in page.ended))
            or ((r, m) == newest and self._last_start_ms is None)
        }
        return list(wanted)

    def _counting(self, page: Page, *, after: int, upto: int | None = None) -> tuple[Observation, ...]:
        """Return the observations after a recurrence that are comparable with this job's, in the fold's order."""
        first = max(after + 1, self._current_window().counts_from)
        mine = (self._job.fingerprint, self._energy_source)
        read = (
            self._closed.get(run_id)
            for (r, _), run_id in page.attempts.items()
            if r >= first and (upto is None or r <= upto)
        )
        counting = (o for o in read if o is not None and (o.fingerprint, o.energy_source) == mine)
        return tuple(sorted(counting, key=lambda o: o.order))

    def _read_attempts(self, run_ids: Iterable[str]) -> tuple[OpenAttempt, ...]:
        """Read those attempts that are not known to be closed; return those that are open."""
        wanted = [run_id for run_id in run_ids if run_id not in self._closed]
        found = self._store.runs(self.experiment_id, wanted) if wanted else {}
        still_open = []
        for run_id in wanted:
            run = found.get(run_id)
            params = run.data.params if run is not None else {}
            if run is not None:
                self._last_start_ms = max(self._last_start_ms or 0, int(run.info.start_time))
            if "zf.observation" in params:
                self._closed[run_id] = codec.load_observation(params["zf.observation"])
            elif run is not None and "zf.decision" in params:
                decision = codec.load_decision(params["zf.decision"])
                still_open.append(OpenAttempt(run_id, decision, run.data.tags.get("zf.lease", "")))
            else:
                log.warning("run %s of %s is gone; what it observed no longer counts", run_id, self._job.name)
                self._closed[run_id] = None
        return tuple(still_open)

    def _next_start_ms(self, at_s: float | None = None) -> int:
        """Return when the next run starts: now, and never before the newest attempt."""
        return max(int((time.time() if at_s is None else at_s) * 1000), self._newest_start_ms() + 1)

    def _newest_start_ms(self) -> int:
        """Return when the newest attempt started, by the clock of whoever decided it; 0 where there is none."""
        if self._last_start_ms is None:
            known = self._page_ids()
            page = Page().read(self._store.params(known[max(known)])) if known else Page()
            self._read_attempts(page.attempts[newest] for newest in sorted(page.attempts)[-1:])
        return self._last_start_ms or 0

    def unended_runs(self, *, most: int) -> Sequence[Run]:
        """Return the newest runs of this ledger that look as if something were running."""
        root = self._find_root(make=False)
        if root is None:
            return ()
        found = self._store.search([self.experiment_id, root[0]], "attributes.status = 'RUNNING'", most=most)
        return [run for run in found if run.info.lifecycle_stage == "active" and "zf.kind" in run.data.tags]

    def is_linked(self, run: Run) -> bool:
        """Return whether a run is part of the ledger, by what the pages, the root or the chain of windows say."""
        tags, run_id = run.data.tags, str(run.info.run_id)
        match tags["zf.kind"]:
            case "attempt":
                recurrence, attempt = int(tags["zf.recurrence"]), int(tags["zf.attempt"])
                if (number := pages.number_of(recurrence)) not in self._page_ids():
                    return False
                return self._store.params(self._pages[number]).get(pages.attempt(recurrence, attempt)) == run_id
            case "gate":
                recurrence = int(tags["zf.recurrence"])
                known = pages.number_of(recurrence) in self._page_ids()
                return known and self._read_page_of(recurrence).gates.get(recurrence) == run_id
            case "page":
                return run_id in self._page_ids().values()
            case "drift-window":
                return run_id in self._windows()
        return True

    # -- drift windows -----------------------------------------------------------------------------------------------

    def _learnt(self, recurrence: int, observations: Sequence[Observation]) -> Learnt | None:
        """Return what a recurrence has taught, and whether that ends its drift window; None where it ends late.

        Then, or where its end is delivered again, what it would have ended has ended.
        """
        window = self.window()
        known = snapshot.load(self._job, window.tags)
        upto = known.upto if known else window.counts_from - 1
        if upto >= recurrence or recurrence < window.first:
            return None
        page = self._read_pages(upto)
        self._read_attempts(run_id for (r, _), run_id in page.attempts.items() if upto < r < recurrence)
        before = known.state if known else policy.initial(self._job)
        for observation in self._counting(page, after=upto, upto=recurrence - 1):
            before = policy.advance(self._job, before, observation)
        after = before
        for observation in observations:
            after = policy.advance(self._job, after, observation)
        so_far = self._so_far(window, recurrence)
        return Learnt(after, boundary(self._job, before, after, observations, recurrences=so_far))

    def _so_far(self, window: Window, recurrence: int) -> int:
        """Return how many recurrences of a window counted, up to one that does; 0 where no window can be full."""
        if self._job.window is None:
            return 0
        page = self._read_pages(window.first - 1)
        self._read_attempts(run_id for (r, _), run_id in page.attempts.items() if window.first <= r < recurrence)
        before = self._counting(page, after=window.first - 1, upto=recurrence - 1)
        return len({observation.recurrence for observation in before}) + 1

    def _window_of(self, recurrence: int) -> str:
        """Return the run of the drift window that a recurrence belongs to: where it ends late, not the current one."""
        window = self.window()
        if recurrence >= window.first:
            return window.run_id
        page = self._read_page_of(recurrence)
        runs = (*page.attempts_of(recurrence).values(), *filter(None, [page.gates.get(recurrence)]))
        return str(self._store.run(runs[0]).data.tags.get("zf.drift_window", window.run_id)) if runs else window.run_id
