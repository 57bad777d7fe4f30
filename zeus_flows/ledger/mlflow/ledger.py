"""The ledger in MLflow tracking runs. `docs/reference/mlflow-schema.md` is its contract.

MLflow has no transactions across runs. What must happen once is a write-once param (claims, decisions, observations,
ends, the chain of drift windows) or the creation of an experiment (the root); both are compare-and-set on every
backend. Tags and metrics are for people and caches; writing them twice does no harm.

What this promises, on sqlite, PostgreSQL and an MLflow server on either:

* Recurrence numbers are unique, whoever asks at the same time.
* An attempt has one decision and one observation. The first stands; the same again is accepted, another is refused.
* An attempt that was declared dead has its observation, so its own late report is refused. That observation says
  nothing about the job and does not count.
* The fold's order is (recurrence, attempt). A snapshot covers only recurrences that have ended and whose attempts all
  have their observation. An attempt that is added after the end is declared dead by whoever adds it. So nothing that
  counts can come to lie inside a snapshot.
* A decision reads runs by id only: the root, the current drift window, one or two pages, and the attempts since the
  snapshot. None of that grows with the history.
* Runs start in the order they are decided, even where the clock goes back.

It does not promise that an observation is there the moment training ends: see `zeus_flows.ledger.durable`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from mlflow.entities import Run

from zeus_flows.core import policy
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.drift_windows import Boundary
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import Gpu
from zeus_flows.core.records import Decision, EnergySource, Gap, Observation, Outcome, unobserved
from zeus_flows.errors import AlreadyDecided, AlreadyObserved, DeclaredDead, StoreError
from zeus_flows.killpoints import reached
from zeus_flows.ledger.lease import Holder, this_process
from zeus_flows.ledger.mlflow import charts, membership, names, pages, run_note, run_words
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.attempts import Attempts, OpenAttempt, Progress, untold
from zeus_flows.ledger.mlflow.claims import Claims, open_claims
from zeus_flows.ledger.mlflow.client import MLFLOW_NOTE, Store
from zeus_flows.ledger.mlflow.gate_runs import GateRuns
from zeus_flows.ledger.mlflow.history import HistoryReader
from zeus_flows.ledger.mlflow.job_page import JobPage
from zeus_flows.ledger.mlflow.layout import Layout, Whereabouts
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.mlflow.past import Past, PastAttempt
from zeus_flows.ledger.mlflow.reading import Reading
from zeus_flows.ledger.mlflow.run_note import DecisionNote
from zeus_flows.ledger.mlflow.window_run import CurrentWindow, snapshot_of
from zeus_flows.ledger.mlflow.windows import Windows
from zeus_flows.ledger.protocol import History, Ledger

log = logging.getLogger(__name__)

#: The fingerprint of an observation that says its attempt died: comparable with nothing, so it never counts.
DEAD: Final = "declared dead"


class MlflowLedger:
    """One job's ledger on an MLflow tracking store.

    Args:
        job: Whose ledger this is; its name is the experiment's.
        store: MLflow, as bounded calls.
        energy_source: Only observations of this source are folded.
        holder: Who this is to other processes; this process by default.
        comparable: What the fingerprint is made of, in words, by name, such as `target` and `accuracy >= 0.9`: so that
            it can be said what has changed where it changes.

    Attributes:
        store: The same.
        layout: The ledger's root, pages and chain of drift windows.
        page: The job's saved views and description, for people.
    """

    def __init__(
        self,
        job: Job,
        store: Store,
        energy_source: EnergySource,
        *,
        holder: Holder | None = None,
        comparable: Mapping[str, str] | None = None,
    ) -> None:
        self._job, self._energy_source, self._holder = job, energy_source, holder or this_process()
        self.store = store
        self.layout = Layout(job, store, energy_source, comparable)
        self._claims = Claims(store, self.layout)
        self._attempts = Attempts(job, store, energy_source, self.layout)
        self._windows = Windows(job, store, self.layout, self._attempts)
        self._gates = GateRuns(store, self.layout, self._attempts, self._windows)
        self._reader = HistoryReader(job, self.layout, self._attempts, self._windows)
        self.page = JobPage(job, self.layout, energy_source, store.workspace)
        self._savings = charts.SavingsOnce(job)
        self._notes: dict[str, DecisionNote] = {}  # by the attempt's run, until its outcome is known

    @property
    def key(self) -> str:
        """Names the store and the job, without secrets."""
        return self.layout.key

    @property
    def experiment_id(self) -> str:
        """The experiment that holds the attempts and drift windows; made if need be."""
        return self.layout.experiment_id

    # -- recurrences and decisions -----------------------------------------------------------------------------------

    def begin(self, token: str | None = None, *, holder: Holder | None = None, asked_before: bool = False) -> int:
        """Take the next recurrence number.

        Args:
            token: Names the recurrence before it has a number.
            holder: Who takes it; whoever this ledger belongs to by default.
            asked_before: The token may have a number already: then that is returned. Reads every page.
        """
        swept = self._reader.swept
        number, claim = self._claims.take(
            holder or self._holder, token, asked_before=asked_before, claims=swept.page.claims if swept else None
        )
        if swept is not None and claim is not None:
            swept.page.claims[number] = claim
        else:
            self._reader.forget()
        return number

    def asked(self, recurrence: int, context: Mapping[str, str]) -> str:
        """Make the run of a recurrence's drift gate, which says that it is being asked and by whom; return its id."""
        return self._gates.begin(recurrence, self._holder, context)

    def gated(self, check_id: str, check: GateCheck, *, at_s: float | None = None) -> None:
        """Write what a gate found on its run and in the series; close a recurrence that it skips."""
        self._gates.end(check_id, check, at_s=at_s)
        if check.skips:
            self.close(check.question.recurrence, pages.skipped(time_s=check.time_s, energy_j=check.energy_j))
            reached("after-skip")

    def decided(
        self,
        decision: Decision,
        context: Mapping[str, str],
        *,
        holder: Holder | None = None,
        at_s: float | None = None,
    ) -> str:
        """Write a decision; return the id of the attempt's run.

        The same decision again returns the run it has.

        Raises:
            AlreadyDecided: the attempt has another decision.
            DeclaredDead: its recurrence has ended.
        """
        text = codec.dump_decision(decision)
        page = self.layout.page_of(decision.recurrence)
        tags = run_words.decision_tags(self._job, decision, self._windows.tags(), context)
        tags[names.LEASE] = (holder or self._holder).dump()
        window_id = tags[names.DRIFT_WINDOW]
        note = run_note.linked(decision, context, experiment_id=self.experiment_id, window_id=window_id)
        tags[MLFLOW_NOTE] = run_note.run_note(self._job, note)
        start_ms = self._attempts.next_start_ms(at_s)
        run_id = self.store.create_run(
            self.experiment_id,
            name=run_words.run_name(decision, decision.setting),
            tags={name: codec.fits_tag(value) for name, value in tags.items()},
            start_ms=start_ms,
        )
        self._attempts.started(start_ms)
        reached("after-create-run")
        self.store.log(run_id, params=run_words.decision_params(decision, context, text))
        reached("after-log-decision")
        standing = self.store.set_once(page, names.attempt_run(decision.recurrence, decision.attempt), run_id)
        reached("after-link-decision")
        if standing != run_id:
            self.store.delete(run_id)
            if not codec.is_same_decision(self.store.params(standing).get(names.DECISION, ""), text):
                raise AlreadyDecided(f"{self._name(decision)} has a decision already")
            run_id = standing
        if decision.recurrence in Page().read(self.store.params(page)).ended:
            self.declare_dead(OpenAttempt(run_id, decision, ""), "its recurrence had ended")
            raise DeclaredDead(f"recurrence {decision.recurrence} of {self._job.name} has ended without this attempt")
        self._notes[run_id] = note
        return run_id

    def declare_dead(self, attempt: OpenAttempt, why: str) -> bool:
        """Give an attempt the observation that its holder is dead, unless it has one; return whether that was news."""
        observation = unobserved(
            attempt.decision,
            gpu=Gpu(model="unknown", count=1, max_power_w=0.0),
            energy_source=self._energy_source,
            fingerprint=DEAD,
            detail=f"declared dead: {why}",
            energy_complete=False,
        )
        try:
            self.observed(attempt.run_id, observation)
        except AlreadyObserved:
            return False
        return True

    def heartbeat(self, attempt_id: str, holder: Holder) -> None:
        """Say that an attempt's holder is still there."""
        self.store.log(attempt_id, tags={names.LEASE: holder.dump()})

    def recurrence_of(self, attempt_id: str) -> int:
        """Return the recurrence that an attempt belongs to."""
        return int(self.store.run(attempt_id).data.tags[names.RECURRENCE])

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def epoch(self, attempt_id: str, report: EpochReport) -> None:
        """Write what one epoch brought, at step = epoch."""
        joules = not self._job.in_seconds and self._energy_source is not EnergySource.NONE
        shown = charts.metrics(charts.of_epoch(report, joules=joules), step=report.epoch, at_s=report.wall_s)
        self.store.log(attempt_id, metrics=shown)

    def observed(self, attempt_id: str, observation: Observation, *, at_s: float | None = None) -> None:
        """Write an attempt's outcome; the first one stands."""
        text = codec.dump_observation(observation)
        self._reader.forget()
        reached("before-observation")
        if not codec.is_same_observation(self.store.set_once(attempt_id, names.OBSERVATION, text), text):
            raise AlreadyObserved(f"{self._name(observation)} has its observation")
        reached("after-observation")
        self._attempts.close(attempt_id, codec.load_observation(text))
        values = dict(charts.of_attempt(self._job, observation))
        if self._means_something and (after := self._reader.after(observation)) is not None:
            values |= charts.of_saving(self._job, observation, self._savings.saved(after))
        shown = charts.metrics(values, step=observation.recurrence, at_s=at_s)
        tags = run_words.outcome_tags(observation)
        if (note := self._notes.get(attempt_id)) is not None:
            tags[MLFLOW_NOTE] = codec.fits_tag(run_note.run_note(self._job, note, observation))
        self.store.log(attempt_id, metrics=shown, tags=tags)
        reached("after-outcome")
        self.store.end(attempt_id, "FAILED" if observation.outcome is Outcome.FAILED else "FINISHED")
        reached("after-terminate")

    def ended(
        self, recurrence: int, observations: Sequence[Observation], *, at_s: float | None = None, how: str = pages.ENDED
    ) -> None:
        """Close a recurrence, after writing its point of the drift window's series and the boundary it may make.

        Whoever is killed on the way leaves it open: it is ended again, or by the janitor, and nothing is missing.
        """
        self._reader.forget()
        if observations:
            values = dict(charts.of_recurrence(self._job, observations))
            learnt = self._reader.learnt(recurrence, observations)
            tags = {} if learnt is None else run_words.belief_tags(self._job, learnt.after)
            saved = None
            if learnt is not None and learnt.whole and self._means_something:
                saved = self._savings.saved(learnt.after)
                values |= charts.of_savings(saved)
            shown, window_id = charts.metrics(values, step=recurrence, at_s=at_s), self._windows.run_of(recurrence)
            is_time, snapshot_tags = self._reader.is_halfway(recurrence), self._reader.due(window_id)
            self.store.log(window_id, metrics=shown, tags=tags | snapshot_tags)
            self._reader.keep_pages()
            reached("after-series")
            if learnt is not None and learnt.boundary is not None:
                self._end_window(recurrence, learnt.boundary)
            reached("after-boundary")
        self.close(recurrence, how)
        reached("after-end")
        if observations and (is_time or (learnt is not None and learnt.boundary is not None)):
            with suppress(StoreError):  # for people only; the next ones will write it
                self.page.describe(recurrence, saved, observations[-1])

    def close(self, recurrence: int, how: str = pages.ENDED) -> None:
        """Say that nothing will be added to a recurrence."""
        self.store.set_once(self.layout.page_of(recurrence), names.end(recurrence), how)

    def bury(self, recurrence: int) -> None:
        """Close a recurrence whose holder is dead, with what it had observed; end its gate's run, had it one."""
        page = self.layout.read_page_of(recurrence)
        self.ended(recurrence, self._reader.observations_of(recurrence, page), how=pages.DEAD)
        if recurrence in page.gates:
            self.store.end(page.gates[recurrence], "KILLED")

    def gate_lease(self, run_id: str) -> str:
        """Return the lease of the process that asks a drift gate, as it last wrote it."""
        return self._gates.lease(run_id)

    def discard(self, run_id: str) -> None:
        """Delete a run that never became part of the ledger."""
        self.store.delete(run_id)

    # -- what was observed -------------------------------------------------------------------------------------------

    def history(self, *, wait_for_refold: bool = True) -> History:
        """Return the fold of all closed attempts, and what is in flight (`HistoryReader.history`)."""
        return self._reader.history(wait_for_refold=wait_for_refold)

    def go_on(self) -> None:
        """Let the next recurrence begin and decide on what `unfinished` just found, unless something was written."""
        self._reader.swept = self._reader.seen

    def decided_on(self) -> tuple[Whereabouts, Reading, Mapping[str, DecisionNote]] | None:
        """Return what the last decision was taken on, for another ledger of this job; None before the first one."""
        found = self._reader.decided_on
        return None if found is None else (self.layout.whereabouts(), found, dict(self._notes))

    def share(self, where: Whereabouts, reading: Reading, notes: Mapping[str, DecisionNote]) -> None:
        """Take over what another ledger of this job has decided on: it need not be read again."""
        self.layout.adopt(where)
        self._reader.decided_on = reading
        self._notes |= notes

    @property
    def is_outdated(self) -> bool:
        """Whether the snapshot that was last looked at serves, but is to be folded anew."""
        return self._reader.is_outdated

    def refold(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Fold the history anew where the snapshot is to be replaced (`HistoryReader.refold`)."""
        return self._reader.refold(stopped)

    def state(self) -> policy.State:
        """Return the fold that the next decision would be taken on; writes nothing."""
        return self._reader.state()

    def observations(self, told: Progress = untold) -> tuple[Observation, ...]:
        """Return every observation that counts, in the fold's order, read from the runs; `told` how far that is."""
        return self._reader.observations(told)

    def gaps(self) -> tuple[Gap, ...]:
        """Return every recurrence that the fold passes over, in its order, read from the pages and runs."""
        return self._reader.gaps()

    def attempts_of(self, recurrence: int) -> tuple[PastAttempt, ...]:
        """Return a recurrence's attempts, as they were decided and observed (`Past.attempts_of`)."""
        return Past(self._job, self.store, self.layout).attempts_of(recurrence)

    def newest_attempts(self, most: int | None, told: Progress = untold) -> tuple[PastAttempt, ...]:
        """Return the attempts of the newest recurrences, or of all (`Past.newest`)."""
        return Past(self._job, self.store, self.layout).newest(most, told)

    def counts(self, observation: Observation) -> bool:
        """Return whether an observation is comparable with what this job observes now, and was not reset away."""
        mine = (observation.fingerprint, observation.energy_source) == (self._job.fingerprint, self._energy_source)
        return mine and observation.recurrence >= self.layout.current().counts_from

    def folded_before(self, attempt: PastAttempt, told: Progress = untold) -> tuple[Job, Iterator[policy.State]]:
        """Return the job as it was comparable then, and what may have been folded then (`Past.folded_before`)."""
        return Past(self._job, self.store, self.layout).folded_before(attempt, told)

    def verify(self, told: Progress = untold) -> tuple[bool, int]:
        """Return whether the state by snapshot is the fold of all runs, and how many observations that has."""
        return self._reader.verify(told)

    def last_recurrence(self, *, looked: bool = False) -> int:
        """Return the newest recurrence number that was taken; 0 where none was (`Layout.last_recurrence`)."""
        return self.layout.last_recurrence(looked=looked)

    # -- what is open, what is part of the ledger --------------------------------------------------------------------

    def unfinished(self) -> tuple[tuple[OpenAttempt, ...], Page]:
        """Return the attempts without an observation, and the pages on which recurrences may not have ended."""
        return self._reader.unfinished()

    def open_attempts(self) -> tuple[OpenAttempt, ...]:
        """Return the attempts without an observation."""
        return self.unfinished()[0]

    def open_attempts_of(self, recurrence: int) -> tuple[OpenAttempt, ...]:
        """Return a recurrence's attempts without an observation."""
        return self._attempts.read(self.layout.read_page_of(recurrence).attempts_of(recurrence).values())

    def open_claims(self) -> Mapping[int, str]:
        """Return recurrences that were taken and have not ended, with who took them."""
        return open_claims(self.unfinished()[1])

    def unended_runs(self, *, most: int) -> Sequence[Run]:
        """Return the newest runs of this ledger that look as if something were running."""
        return membership.unended_runs(self.layout, self.store, most=most)

    def is_linked(self, run: Run) -> bool:
        """Return whether a run is part of the ledger."""
        return membership.is_linked(self.layout, run)

    # -- drift windows -----------------------------------------------------------------------------------------------

    def window(self) -> CurrentWindow:
        """Return the drift window that recurrences belong to now, opening one where comparability ended."""
        return self._windows.current()

    def would_set_aside(self, *, looked: bool = False) -> str | None:
        """Return, as a sentence, what would stop counting if a recurrence ran now; None: nothing. Writes nothing."""
        return self._windows.would_set_aside(looked=looked)

    def reset(self) -> int:
        """Start a new drift window in which nothing that was observed before counts; return its number."""
        return self.layout.reset()

    def _end_window(self, recurrence: int, found: Boundary) -> None:
        """Open the next drift window after the one that a recurrence ended; what was learnt goes on."""
        window = self.window()
        self.layout.open_after(
            window,
            found.kind,
            evidence=found.text,
            first=recurrence + 1,
            counts_from=window.counts_from,
            tags=snapshot_of(window),
        )

    @property
    def _means_something(self) -> bool:
        """Whether there is a cost to compare: not without a sensor, where the job does not count in seconds."""
        return self._job.in_seconds or self._energy_source is not EnergySource.NONE

    # -- names -------------------------------------------------------------------------------------------------------

    def _name(self, record: Decision | Observation) -> str:
        return f"attempt {record.recurrence}.{record.attempt} of {self._job.name}"


def _conforms(ledger: MlflowLedger) -> Ledger:
    return ledger
