"""The runs that hold a ledger together: its root, its pages and the chain of its drift windows.

The first drift window's run is the root. The experiment `<job>.ledger` names it, and creating an experiment is a
compare-and-set; the root names the pages, and each window the next one, by write-once params. So whoever comes first
makes them, and everyone finds the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Run

from zeus_flows.core.drift_windows import Cause
from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import LedgerDamaged, StoreError, UnknownAttempt
from zeus_flows.killpoints import reached
from zeus_flows.ledger.mlflow import names, pages, views
from zeus_flows.ledger.mlflow.address import key_of
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.links import intact
from zeus_flows.ledger.mlflow.names import RunKind
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.mlflow.places import find_places, ledger_name, ledger_note, link_places
from zeus_flows.ledger.mlflow.record_text import fits_tag
from zeus_flows.ledger.mlflow.set_aside import shortened, write_words
from zeus_flows.ledger.mlflow.views import SavedView
from zeus_flows.ledger.mlflow.window_run import CurrentWindow, read_window

#: Pages that are as fast read one by one.
_FEW: Final = 2

P = ParamSpec("P")
T = TypeVar("T")


def _naming_what_is_gone(read: Callable[Concatenate[Layout, P], T]) -> Callable[Concatenate[Layout, P], T]:
    """Let a method of `Layout` that meets a run which is gone for good say which one, and what to do."""

    @wraps(read)
    def reading(layout: Layout, /, *args: P.args, **named: P.kwargs) -> T:
        try:
            return read(layout, *args, **named)
        except UnknownAttempt as error:
            raise layout.damaged(error) from None

    return reading


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a ledger's runs are, as one that has looked knows it: another need not ask again.

    `said` are the tags of the job's experiment.
    """

    experiment_id: str
    root: tuple[str, str]
    window: CurrentWindow
    pages: Mapping[int, str]
    said: Mapping[str, str]


class Layout:
    """Finds a job's root, pages and drift windows in MLflow, and makes those that are missing.

    It remembers the newest window and the pages it has seen; `look` reads them again, and brings the newest page along
    where the ledger's experiment names it.

    Args:
        job: Whose they are; its name is the experiment's.
        store: MLflow, as bounded calls.
        energy_source: What the job's joules are, which its drift windows are about.
        comparable: What the fingerprint is made of, in words, by name; empty where nobody said.

    Attributes:
        comparable: The same, each shortened.
        said: The tags of the job's experiment, as it was found or as they were written since.
        began_ms: When the job's experiment was made; None where that is not known.
    """

    def __init__(
        self, job: Job, store: Store, energy_source: EnergySource, comparable: Mapping[str, str] | None = None
    ) -> None:
        self._job, self._store, self._energy_source = job, store, energy_source
        self.comparable = shortened(comparable or {})
        self.said: dict[str, str] = {}
        self.began_ms: int | None = None
        self._experiment_id: str | None = None
        self._root: tuple[str, str] | None = None
        self._window: CurrentWindow | None = None
        self._pages: dict[int, str] = {}
        self._hints: dict[str, str] = {}  # by the tag of the ledger's experiment
        self._brought: dict[str, Run] = {}  # by the last look

    @property
    def key(self) -> str:
        """Names the store and the job, without secrets."""
        return key_of(self._store.location, self._job.name)

    @property
    def experiment_id(self) -> str:
        """The experiment that holds the attempts and drift windows; made if need be."""
        if self._experiment_id is None:
            self._find_root(make=False)
        if self._experiment_id is None:
            tags = {names.JOB: self._job.name} | views.due(self.views, {})
            made = self._store.create_experiment(self._job.name, tags=tags)
            found = find_places(self._store, self._job.name).job if made is None else None
            self.said = tags if found is None else dict(found.tags)
            self._experiment_id = made or str(found.experiment_id if found else "")
        return self._experiment_id

    @property
    def experiment_ids(self) -> tuple[str, str]:
        """That experiment and the ledger's own, which holds the pages; made if need be."""
        return self.experiment_id, self._require_root()[0]

    @property
    def about(self) -> dict[str, str]:
        """The tags that say what this job's observations are comparable with."""
        return {names.FINGERPRINT: self._job.fingerprint, names.ENERGY_SOURCE: self._energy_source.value}

    @property
    def views(self) -> tuple[SavedView, ...]:
        """The saved views that the job's experiment should have."""
        return views.all_views(joules=not self._job.in_seconds and self._energy_source is not EnergySource.NONE)

    @property
    def mark(self) -> str:
        """What a run's name says of its joules, where they were not measured."""
        return "" if self._energy_source is EnergySource.MEASURED else f" · {self._energy_source.value} energy"

    def exists(self) -> bool:
        """Return whether the ledger was begun. Makes nothing."""
        return self._find_root(make=False) is not None

    @_naming_what_is_gone
    def last_recurrence(self, *, looked: bool = False) -> int:
        """Return the newest recurrence number that was taken; 0 where none was.

        Args:
            looked: Whether the pages there are were read just now: the root of a long history is long, too.
        """
        if not self.exists() or not (known := self._pages if looked and self._pages else self.page_ids()):
            return 0
        newest = max(known)
        claims = Page().read(self._store.params(known[newest])).claims
        return max(claims, default=newest * pages.SIZE)

    def damaged(self, error: UnknownAttempt) -> LedgerDamaged:
        """Return what it means that a run which holds the ledger together is gone for good."""
        run_id = (re.findall(r"[0-9a-f]{32}", str(error)) or ["?"])[0]
        pages_by_id = {page_id: number for number, page_id in self._pages.items()}
        what = f"page {pages_by_id[run_id]}" if run_id in pages_by_id else "a drift window"
        if self._root is not None and run_id == self._root[1]:
            what = "the first drift window"
        return LedgerDamaged(
            f"{what} of {self._job.name} is gone for good (run {run_id}), and its history cannot be told without it\n"
            f"  type `zeus-flows ledger repair` with the job's file: it is rebuilt from the runs"
        )

    def open_window(self, opened_by: Cause, *, evidence: str, counts_from: int) -> CurrentWindow:
        """End the current drift window and open the next; one that another process opens meanwhile comes before it."""
        while True:
            window, stands = self.open_after(
                self.look(), opened_by, evidence=evidence, first=counts_from, counts_from=counts_from
            )
            if stands:
                return window

    def reset(self) -> int:
        """Start a new drift window in which nothing that was observed before counts; return its number."""
        evidence = "reset by hand: nothing that was observed before counts"
        return self.open_window(Cause.RESET, evidence=evidence, counts_from=self.last_recurrence() + 1).number

    # -- drift windows -----------------------------------------------------------------------------------------------

    def current(self) -> CurrentWindow:
        """Return the newest drift window that this ledger knows of, whatever it is about."""
        return self._window or self.look()

    @_naming_what_is_gone
    def look(self) -> CurrentWindow:
        """Read what others may have changed: the pages there are, and the newest drift window, which is returned."""
        self._window = read_window(self._look())
        return self._window

    def _look(self) -> Run:
        """Return the newest drift window's run, after learning which pages there are."""
        ledger_id, root_id = self._require_root()
        hinted = [root_id, *(run_id for run_id in self._hints.values() if run_id != root_id)]
        self._brought = self._store.whatever([self.experiment_id, ledger_id], hinted) if len(hinted) > 1 else {}
        root = self._brought_or_read(root_id)
        self._learn_pages(root.data.params)
        run = root
        if (hint := root.data.tags.get(names.CURRENT_WINDOW)) and hint != root.info.run_id:
            run = self._brought_or_read(hint)
        while following := run.data.params.get(names.NEXT_WINDOW):
            run = self._brought_or_read(following)
        return run

    def _brought_or_read(self, run_id: str) -> Run:
        """Return a run that the last look brought, once, or read it."""
        run = self._brought.pop(run_id, None)
        return self._store.run(run_id) if run is None else intact(run)

    def whereabouts(self) -> Whereabouts:
        """Return what another ledger of this job need not ask for."""
        return Whereabouts(self.experiment_id, self._require_root(), self.current(), dict(self._pages), self.said)

    def adopt(self, known: Whereabouts) -> None:
        """Take over what another ledger of this job has found."""
        self._experiment_id, self._root, self._window = known.experiment_id, known.root, known.window
        self._pages |= known.pages
        self.said = dict(known.said)

    def _hint(self, tag: str, run_id: str) -> None:
        """Have the ledger's experiment name what the next look is to bring along; without that it costs a call more."""
        ledger_id = self._require_root()[0]
        with suppress(StoreError):
            self._store.ask(lambda client: client.set_experiment_tag(ledger_id, tag, run_id))
            self._hints[tag] = run_id

    @_naming_what_is_gone
    def newest_windows(self, most: int | None = None) -> tuple[Run, ...]:
        """Return the runs of the newest drift windows, or of all, in order."""
        found = [self._look()]
        while most is None or len(found) < most:
            before = found[0].data.tags.get(names.PREVIOUS_WINDOW)
            if not before and found[0].data.params[names.WINDOW] != "1":  # an earlier version opened it
                chain = self.windows()
                before = chain[chain.index(str(found[0].info.run_id)) - 1]
            if not before:
                break
            found.insert(0, self._store.run(before))
        return tuple(found)

    @_naming_what_is_gone
    def windows(self) -> tuple[str, ...]:
        """Return the run ids of all drift windows, in order."""
        found = [self._require_root()[1]]
        while following := self._store.params(found[-1]).get(names.NEXT_WINDOW):
            found.append(following)
        return tuple(found)

    def is_mine(self, window: CurrentWindow) -> bool:
        """Return whether a window is about what is comparable with this job's observations."""
        return all(window.tags.get(name) == value for name, value in self.about.items())

    def newest_of_mine(self) -> CurrentWindow | None:
        """Return the newest window that is about this job's observations; None where there was none."""
        found = self._store.newest(self.experiment_id, {names.KIND: RunKind.DRIFT_WINDOW} | self.about)
        return read_window(found) if found is not None and names.COUNTS_FROM in found.data.params else None

    def tag(self, window: CurrentWindow, tags: Mapping[str, str]) -> CurrentWindow:
        """Write tags to the current window's run; return the window with them."""
        self._store.log(window.run_id, tags=tags)
        self._window = replace(window, tags={**window.tags, **tags})
        return self._window

    def open_after(
        self,
        current: CurrentWindow,
        opened_by: Cause,
        *,
        evidence: str,
        first: int,
        counts_from: int,
        tags: Mapping[str, str] | None = None,
    ) -> tuple[CurrentWindow, bool]:
        """Open the window after `current`; return the one that stands, and whether it is the one opened here.

        Args:
            current: What it follows.
            opened_by: What began it, which is what ended the one before.
            evidence: For that, as a sentence.
            first: Its first recurrence.
            counts_from: The first recurrence that counts for decisions.
            tags: What else it says: a snapshot that is still of use, what was set aside.
        """
        candidate = self._create_window(
            number=current.number + 1,
            opened_by=opened_by,
            first=first,
            counts_from=counts_from,
            tags={**(tags or {}), names.PREVIOUS_WINDOW: current.run_id},
        )
        reached("after-create-window")
        self._store.log(current.run_id, tags={names.ENDED_BY: opened_by.value, names.EVIDENCE: fits_tag(evidence)})
        winner = self._store.set_once(current.run_id, names.NEXT_WINDOW, candidate)
        reached("after-link-window")
        if winner != candidate:
            self._store.delete(candidate)
        self._store.end(current.run_id)
        self._store.log(self._require_root()[1], tags={names.CURRENT_WINDOW: winner})
        self._hint(names.CURRENT_WINDOW, winner)
        window = read_window(self._store.run(winner))
        self._window = window
        return window, winner == candidate

    def _create_window(
        self, *, number: int, opened_by: Cause, first: int, counts_from: int, tags: Mapping[str, str] | None = None
    ) -> str:
        run_id = self._store.create_run(
            self.experiment_id,
            name=f"drift window {number}{self.mark}",
            tags={
                names.KIND: RunKind.DRIFT_WINDOW,
                **self.about,
                **write_words(self.comparable),
                **(tags or {}),
            },
        )
        params = {names.WINDOW: number, names.FIRST_RECURRENCE: first, names.COUNTS_FROM: counts_from}
        texts = {name: str(value) for name, value in params.items()}
        self._store.log(run_id, params={names.OPENED_BY: opened_by.value} | texts)
        return run_id

    def _find_root(self, *, make: bool) -> tuple[str, str] | None:
        """Return the ledger's experiment and the run that is its root; None where there is none and none is made."""
        if self._root is None:
            found = find_places(self._store, self._job.name)
            self._root = found.root
            said = found.ledger.tags if found.ledger is not None else {}
            self._hints = {tag: said[tag] for tag in (names.CURRENT_WINDOW, names.CURRENT_PAGE) if tag in said}
            if found.job is not None:
                self._experiment_id = str(found.job.experiment_id)
                self.said, self.began_ms = dict(found.job.tags), found.job.creation_time
            if make:
                self._root = self._root or self._make_root()
                link_places(self._store, self._job.name, found.job, self.experiment_id, self._root[0])
                with suppress(StoreError):  # nothing depends on them
                    self.say(views.due(self.views, self.said))
        return self._root

    def say(self, tags: Mapping[str, str]) -> None:
        """Write tags to the job's experiment, a call each."""
        for tag in tags.items():
            self._store.ask(partial(_tag_experiment, self.experiment_id, tag))
            self.said |= [tag]

    def _make_root(self) -> tuple[str, str]:
        candidate = self._create_window(number=1, opened_by=Cause.FIRST, first=1, counts_from=1)
        reached("after-create-root")
        name, note = ledger_name(self._job.name), ledger_note(self._job.name)
        root = self._store.name_root(name, candidate, note=note)
        reached("after-name-root")
        if root[1] != candidate:
            self._store.delete(candidate)
        return root

    def _require_root(self) -> tuple[str, str]:
        root = self._find_root(make=True)
        assert root is not None
        return root

    # -- pages -------------------------------------------------------------------------------------------------------

    @_naming_what_is_gone
    def page_ids(self) -> Mapping[int, str]:
        """Return the runs of the pages there are, by number."""
        return self._learn_pages(self._store.params(self._require_root()[1]))

    def known_pages(self) -> tuple[int, ...]:
        """Return the numbers of the pages that were there when they were last read, ascending."""
        return tuple(sorted(self._pages))

    def _learn_pages(self, params: Mapping[str, str]) -> Mapping[int, str]:
        for name, value in params.items():
            if (number := names.page_number(name)) is not None:
                self._pages[number] = value
        return self._pages

    def page(self, number: int) -> str:
        """Return the run that is page `number`, making it if need be."""
        if number not in self._pages and number not in self.page_ids():
            experiment_id, root_id = self._require_root()
            candidate = self._store.create_run(experiment_id, name=f"page {number}", tags={names.KIND: RunKind.PAGE})
            reached("after-create-page")
            self._pages[number] = self._store.set_once(root_id, names.page(number), candidate)
            reached("after-link-page")
            if self._pages[number] != candidate:
                self._store.delete(candidate)
            self._hint(names.CURRENT_PAGE, self._pages[number])
        return self._pages[number]

    def page_of(self, recurrence: int) -> str:
        """Return the run that is a recurrence's page, making it if need be."""
        return self.page(pages.number_of(recurrence))

    @_naming_what_is_gone
    def read_page(self, number: int, *, looked: bool = False) -> Page:
        """Return what a page says, making it if need be; as the last look brought it, where that was just now."""
        run_id = self.page(number)
        run = self._brought_or_read(run_id) if looked else self._store.run(run_id)
        page = Page().read(run.data.params)
        if of := run.data.tags.get(names.SNAPSHOT_OF):
            page.kept[number] = of
        return page

    def tag_page(self, number: int, tags: Mapping[str, str]) -> None:
        """Write tags to a page's run."""
        self._store.log(self.page(number), tags=tags)

    def read_page_of(self, recurrence: int) -> Page:
        """Return the page that a recurrence is on."""
        return self.read_page(pages.number_of(recurrence))

    @_naming_what_is_gone
    def read_pages(self, after: int) -> Page:
        """Return all pages from the one with the recurrence after `after`, as one."""
        page, ids = Page(), [i for n, i in sorted(self.page_ids().items()) if n >= pages.number_of(after + 1)]
        known = {i: p for some in self._store.params_of(ids) for i, p in some.items()} if len(ids) > _FEW else {}
        for run_id in ids:
            page.read(known[run_id] if run_id in known else self._store.params(run_id))
        return page


def _tag_experiment(experiment_id: str, tag: tuple[str, str], client: MlflowClient) -> None:
    client.set_experiment_tag(experiment_id, *tag)
