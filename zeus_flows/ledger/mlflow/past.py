"""Reading what a decision was taken on, long after: its recurrence's runs, and the fold as it was then.

The fold grows from the snapshot that ends the page before, so at most one page's attempts are read, unless recurrences
overlapped there; where there is none, as in histories of earlier versions, from an earlier one. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zeus_flows.core import policy
from zeus_flows.core.explaining import ways_folded
from zeus_flows.core.job import Job
from zeus_flows.core.records import Decision, EnergySource, Gap, Observation
from zeus_flows.errors import ConfigError
from zeus_flows.ledger.mlflow import names, pages, snapshot
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.attempts import Attempts, Progress, untold
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.layout import Layout
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.mlflow.window_run import CurrentWindow, of_window, read_window


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """An attempt as it was decided, and observed where it has been.

    Attributes:
        window_id: Its drift window's run.
        began_s: When it began, in seconds since 1970.
    """

    run_id: str
    decision: Decision
    observation: Observation | None
    window_id: str
    began_s: float = 0.0


class Past:
    """Reads old decisions.

    Args:
        job: Whose.
        store: MLflow, as bounded calls.
        layout: The job's windows and pages.
    """

    def __init__(self, job: Job, store: Store, layout: Layout) -> None:
        self._job, self._store, self._layout = job, store, layout

    def attempts_of(self, recurrence: int) -> tuple[PastAttempt, ...]:
        """Return a recurrence's attempts in their order; those that were deleted are left out.

        Raises:
            ConfigError: there is no such recurrence.
        """
        self._layout.look()
        newest = self._layout.last_recurrence(looked=True)
        if not 1 <= recurrence <= newest or pages.number_of(recurrence) not in self._layout.known_pages():
            raise ConfigError(f"{self._job.name} has no recurrence {recurrence}; its newest is {newest}")
        found = self._layout.read_page_of(recurrence).attempts_of(recurrence)
        return self._read([run_id for _, run_id in sorted(found.items())])

    def newest(self, most: int | None, told: Progress = untold) -> tuple[PastAttempt, ...]:
        """Return the attempts of the newest recurrences in their order; those that were deleted are left out.

        Args:
            most: Of how many recurrences; None: of all.
            told: How far reading is.
        """
        self._layout.look()
        page, known = Page(), self._layout.known_pages()
        for number in reversed(known):
            page.add(self._layout.read_page(number, looked=True))
            if most is not None and len(page.claims) >= most:
                break
        first = 1 if most is None else max(page.claims, default=0) - most + 1
        wanted = [run_id for (r, _), run_id in sorted(page.attempts.items()) if r >= first]
        found = list[PastAttempt]()
        for start in range(0, len(wanted), pages.SIZE):
            found += self._read(wanted[start : start + pages.SIZE])
            told(min(start + pages.SIZE, len(wanted)), len(wanted))
        return tuple(found)

    def _read(self, run_ids: Sequence[str]) -> tuple[PastAttempt, ...]:
        """Return attempts by their runs; those that were deleted, or cannot be read, are left out."""
        runs, told = self._store.runs(self._layout.experiment_id, list(run_ids)), list[PastAttempt]()
        for run_id in run_ids:
            run = runs.get(run_id)
            if run is None or run.info.lifecycle_stage != "active" or names.DECISION not in run.data.params:
                continue
            text = run.data.params.get(names.OBSERVATION)
            told.append(
                PastAttempt(
                    run_id,
                    codec.load_decision(run.data.params[names.DECISION]),
                    None if text is None else codec.load_observation(text),
                    str(run.data.tags.get(names.DRIFT_WINDOW, "")),
                    run.info.start_time / 1000,
                )
            )
        return tuple(told)

    def folded_before(self, attempt: PastAttempt, told: Progress = untold) -> tuple[Job, Iterator[policy.State]]:
        """Return the job as it was comparable when an attempt was decided, and what may have been folded then.

        Args:
            attempt: Which.
            told: How far reading is.
        """
        window = read_window(self._store.run(attempt.window_id)) if attempt.window_id else self._layout.look()
        job = replace(self._job, fingerprint=window.tags.get(names.FINGERPRINT, self._job.fingerprint))
        return job, self._states(job, window, attempt.decision, told)

    def _states(self, job: Job, window: CurrentWindow, decision: Decision, told: Progress) -> Iterator[policy.State]:
        if decision.asked is None:
            return
        source = EnergySource(window.tags.get(names.ENERGY_SOURCE, EnergySource.NONE))
        attempts = Attempts(job, self._store, source, self._layout)
        sure = min((decision.recurrence, *decision.asked.under_way)) - 1  # nothing is added up to there any more
        base, page = self._base(job, window, sure, pages.number_of(decision.recurrence))
        upto = base.upto if base else window.counts_from - 1
        wanted = {(r, a): i for (r, a), i in page.attempts.items() if upto < r <= decision.recurrence}
        attempts.read_many(wanted.values(), told)
        read = (attempts.observation_of(run_id) for run_id in wanted.values())
        mine = [o for o in read if o is not None and (o.fingerprint, o.energy_source) == (job.fingerprint, source)]
        before = base.state if base else policy.initial(job)
        for way in ways_folded(decision, sorted(mine, key=lambda o: o.order), before=before.observations):
            counted, state = {o.recurrence for o in way}, before
            gaps = [g for r, g in page.gaps.items() if upto < r < decision.recurrence and r not in counted]
            events: list[tuple[tuple[int, int], Observation | Gap]] = [(o.order, o) for o in way]
            for _, event in sorted([*events, *(((g.recurrence, 0), g) for g in gaps)], key=lambda item: item[0]):
                if isinstance(event, Gap):
                    state = policy.pass_over(job, state, event)
                else:
                    state = policy.advance(job, state, event)
            yield state

    def _base(self, job: Job, window: CurrentWindow, sure: int, last: int) -> tuple[snapshot.Snapshot | None, Page]:
        """Return the newest snapshot at a page's end that covers nothing later, and the pages since, as one."""
        page = Page()
        for number in reversed([n for n in self._layout.known_pages() if n <= last]):
            if pages.last_of(number) < window.counts_from:
                break
            if pages.last_of(number) <= sure:
                run = self._store.run(self._layout.page(number))
                if run.data.tags.get(names.SNAPSHOT_OF) == of_window(window):
                    known = snapshot.load(job, run.data.tags)
                    if known is not None and known.upto == pages.last_of(number):
                        return known, page
                page.add(Page().read(run.data.params))
            else:
                page.add(self._layout.read_page(number))
        return None, page
