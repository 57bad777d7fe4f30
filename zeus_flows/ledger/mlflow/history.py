"""Reading a job's history from its runs: the fold that decisions are taken on, what is open, what was never linked.

A decision reads runs by id only: the root, the current drift window, one or two pages, and the attempts since the
snapshot. None of that grows with the history. `zeus_flows.ledger.mlflow.ledger` has what is promised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mlflow.entities import Run

from zeus_flows.core import policy
from zeus_flows.core.drift_windows import Boundary, boundary
from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource, Gap, InFlight, Observation
from zeus_flows.killpoints import reached
from zeus_flows.ledger.mlflow import pages, set_aside, snapshot
from zeus_flows.ledger.mlflow.attempts import Attempts, OpenAttempt
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.layout import Window, read_window, snapshot_of
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.mlflow.set_aside import Change
from zeus_flows.ledger.protocol import History, SetAside

log = logging.getLogger(__name__)

#: Closed recurrences between two snapshots while a long history is folded anew; what is folded then is kept.
_STRIDE: Final = 5 * pages.SIZE
#: Recurrences whose folding anew is worth a line.
_WORTH_SAYING: Final = 500


@dataclass(frozen=True, slots=True)
class Learnt:
    """The state after a recurrence, and the boundary that it makes, if any.

    Attributes:
        whole: Whether the state has all sums; not where an earlier version wrote the snapshot it grew from.
    """

    after: policy.State
    boundary: Boundary | None
    whole: bool = True


class Reader(Attempts):
    """Folds a job's history.

    Args:
        job: Whose history.
        store: MLflow, as bounded calls.
        energy_source: Only observations of this source are folded.
        comparable: What the fingerprint is made of, in words, by name.

    Attributes:
        waits_for_refold: Whether a history whose snapshot an earlier version wrote is folded anew before it is
            returned. Otherwise the snapshot is decided on, and somebody else must call `refold`.
        is_outdated: Whether an earlier version wrote the snapshot that was last looked at.
    """

    def __init__(
        self, job: Job, store: Store, energy_source: EnergySource, comparable: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(job, store, energy_source, comparable)
        self.waits_for_refold = True
        self.is_outdated = False

    def history(self) -> History:
        """Return the fold of all closed attempts, and what is in flight."""
        self._look()
        window = self.window()
        state, still_open, page = self._fold(window, keep=True, outdated=True)
        if self.is_outdated and self.waits_for_refold:
            self.refold()
            window = self.window()
            state, still_open, page = self._fold(window, keep=True, outdated=False)
        decisions = (attempt.decision for attempt in still_open)
        return History(
            state,
            tuple(InFlight(d.recurrence, d.attempt, d.batch_size, d.explores) for d in decisions),
            under_way=tuple(sorted(r for r in page.claims if r not in page.ended and r >= window.counts_from)),
            set_aside=set_aside.read_set_aside(window.tags),
        )

    def state(self) -> policy.State:
        """Return the fold that the next decision would be taken on; writes nothing."""
        if self._find_root(make=False) is None:
            return policy.initial(self._job)
        return self._fold(self._look(), keep=False, outdated=False)[0]

    def unfinished(self) -> tuple[tuple[OpenAttempt, ...], Page]:
        """Return the attempts without an observation, and the pages on which recurrences may not have ended."""
        if self._find_root(make=False) is None:
            return (), Page()
        _, still_open, page = self._fold(self._look(), keep=False, outdated=True)
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
        window, page = self._read_all()
        return self._counting(page, after=window.counts_from - 1) if window else ()

    def gaps(self) -> tuple[Gap, ...]:
        """Return every recurrence that the fold passes over, in its order, read from the pages and runs."""
        window, page = self._read_all()
        return self._gaps(page, after=window.counts_from - 1) if window else ()

    def verify(self) -> tuple[bool, int]:
        """Return whether the state by snapshot is the fold of all runs, and how many observations that has."""
        if self._find_root(make=False) is None:
            return True, 0
        state, _, _ = self._fold(self._look(), keep=False, outdated=False)
        window, page = self._read_all()
        after = window.counts_from - 1 if window else 0
        folded = policy.fold(self._job, self._counting(page, after=after), self._gaps(page, after=after))
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
        window = self._look()
        if not self._outdated(window):
            return 0
        log.info("%s: an earlier version wrote the snapshot, so the history is folded anew", self._job.name)
        begun = snapshot.load(self._job, window.tags, head=snapshot.ANEW)
        known = begun if begun is not None and begun.whole else None
        upto = saved = known.upto if known else window.counts_from - 1
        state, page, still_open = known.state if known else policy.initial(self._job), Page(), list[OpenAttempt]()
        numbers = self._pages_after(upto)
        for number in numbers:
            if stopped():
                if upto > saved:
                    self._keep(window, snapshot.Snapshot(upto, state), head=snapshot.ANEW)
                return 0
            upto, state = self._fold_page(window, number, page, still_open, upto, state)
            if upto - saved >= _STRIDE and number != numbers[-1]:
                self._keep(window, snapshot.Snapshot(upto, state), head=snapshot.ANEW)
                saved = upto
        window = self._look()  # another may have begun meanwhile, or somebody else be done
        if not self._outdated(window):
            return 0
        self._keep(window, snapshot.Snapshot(upto, state), also=snapshot.cleared(window.tags, snapshot.ANEW))
        covered = upto - window.counts_from + 1
        log.info("%s: the history is folded anew; the snapshot covers %d recurrences", self._job.name, covered)
        return covered

    def _outdated(self, window: Window) -> bool:
        known = snapshot.load(self._job, window.tags) if self._is_mine(window) else None
        return known is not None and not known.whole

    def _fold(
        self, window: Window, *, keep: bool, outdated: bool
    ) -> tuple[policy.State, tuple[OpenAttempt, ...], Page]:
        """Return the state, what is open, and the pages since the snapshot.

        Page by page: where a long history must be folded anew, what was folded before time ran out is kept.

        Args:
            window: The current one.
            keep: Write a new snapshot where it is time.
            outdated: Whether a snapshot of an earlier version will do. None is written from it.
        """
        page, still_open = Page(), list[OpenAttempt]()
        known = snapshot.load(self._job, window.tags) if self._is_mine(window) else None
        self.is_outdated = known is not None and not known.whole
        if self.is_outdated:
            known, keep = known if outdated else None, False
        upto = saved = known.upto if known else window.counts_from - 1
        state = known.state if known else policy.initial(self._job)
        numbers = self._pages_after(upto)
        if (
            keep
            and known is None
            and (many := self.last_recurrence() - upto if len(numbers) > 5 else 0) > _WORTH_SAYING
        ):
            log.info("%s: no snapshot is of use, so %d recurrences are folded anew", self._job.name, many)
        for number in numbers:
            upto, state = self._fold_page(window, number, page, still_open, upto, state)
            if (
                keep
                and self._is_mine(window)
                and upto - saved >= (snapshot.EVERY if number == numbers[-1] else _STRIDE)
            ):
                self._keep(window, snapshot.Snapshot(upto, state))
                saved = upto
                reached("after-snapshot")
        return self._advanced(state, page, after=upto), tuple(still_open), page

    def _pages_after(self, upto: int) -> list[int]:
        return [n for n in sorted(self._pages) if n >= pages.number_of(max(upto, 1))]

    def _fold_page(
        self, window: Window, number: int, page: Page, still_open: list[OpenAttempt], upto: int, state: policy.State
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
        fresh = Page().read(self._store.params(self._pages[number]))
        page.add(fresh)
        newest = max(fresh.attempts) if fresh.attempts and self._last_start_ms is None else None
        timed = [] if newest is None else [fresh.attempts[newest]]
        still_open += self._read_attempts(self._worth_reading(fresh, window, after=upto), timed=timed)
        covered = page.closed_upto(upto, {attempt.decision.recurrence for attempt in still_open})
        return covered, self._advanced(state, page, after=upto, upto=covered)

    def _keep(
        self,
        window: Window,
        known: snapshot.Snapshot,
        *,
        head: str = snapshot.HEAD,
        also: Mapping[str, str] | None = None,
    ) -> None:
        """Write a snapshot to a window's run."""
        tags = snapshot.dump(known, head=head) | dict(also or {})
        self._store.log(window.run_id, tags=tags)
        self._window = replace(window, tags={**window.tags, **tags})

    def _read_all(self) -> tuple[Window | None, Page]:
        """Return the current window, and all pages as one, after reading every attempt that may count."""
        if self._find_root(make=False) is None:
            return None, Page()
        window, page = self._look(), self._read_pages(0)
        self._read_attempts(run_id for (r, _), run_id in page.attempts.items() if r >= window.counts_from)
        return window, page

    def _worth_reading(self, page: Page, window: Window, *, after: int) -> list[str]:
        """Return the attempts that a fold must read: those that may count or are open."""
        wanted = {
            run_id: None
            for (r, _), run_id in sorted(page.attempts.items())
            if r > after and (r >= window.counts_from or r not in page.ended)
        }
        return list(wanted)

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

    def window(self) -> Window:
        """Return the drift window that recurrences belong to now, opening one where comparability ended."""
        window = self._current_window()
        while not self._is_mine(window):
            window, _ = self._open_comparable(window)
        if (words := set_aside.write_words(self._comparable)) and not set_aside.read_words(
            window.tags
        ):  # an earlier version opened it
            self._store.log(window.run_id, tags=words)
            self._window = window = replace(window, tags={**window.tags, **words})
        return window

    def would_set_aside(self) -> str | None:
        """Return, as a sentence, what would stop counting if a recurrence ran now; None: nothing. Writes nothing."""
        if self._find_root(make=False) is None or self._is_mine(current := self._look()):
            return None
        found = self._set_aside(current)
        return found.text if found else None

    def _open_comparable(self, current: Window) -> tuple[Window, bool]:
        """Open a window for what is no longer comparable; one that was about the same before is taken up again."""
        found = self._set_aside(current)
        counts_from = max(current.counts_from, snapshot.covers(current.tags) + 1)  # others may be under way since then
        about = {"zf.kind": "drift-window", "zf.fingerprint": self._job.fingerprint}
        earlier = self._store.newest(self.experiment_id, about | {"zf.energy_source": self._energy_source.value})
        tags = set_aside.write_set_aside(found)
        if earlier is not None and "zf.counts_from" in earlier.data.params:
            known = read_window(earlier)
            counts_from, tags = known.counts_from, tags | snapshot_of(known)
        opened, mine = self._open_after(
            current,
            "fingerprint",
            evidence="; ".join(f"{c.name} {c.was} became {c.now}" for c in self._changes(current)),
            first=max(self.last_recurrence(), 1),
            counts_from=counts_from,
            tags=tags,
        )
        if mine and found is not None:
            log.warning("%s: %s", self._job.name, found.text)
        return opened, mine

    def _set_aside(self, current: Window) -> SetAside | None:
        """Return what a window has observed that this job's runs cannot be compared with; None where that is nothing.

        The snapshot knows how many, so only what came since is read.
        """
        upto, observations = snapshot.counted(current.tags)
        page = self._read_pages(upto)
        since = {
            order: run_id for order, run_id in page.attempts.items() if order[0] >= max(upto + 1, current.counts_from)
        }
        self._read_attempts(since.values())
        theirs = (current.tags.get("zf.fingerprint"), current.tags.get("zf.energy_source"))
        read = (self._closed.get(run_id) for run_id in since.values())
        observations += sum(o is not None and (o.fingerprint, o.energy_source.value) == theirs for o in read)
        return SetAside(observations, set_aside.why(self._changes(current))) if observations else None

    def _changes(self, current: Window) -> tuple[Change, ...]:
        """Return what is not as a window's recurrences had it."""
        fingerprint, source = self._job.fingerprint, self._energy_source.value
        return set_aside.changes(current.tags, fingerprint=fingerprint, energy_source=source, words=self._comparable)

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
        after = before = self._advanced(before, page, after=upto, upto=recurrence - 1)
        for observation in observations:
            after = policy.advance(self._job, after, observation)
        so_far = self._so_far(window, recurrence)
        ended = boundary(self._job, before, after, observations, recurrences=so_far)
        return Learnt(after, ended, whole=known is None or known.whole)

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
