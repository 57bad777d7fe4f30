"""Reading a job's history from its runs: the fold that decisions are taken on, and what is open.

A decision reads runs by id only: the root, the current drift window, one or two pages, and the attempts since the
snapshot. None of that grows with the history. What one look at them found is a `Reading`: the janitor, the decision and
the recurrence's end share it. `zeus_flows.ledger.mlflow.ledger` has what is promised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from zeus_flows.core import policy
from zeus_flows.core.drift_windows import boundary
from zeus_flows.core.job import Job
from zeus_flows.core.records import Gap, InFlight, Observation
from zeus_flows.killpoints import reached
from zeus_flows.ledger.mlflow import pages, set_aside, snapshot
from zeus_flows.ledger.mlflow.attempts import Attempts, OpenAttempt, Progress, untold
from zeus_flows.ledger.mlflow.layout import Layout
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.mlflow.reading import Learnt, Reading
from zeus_flows.ledger.mlflow.snapshot_writer import SnapshotWriter
from zeus_flows.ledger.mlflow.window_run import CurrentWindow, of_window
from zeus_flows.ledger.mlflow.windows import Windows
from zeus_flows.ledger.protocol import History

log = logging.getLogger(__name__)

#: Closed recurrences between two snapshots while a long history is folded anew; what is folded then is kept.
_STRIDE: Final = 5 * pages.SIZE
#: Closed recurrences that a snapshot may lag behind before a decision writes it, as no recurrence's end did.
_LATE: Final = 2 * snapshot.EVERY
#: Recurrences whose folding anew is worth a line.
_WORTH_SAYING: Final = 500


class HistoryReader:
    """Folds a job's history.

    Args:
        job: Whose history.
        layout: Its root, pages and chain of windows.
        attempts: What is read of its attempts.
        windows: Which window recurrences belong to.

    Attributes:
        is_outdated: Whether the snapshot that was last looked at serves, but is to be folded anew.
        seen: What `unfinished` found, unless something was written since.
        swept: The same, where the next recurrence may begin and decide on it; None: it is to be read anew.
        decided_on: What the last decision was taken on, or another ledger of this job has decided on.
    """

    def __init__(self, job: Job, layout: Layout, attempts: Attempts, windows: Windows) -> None:
        self._job, self._layout, self._attempts, self._windows = job, layout, attempts, windows
        self._writer = SnapshotWriter(job, layout, attempts)
        self.is_outdated = False
        self.seen: Reading | None = None
        self.swept: Reading | None = None
        self.decided_on: Reading | None = None

    def history(self, *, wait_for_refold: bool) -> History:
        """Return the fold of all closed attempts, and what is in flight: as the janitor just found it, else read anew.

        Args:
            wait_for_refold: Whether a history whose snapshot an earlier version wrote is folded anew before it is
                returned. Otherwise the snapshot is decided on, and somebody else must call `refold`.
        """
        reading, self.swept = self.swept, None
        window = self._windows.current() if reading is not None else None
        if reading is None or window is None or reading.window.run_id != window.run_id or reading.lag >= _LATE:
            self._layout.look()
            window = self._windows.current()
            reading = self._fold(window, keep=True, outdated=True)
        if reading.outdated and wait_for_refold:
            self.refold()
            window = self._windows.current()
            reading = self._fold(window, keep=True, outdated=False)
        self.decided_on = reading
        decisions, page = (attempt.decision for attempt in reading.still_open), reading.page
        return History(
            reading.state,
            tuple(InFlight(d.recurrence, d.attempt, d.batch_size, d.explores) for d in decisions),
            under_way=tuple(sorted(r for r in page.claims if r not in page.ended and r >= window.counts_from)),
            set_aside=set_aside.read_set_aside(window.tags),
        )

    def state(self) -> policy.State:
        """Return the fold that the next decision would be taken on; writes nothing."""
        if not self._layout.exists():
            return policy.initial(self._job)
        return self._fold(self._as_opened(self._layout.look()), keep=False, outdated=False).state

    def unfinished(self) -> tuple[tuple[OpenAttempt, ...], Page]:
        """Return the attempts without an observation, and the pages on which recurrences may not have ended."""
        if not self._layout.exists():
            return (), Page()
        self.seen = self._fold(self._layout.look(), keep=False, outdated=True)
        return self.seen.still_open, self.seen.page

    def forget(self) -> None:
        """Read anew what comes next: something was written."""
        self.seen = self.swept = None

    def observations_of(self, recurrence: int, page: Page) -> tuple[Observation, ...]:
        """Return a recurrence's observations that count, read from its runs."""
        self._attempts.read(page.attempts_of(recurrence).values())
        return self._attempts.counting(page, after=recurrence - 1, upto=recurrence)

    def _as_opened(self, window: CurrentWindow) -> CurrentWindow:
        """Return the current window, or the one that a recurrence would open after it where it is not comparable."""
        if self._layout.is_mine(window):
            return window
        if (earlier := self._layout.newest_of_mine()) is not None:
            return replace(window, counts_from=earlier.counts_from, tags=earlier.tags)
        counts_from = max(window.counts_from, snapshot.covers(window.tags) + 1)
        return replace(window, counts_from=counts_from, tags=self._layout.about)

    def observations(self, told: Progress = untold) -> tuple[Observation, ...]:
        """Return every observation that counts, in the fold's order, read from the runs."""
        window, page = self._read_all(told)
        return self._attempts.counting(page, after=window.counts_from - 1) if window else ()

    def gaps(self) -> tuple[Gap, ...]:
        """Return every recurrence that the fold passes over, in its order, read from the pages and runs."""
        window, page = self._read_all()
        return self._attempts.gaps(page, after=window.counts_from - 1) if window else ()

    def verify(self, told: Progress = untold) -> tuple[bool, int]:
        """Return whether the state by snapshot is the fold of all runs, and how many observations that has."""
        if not self._layout.exists():
            return True, 0
        state = self._fold(self._layout.look(), keep=False, outdated=False).state
        window, page = self._read_all(told)
        after = window.counts_from - 1 if window else 0
        folded = policy.fold(
            self._job, self._attempts.counting(page, after=after), self._attempts.gaps(page, after=after)
        )
        return policy.to_json(state) == policy.to_json(folded), folded.observations

    # -- folding -----------------------------------------------------------------------------------------------------

    def refold(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Fold the history anew where an earlier version wrote the snapshot, and write the one that takes its place.

        Meanwhile that one serves everybody, so what was folded so far is kept beside it.

        Args:
            stopped: Asked between pages whether to leave the rest to the next one who comes.

        Returns:
            How many recurrences the new snapshot covers; 0 where none was written.
        """
        window = self._layout.look()
        if not self._outdated(window):
            return 0
        why = "attempts were deleted" if snapshot.is_overtaken(window.tags) else "an earlier version wrote the snapshot"
        log.warning("%s: %s, so the history is folded anew", self._job.name, why)
        begun, deleted = snapshot.load(self._job, window.tags, head=snapshot.ANEW), self._attempts.deleted()
        known = begun if begun is not None and begun.whole and begun.deleted == deleted else None
        upto = saved = known.upto if known else window.counts_from - 1
        state, page, still_open = known.state if known else policy.initial(self._job), Page(), list[OpenAttempt]()
        numbers = self._pages_after(upto)
        for number in numbers:
            if stopped():
                if upto > saved:
                    self._writer.keep(window, snapshot.Snapshot(upto, state, deleted=deleted), head=snapshot.ANEW)
                return 0
            upto, state = self._fold_page(window, number, page, still_open, upto, state)
            if upto == pages.last_of(number):
                self._writer.keep_page(window, number, state)
            if upto - saved >= _STRIDE and number != numbers[-1]:
                self._writer.keep(window, snapshot.Snapshot(upto, state, deleted=deleted), head=snapshot.ANEW)
                saved = upto
        window = self._layout.look()  # another may have begun meanwhile, or somebody else be done
        if not self._outdated(window):
            return 0
        cleared = snapshot.cleared(window.tags, snapshot.ANEW)
        self._writer.keep(window, snapshot.Snapshot(upto, state, deleted=deleted), also=cleared)
        covered = upto - window.counts_from + 1
        log.warning("%s: the history is folded anew; the snapshot covers %d recurrences", self._job.name, covered)
        return covered

    def _outdated(self, window: CurrentWindow) -> bool:
        known = snapshot.load(self._job, window.tags) if self._layout.is_mine(window) else None
        return known is not None and not known.whole

    def _fold(self, window: CurrentWindow, *, keep: bool, outdated: bool) -> Reading:
        """Return the state, what is open, and the pages since the snapshot, after a look.

        Page by page: where a long history must be folded anew, what was folded before time ran out is kept.

        Args:
            window: The current one.
            keep: Write a new snapshot where it is time.
            outdated: Whether a snapshot of an earlier version will do. None is written from it.
        """
        page, still_open = Page(), list[OpenAttempt]()
        known = snapshot.load(self._job, window.tags) if self._layout.is_mine(window) else None
        self.is_outdated = known is not None and not known.whole
        if self.is_outdated:
            known, keep = known if outdated else None, False
        upto = saved = known.upto if known else window.counts_from - 1
        state = known.state if known else policy.initial(self._job)
        numbers = self._pages_after(upto)
        if (
            keep
            and known is None
            and (many := self._layout.last_recurrence() - upto if len(numbers) > 5 else 0) > _WORTH_SAYING
        ):
            log.info("%s: no snapshot is of use, so %d recurrences are folded anew", self._job.name, many)
        passed = dict[int, policy.State]()
        for number in numbers:
            upto, state = self._fold_page(window, number, page, still_open, upto, state)
            if upto == pages.last_of(number) and page.kept.get(number) != of_window(window):
                passed[number] = state
            if (
                keep
                and self._layout.is_mine(window)
                and upto - saved >= (snapshot.EVERY if number == numbers[-1] else _STRIDE)
            ):
                keep = self._keep_grown(window, snapshot.Snapshot(upto, state))
                saved = upto
                reached("after-snapshot")
        now = self._attempts.advanced(state, page, after=upto)
        return Reading(window, page, tuple(still_open), now, upto, state, saved, self.is_outdated, passed)

    def _pages_after(self, upto: int) -> list[int]:
        return [n for n in self._layout.known_pages() if n >= pages.number_of(max(upto, 1))]

    def _fold_page(
        self,
        window: CurrentWindow,
        number: int,
        page: Page,
        still_open: list[OpenAttempt],
        upto: int,
        state: policy.State,
    ) -> tuple[int, policy.State]:
        """Add a page to those read and what is open on it to that; return how far nothing can be added, and the fold.

        Args:
            window: The current one.
            number: The page's.
            page: Those read so far, as one.
            still_open: Attempts on them without an observation.
            upto: How far the state goes.
            state: The fold up to there.
        """
        fresh = self._layout.read_page(number, looked=True)
        page.add(fresh)
        wanted = self._worth_reading(fresh, window, after=upto)
        still_open += self._attempts.read(wanted, newest=fresh.newest_attempt())
        covered = page.closed_upto(upto, {attempt.decision.recurrence for attempt in still_open})
        return covered, self._attempts.advanced(state, page, after=upto, upto=covered)

    def _keep_grown(self, window: CurrentWindow, known: snapshot.Snapshot) -> bool:
        """Write a snapshot that grew from a window's; return whether that was right.

        Where attempts were deleted, or brought back, since that one was made, it is marked instead: it serves until the
        history was folded anew, as one of an earlier version does.
        """
        tags, holds = self._writer.grown(window, known)
        self._layout.tag(window, tags)
        self.is_outdated = not holds
        return holds

    def due(self, window_id: str) -> dict[str, str]:
        """Return the tags of the snapshot that is due on a window's run, to be written with a recurrence's point."""
        known = self.decided_on
        if known is None or known.window.run_id != window_id or known.lag < snapshot.EVERY:
            return {}
        if not self._layout.is_mine(known.window):
            return {}
        self.decided_on = replace(known, saved=known.upto)
        return self._writer.grown(known.window, snapshot.Snapshot(known.upto, known.closed))[0]

    def is_halfway(self, recurrence: int) -> bool:
        """Return whether a recurrence is halfway between two snapshots, or the first: a time for what takes a call."""
        known = self.decided_on
        return recurrence == 1 or (known is not None and known.lag == snapshot.EVERY // 2)

    def after(self, observation: Observation) -> policy.State | None:
        """Return what the last decision was taken on, with what came of it; None where that is not known here."""
        known = self.decided_on
        if known is None or known.outdated or known.state.order >= observation.order:
            return None
        return policy.advance(self._job, known.state, observation)

    def keep_pages(self) -> None:
        """Write the snapshots that end pages, where the last decision passed any: old ones are explained from them."""
        known = self.decided_on
        if known is None or not known.passed:
            return
        if not known.outdated and self._layout.is_mine(known.window):
            for number, state in sorted(known.passed.items()):
                self._writer.keep_page(known.window, number, state)
        self.decided_on = replace(known, passed={})

    def _read_all(self, told: Progress = untold) -> tuple[CurrentWindow | None, Page]:
        """Return the current window, and all pages as one, after reading every attempt that may count."""
        if not self._layout.exists():
            return None, Page()
        window, page = self._layout.look(), self._layout.read_pages(0)
        counting = [run_id for (r, _), run_id in page.attempts.items() if r >= window.counts_from]
        self._attempts.read_many(counting, told)
        return window, page

    def _worth_reading(self, page: Page, window: CurrentWindow, *, after: int) -> list[str]:
        """Return the attempts that a fold must read: those that may count or are open."""
        wanted = {
            run_id: None
            for (r, _), run_id in sorted(page.attempts.items())
            if r > after and (r >= window.counts_from or r not in page.ended)
        }
        return list(wanted)

    def learnt(self, recurrence: int, observations: Sequence[Observation]) -> Learnt | None:
        """Return what a recurrence has taught, and whether that ends its drift window; None where it ends late.

        Then, or where its end is delivered again, what it would have ended has ended. Where all recurrences before it
        had ended when it was decided, nothing is read: what it was decided on still holds.
        """
        read = self.decided_on
        if (
            read is not None
            and read.upto == recurrence - 1
            and recurrence >= read.window.first
            and self._layout.is_mine(read.window)
        ):
            learnt = self._taught(read.window, read.closed, recurrence, observations, whole=not read.outdated)
            if learnt.boundary is None:
                return learnt
            self._layout.look()  # the window may have ended meanwhile
        window = self._windows.current()
        known = snapshot.load(self._job, window.tags)
        upto = known.upto if known else window.counts_from - 1
        if upto >= recurrence or recurrence < window.first:
            return None
        page = self._layout.read_pages(upto)
        self._attempts.read(run_id for (r, _), run_id in page.attempts.items() if upto < r < recurrence)
        before = known.state if known else policy.initial(self._job)
        before = self._attempts.advanced(before, page, after=upto, upto=recurrence - 1)
        return self._taught(window, before, recurrence, observations, whole=known is None or known.whole)

    def _taught(
        self,
        window: CurrentWindow,
        before: policy.State,
        recurrence: int,
        observations: Sequence[Observation],
        *,
        whole: bool,
    ) -> Learnt:
        """Return what a recurrence has taught beyond the state before it."""
        after = before
        for observation in observations:
            after = policy.advance(self._job, after, observation)
        so_far = self._so_far(window, recurrence)
        return Learnt(after, boundary(self._job, before, after, observations, recurrences=so_far), whole=whole)

    def _so_far(self, window: CurrentWindow, recurrence: int) -> int:
        """Return how many recurrences of a window counted, up to one that does; 0 where no window can be full."""
        if self._job.window is None:
            return 0
        page = self._layout.read_pages(window.first - 1)
        self._attempts.read(run_id for (r, _), run_id in page.attempts.items() if window.first <= r < recurrence)
        before = self._attempts.counting(page, after=window.first - 1, upto=recurrence - 1)
        return len({observation.recurrence for observation in before}) + 1
