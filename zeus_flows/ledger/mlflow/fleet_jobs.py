"""All jobs of a tracking server, read together: runs by their ids, a hundred to a call, however long histories are.

The experiments name their ledgers, those the newest drift window and page (or the root, which knows better where those
are stale), and the page the newest attempts. So a fleet costs a few calls for every hundred jobs, and none of them
searches a history. Nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from mlflow.entities import Experiment, Run, ViewType
from mlflow.entities.model_registry import ModelVersion, RegisteredModel

from zeus_flows.core.job_summary import JobSummary, NewestAttempt, SavedSoFar
from zeus_flows.core.records import EnergySource, Outcome
from zeus_flows.errors import StoreError
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.model_registry import CHAMPION
from zeus_flows.ledger.mlflow.pages import SIZE, Page

_TOGETHER: Final = 100
_PAGE_OF_EXPERIMENTS: Final = 500
_LEARNING: Final = "learning"
_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class _Whereabouts:
    """Where a job's runs are.

    Attributes:
        job: Its experiment.
        ledger: The experiment of its pages; None where that is gone.
        window: The run of its newest drift window, as far as is known; empty where it is not.
        page: The run of its newest page, likewise.
    """

    job: Experiment
    ledger: Experiment | None
    window: str = ""
    page: str = ""

    @property
    def name(self) -> str:
        return str(self.job.tags.get(names.JOB) or self.job.name)

    @property
    def root(self) -> str:
        return "" if self.ledger is None else str(self.ledger.tags.get(names.ROOT, ""))


def read_fleet(store: Store, *, only: str | None = None) -> tuple[JobSummary, ...]:
    """Return what is to be told of every job, or of one, by name. One that was damaged says so and stops no other."""
    places = [place for place in _places(store) if only is None or place.name == only]
    if not places:
        return ()
    ids = [e.experiment_id for place in places for e in (place.job, place.ledger) if e is not None]
    runs = _Runs(store, [str(i) for i in ids])
    read = runs.read(run_id for place in places for run_id in (place.window, place.page))
    doubtful = [place for place in places if _may_be_stale(place, read)]
    if doubtful:
        roots = runs.read(place.root for place in doubtful)
        places = [_as_rooted(place, roots) if place in doubtful else place for place in places]
        read = runs.read(run_id for place in places for run_id in (place.window, place.page))
    while moved := {p.window: after for p in places if (after := _next_window(read.get(p.window)))}:
        places = [replace(p, window=moved.get(p.window, p.window)) for p in places]
        read |= runs.read(moved.values())
    pages = {p.page: Page().read(read[p.page].data.params) for p in places if p.page in read}
    newest = {page_id: _newest_attempts(page) for page_id, page in pages.items()}
    attempts = runs.read(run_id for of_page in newest.values() for run_id in of_page)
    champions, summaries = _champions(store), list[JobSummary]()
    for place in places:
        page, told = pages.get(place.page), [attempts[i] for i in newest.get(place.page, ()) if i in attempts]
        summary = _summary(place, read.get(place.window), page, told)
        summaries.append(replace(summary, champion_s=champions.get(place.name)))
    return tuple(sorted(summaries, key=lambda job: job.name))


class _Runs:
    """Reads runs of many experiments by their ids, each once."""

    def __init__(self, store: Store, experiment_ids: list[str]) -> None:
        self._store, self._experiment_ids = store, experiment_ids
        self._known = dict[str, Run]()

    def read(self, run_ids: Iterable[str]) -> dict[str, Run]:
        """Return runs by id; those that are gone, deleted or no ids are left out."""
        wanted = {i for i in run_ids if _RUN_ID.fullmatch(i)}
        unread = sorted(wanted - self._known.keys())
        for start in range(0, len(unread), _TOGETHER):
            some = unread[start : start + _TOGETHER]
            query = f"attributes.run_id IN ({','.join(map(repr, some))})"
            runs = self._store.search(self._experiment_ids, query, most=len(some))
            self._known |= {str(run.info.run_id): run for run in runs if run.info.lifecycle_stage == "active"}
        return {i: self._known[i] for i in wanted if i in self._known}


def _places(store: Store) -> list[_Whereabouts]:
    ledgers = {str(e.experiment_id): e for e in _experiments(store, names.ROOT)}
    jobs = _experiments(store, names.LEDGER)
    return [_place(job, ledgers.get(str(job.tags[names.LEDGER]))) for job in jobs]


def _champions(store: Store) -> dict[str, float]:
    """Return when the champion of each job that has one was made; one that is not the newest costs a call."""
    found, token = dict[str, float](), None
    while True:
        page = store.ask(
            lambda client, token=token: client.search_registered_models(  # type: ignore[misc]
                f"tags.`{names.JOB}` LIKE '%'", max_results=_PAGE_OF_EXPERIMENTS, page_token=token
            )
        )
        for model in page:
            if (number := str(model.aliases.get(CHAMPION, ""))) and (version := _version(store, model, number)):
                found[str(model.tags[names.JOB])] = version.creation_timestamp / 1000
        token = page.token
        if not token:
            return found


def _version(store: Store, model: RegisteredModel, number: str) -> ModelVersion | None:
    versions: list[ModelVersion] = model.latest_versions
    newest = next((v for v in versions if str(v.version) == number), None)
    if newest is not None:
        return newest
    try:
        return store.ask(lambda client: client.get_model_version(model.name, number))
    except StoreError:  # deleted by hand
        return None


def _place(job: Experiment, ledger: Experiment | None) -> _Whereabouts:
    said = {} if ledger is None else ledger.tags
    return _Whereabouts(job, ledger, said.get(names.CURRENT_WINDOW, ""), said.get(names.CURRENT_PAGE, ""))


def _experiments(store: Store, tag: str) -> list[Experiment]:
    """Return the experiments that have a tag."""
    found, token = list[Experiment](), None
    while True:
        page = store.ask(
            lambda client, token=token: client.search_experiments(  # type: ignore[misc]
                ViewType.ACTIVE_ONLY,
                max_results=_PAGE_OF_EXPERIMENTS,
                filter_string=f"tags.`{tag}` LIKE '%'",
                page_token=token,
            )
        )
        found += page
        token = page.token
        if not token:
            return found


def _may_be_stale(place: _Whereabouts, read: Mapping[str, Run]) -> bool:
    """Return whether the root is to be asked: a window or page is not known or gone, or the page is full."""
    if place.window not in read or place.page not in read:
        return True
    return len(Page().read(read[place.page].data.params).claims) >= SIZE


def _as_rooted(place: _Whereabouts, roots: Mapping[str, Run]) -> _Whereabouts:
    """Return the place with its newest drift window and page as the root names them."""
    root = roots.get(place.root)
    if root is None:
        return place
    said = {**root.data.params, **{n: v for n, v in root.data.tags.items() if names.page_number(n) is not None}}
    pages = {number: value for name, value in said.items() if (number := names.page_number(name)) is not None}
    window = root.data.tags.get(names.CURRENT_WINDOW) or str(root.info.run_id)
    return replace(place, window=window, page=pages[max(pages)] if pages else "")


def _next_window(run: Run | None) -> str:
    if run is None:
        return ""
    return str(run.data.tags.get(names.NEXT_WINDOW) or run.data.params.get(names.NEXT_WINDOW) or "")


def _newest_attempts(page: Page) -> list[str]:
    """Return the last attempt of the newest recurrence, and of the newest one that has ended where that is another."""
    last = {recurrence: run_id for (recurrence, _), run_id in sorted(page.attempts.items())}
    newest = max(last, default=0)
    ended = max((recurrence for recurrence in last if recurrence in page.ended), default=newest)
    return [last[recurrence] for recurrence in dict.fromkeys((newest, ended)) if recurrence in last]


def _summary(place: _Whereabouts, window: Run | None, page: Page | None, attempts: list[Run]) -> JobSummary:
    """Return what the runs say; what people have broken by hand is said of the job that they broke."""
    nothing = JobSummary(place.name, str(place.job.experiment_id))
    if place.ledger is None or window is None or page is None:
        return replace(nothing, trouble="its ledger is incomplete: `zeus-flows ledger repair` with its job file")
    try:
        told = [_told(run) for run in attempts]
        metrics, tags = window.data.metrics, window.data.tags
        best = tags.get(names.BEST_BATCH_SIZE)
        return replace(
            nothing,
            energy_source=EnergySource(tags.get(names.ENERGY_SOURCE, EnergySource.NONE)),
            recurrences=max(page.claims, default=0),
            window=int(window.data.params.get(names.WINDOW, 0)),
            best_batch_size=int(best) if best else None,
            saved=_saved(metrics),
            newest=told[0] if told else None,
            ended=next((t for t in told if t.recurrence in page.ended), None),
            usual_s=metrics.get(names.TIME_TO_ACCURACY_S),
            under_way=tuple(sorted(page.claims.keys() - page.ended)),
        )
    except (KeyError, ValueError, TypeError, StoreError) as error:
        return replace(nothing, trouble=f"its runs cannot be read ({type(error).__name__}): `zeus-flows ledger verify`")


def _told(run: Run) -> NewestAttempt:
    tags, metrics, params = run.data.tags, run.data.metrics, run.data.params
    decision = codec.load_decision(params[names.DECISION])
    outcome = tags.get(names.OUTCOME)
    knob = next((knob for knob, name in names.SETTING.items() if name in metrics), decision.knob)
    return NewestAttempt(
        recurrence=int(tags[names.RECURRENCE]),
        attempt=int(tags[names.ATTEMPT]),
        began_s=run.info.start_time / 1000,
        mode=tags.get(names.MODE, ""),
        mode_why=decision.asked.mode_why if decision.asked is not None else "",
        batch_size=decision.batch_size,
        setting=metrics.get(names.SETTING[knob]),
        knob=knob,
        outcome=Outcome(outcome) if outcome else None,
        late=names.LATE in tags,
        degraded=tags.get(names.DEGRADED) == "true",
        untunable=tags.get(names.UNTUNABLE, ""),
        gpu=tags.get(names.GPU, ""),
        text=tags.get(names.DETAIL, ""),
    )


def _saved(metrics: Mapping[str, float]) -> SavedSoFar | None:
    """Return what a drift window's newest point says of savings; None where it says nothing."""
    unit = next((u for u in ("j", "s") if names.saved_cost(u) in metrics), None)
    if unit is None:
        return None
    cost = (names.saved_cost(unit), names.saved_cost_low(unit), names.saved_cost_high(unit))
    energy = (names.SAVED_ENERGY_J, names.SAVED_ENERGY_LOW_J, names.SAVED_ENERGY_HIGH_J)
    return SavedSoFar(
        unit=unit,
        cost=(metrics[cost[0]], metrics[cost[1]], metrics[cost[2]]),
        energy_j=(metrics[energy[0]], metrics[energy[1]], metrics[energy[2]]) if energy[0] in metrics else None,
        percent=metrics[names.SAVED_COST_PERCENT],
        learning=metrics.get(names.saved_by(_LEARNING, unit), 0.0),
        recurrences=round(metrics[names.SAVED_RECURRENCES]),
        lost=round(metrics.get(names.SAVED_LOST_RECURRENCES, 0.0)),
    )
