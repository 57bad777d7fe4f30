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

import json
import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from mlflow.entities import Run

from zeus_flows.core import policy
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.records import Decision, EnergySource, Gpu, InFlight, Job, Observation, Outcome, jsonable
from zeus_flows.core.windows import beliefs, best_arm, boundary
from zeus_flows.errors import AlreadyDecided, AlreadyObserved, DeclaredDead
from zeus_flows.ledger import charts, codec, pages, snapshot
from zeus_flows.ledger.lease import Holder, read_holder, this_process
from zeus_flows.ledger.pages import Page
from zeus_flows.ledger.points import reached
from zeus_flows.ledger.protocol import EpochReport, History, Ledger
from zeus_flows.ledger.store import Store
from zeus_flows.ledger.structure import Structure, Window, snapshot_of

log = logging.getLogger(__name__)

#: The fingerprint of an observation that says its attempt died: comparable with nothing, so it never counts.
DEAD: Final = "declared dead"
#: Closed recurrences between two snapshots while a long history is folded anew; what is folded then is kept.
_STRIDE: Final = 5 * pages.SIZE


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt that has a decision and no observation, and what its holder last said."""

    run_id: str
    decision: Decision
    lease: str


class MlflowLedger(Structure):
    """One job's ledger on an MLflow tracking store.

    Args:
        job: Whose ledger this is; its name is the experiment's.
        store: MLflow, as bounded calls.
        energy_source: Only observations of this source are folded.
        holder: Who this is to other processes; this process by default.
    """

    def __init__(self, job: Job, store: Store, energy_source: EnergySource, *, holder: Holder | None = None) -> None:
        super().__init__(job, store, energy_source)
        self._holder = holder or this_process()
        self._closed: dict[str, Observation | None] = {}  # None: its run is gone
        self._last_start_ms: int | None = None

    # -- recurrences and decisions -----------------------------------------------------------------------------------

    def begin(self, token: str | None = None, *, holder: Holder | None = None, asked_before: bool = False) -> int:
        """Take the next recurrence number.

        Args:
            token: Names the recurrence before it has a number.
            holder: Who takes it; whoever this ledger belongs to by default.
            asked_before: The token may have a number already: then that is returned. Reads every page.
        """
        token = token or uuid.uuid4().hex
        mine = replace(holder or self._holder, token=token, beat=0).dump()
        number = max(self._page_ids(), default=0)
        if asked_before:
            for taken, claim in self._read_pages(0).claims.items():
                if (taker := read_holder(claim)) and taker.token == token:
                    return taken
        claims = Page().read(self._store.params(self._page(number))).claims
        for tries in count():
            recurrence = max(claims, default=number * pages.SIZE) + 1
            number = pages.number_of(recurrence)
            reached("before-claim")
            lost_to = self._store.lost_to(self._page(number), pages.claim(recurrence), mine)
            if lost_to is None:
                reached("after-claim")
                return recurrence
            claims = Page().read(lost_to).claims
            time.sleep(_pause_s(tries))
        raise AssertionError("unreachable")

    def asked(self, recurrence: int, context: Mapping[str, str]) -> str:
        """Make the run of a recurrence's drift gate, which says that it is being asked and by whom; return its id."""
        standing = self._read_page_of(recurrence).gates.get(recurrence)
        if standing is not None:
            return standing
        tags = {
            "zf.kind": "gate",
            "zf.recurrence": str(recurrence),
            **self._comparable_tags(),
            "zf.lease": self._holder.dump(),
            **context,
        }
        run_id = self._store.create_run(
            self.experiment_id,
            name=f"{recurrence} · gate",
            tags={name: codec.fits_tag(value) for name, value in tags.items()},
            start_ms=self._next_start_ms(),
        )
        reached("after-create-gate")
        standing = self._store.set_once(self._page(pages.number_of(recurrence)), pages.gate(recurrence), run_id)
        reached("after-link-gate")
        if standing != run_id:
            self._store.delete(run_id)
        return standing

    def gated(self, check_id: str, check: GateCheck, *, at_s: float | None = None) -> None:
        """Write what a gate found on its run and in the series; close a recurrence that it skips."""
        number, values = check.question.recurrence, charts.of_check(check)
        scores = {f"zf.gate/{name}": value for name, value in check.scores.items()}
        tags = {
            "zf.gate": check.verdict,
            "zf.detail": codec.fits_tag(check.text),
            "zf.trained_in": str(check.question.trained_in),
            "mlflow.runName": f"{number} · gate: {check.verdict}",
        }
        self._store.log(check_id, metrics=charts.metrics({**scores, **values}, step=number, at_s=at_s), tags=tags)
        self._store.log(self._window_of(number), metrics=charts.metrics(values, step=number, at_s=at_s))
        reached("after-gate")
        self._store.end(check_id)
        if check.skips:
            self.close(number, "skipped")
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
        page = self._page(pages.number_of(decision.recurrence))
        tags = self._decision_tags(decision, context) | {"zf.lease": (holder or self._holder).dump()}
        start_ms = self._next_start_ms(at_s)
        run_id = self._store.create_run(
            self.experiment_id,
            name=f"{decision.recurrence}.{decision.attempt} · batch size {decision.batch_size}{self._mark}",
            tags={name: codec.fits_tag(value) for name, value in tags.items()},
            start_ms=start_ms,
        )
        self._last_start_ms = start_ms
        reached("after-create-run")
        params = {"zf.batch_size": str(decision.batch_size), "zf.seed": str(decision.seed), "zf.decision": text}
        self._store.log(run_id, params=params)
        reached("after-log-decision")
        standing = self._store.set_once(page, pages.attempt(decision.recurrence, decision.attempt), run_id)
        reached("after-link-decision")
        if standing != run_id:
            self._store.delete(run_id)
            if self._store.params(standing).get("zf.decision") != text:
                raise AlreadyDecided(f"{self._name(decision)} has a decision already")
            run_id = standing
        if decision.recurrence in Page().read(self._store.params(page)).ended:
            self.declare_dead(OpenAttempt(run_id, decision, ""), "its recurrence had ended")
            raise DeclaredDead(f"recurrence {decision.recurrence} of {self._job.name} has ended without this attempt")
        return run_id

    def declare_dead(self, attempt: OpenAttempt, why: str) -> bool:
        """Give an attempt the observation that its holder is dead, unless it has one; return whether that was news."""
        decision = attempt.decision
        observation = Observation(
            recurrence=decision.recurrence,
            attempt=decision.attempt,
            batch_size=decision.batch_size,
            outcome=Outcome.FAILED,
            epochs=0,
            energy_j=0.0,
            time_s=0.0,
            gpu=Gpu(model="unknown", count=1, max_power_w=0.0),
            energy_source=self._energy_source,
            samples_per_epoch=0,
            energy_complete=False,
            explores=decision.explores,
            fingerprint=DEAD,
            detail=f"declared dead: {why}",
        )
        try:
            self.observed(attempt.run_id, observation)
        except AlreadyObserved:
            return False
        return True

    def heartbeat(self, attempt_id: str, holder: Holder) -> None:
        """Say that an attempt's holder is still there."""
        self._store.log(attempt_id, tags={"zf.lease": holder.dump()})

    def recurrence_of(self, attempt_id: str) -> int:
        """Return the recurrence that an attempt belongs to."""
        return int(self._store.run(attempt_id).data.tags["zf.recurrence"])

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def epoch(self, attempt_id: str, report: EpochReport) -> None:
        """Write what one epoch brought, at step = epoch."""
        shown = charts.metrics(charts.of_epoch(report), step=report.epoch, at_s=report.wall_s)
        self._store.log(attempt_id, metrics=shown)

    def observed(self, attempt_id: str, observation: Observation, *, at_s: float | None = None) -> None:
        """Write an attempt's outcome; the first one stands."""
        text = codec.dump_observation(observation)
        reached("before-observation")
        if self._store.set_once(attempt_id, "zf.observation", text) != text:
            raise AlreadyObserved(f"{self._name(observation)} has its observation")
        reached("after-observation")
        self._closed[attempt_id] = observation
        shown = charts.metrics(charts.of_attempt(self._job, observation), step=observation.recurrence, at_s=at_s)
        tags = {"zf.outcome": observation.outcome.value, "zf.detail": codec.fits_tag(observation.detail)}
        self._store.log(attempt_id, metrics=shown, tags=tags)
        reached("after-outcome")
        self._store.end(attempt_id, "FAILED" if observation.outcome is Outcome.FAILED else "FINISHED")
        reached("after-terminate")

    def ended(
        self, recurrence: int, observations: Sequence[Observation], *, at_s: float | None = None, how: str = "ended"
    ) -> None:
        """Close a recurrence, after writing its point of the drift window's series and the boundary it may make.

        Whoever is killed on the way leaves it open: it is ended again, or by the janitor, and nothing is missing.
        """
        if observations:
            shown = charts.metrics(charts.of_recurrence(self._job, observations), step=recurrence, at_s=at_s)
            self._store.log(self._window_of(recurrence), metrics=shown)
            reached("after-series")
            self._end_window(recurrence, observations)
            reached("after-boundary")
        self.close(recurrence, how)
        reached("after-end")

    def close(self, recurrence: int, how: str = "ended") -> None:
        """Say that nothing will be added to a recurrence."""
        self._store.set_once(self._page(pages.number_of(recurrence)), pages.end(recurrence), how)

    def bury(self, recurrence: int) -> None:
        """Close a recurrence whose holder is dead, with what it had observed; end its gate's run, had it one."""
        page = self._read_page_of(recurrence)
        self._read_attempts(page.attempts_of(recurrence).values())
        self.ended(recurrence, self._counting(page, after=recurrence - 1, upto=recurrence), how="dead")
        if recurrence in page.gates:
            self._store.end(page.gates[recurrence], "KILLED")

    def gate_lease(self, run_id: str) -> str:
        """Return what whoever asks a drift gate last said."""
        return str(self._store.run(run_id).data.tags.get("zf.lease", ""))

    # -- history -----------------------------------------------------------------------------------------------------

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

    # -- what was never linked ---------------------------------------------------------------------------------------

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

    def discard(self, run_id: str) -> None:
        """Delete a run that never became part of the ledger."""
        self._store.delete(run_id)

    def _end_window(self, recurrence: int, observations: Sequence[Observation]) -> None:
        """Open the next drift window where this recurrence ended the current one: drift, or N recurrences are full."""
        window = self.window()
        known = snapshot.load(self._job, window.tags)
        upto = known.upto if known else window.counts_from - 1
        if upto >= recurrence or recurrence < window.first:
            return  # a late report, or one that is delivered again: what it would have ended has ended
        page = self._read_pages(upto)
        self._read_attempts(run_id for (r, _), run_id in page.attempts.items() if upto < r < recurrence)
        before = known.state if known else policy.initial(self._job)
        for observation in self._counting(page, after=upto, upto=recurrence - 1):
            before = policy.advance(self._job, before, observation)
        after = before
        for observation in observations:
            after = policy.advance(self._job, after, observation)
        found = boundary(self._job, before, after, observations, recurrences=self._so_far(window, recurrence))
        if found is None:
            return
        arms = beliefs(self._job, after)
        tags = {
            "zf.ended_by": found.kind,
            "zf.evidence": codec.fits_tag(found.text),
            "zf.beliefs": codec.fits_tag(json.dumps(jsonable(arms))),
            "zf.best_batch_size": str(best_arm(arms) or ""),
        }
        self._store.log(window.run_id, tags=tags)
        kept = snapshot_of(window)
        self._open_after(window, found.kind, first=recurrence + 1, counts_from=window.counts_from, kept=kept)

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

    # -- names -------------------------------------------------------------------------------------------------------

    def _name(self, record: Decision | Observation) -> str:
        return f"attempt {record.recurrence}.{record.attempt} of {self._job.name}"

    def _decision_tags(self, decision: Decision, context: Mapping[str, str]) -> dict[str, str]:
        return {
            "zf.kind": "attempt",
            "zf.recurrence": str(decision.recurrence),
            "zf.attempt": str(decision.attempt),
            **self._comparable_tags(),
            "zf.policy": decision.policy,
            "zf.mode": self._job.mode.value,
            "zf.reason": decision.reason.text,
            "zf.explores": str(decision.explores).lower(),
            "zf.degraded": str(decision.degraded).lower(),
            **context,
        }

    def _comparable_tags(self) -> dict[str, str]:
        return {
            "zf.fingerprint": self._job.fingerprint,
            "zf.energy_source": self._energy_source.value,
            "zf.drift_window": self.window().run_id,
        }


def _pause_s(tries: int) -> float:
    """Return how long to wait after a lost race: at random, so that those who lost together part."""
    return uuid.uuid4().int % 1000 / 1000 * min(0.5, 0.02 * 2.0 ** min(tries, 9))


def _conforms(ledger: MlflowLedger) -> Ledger:
    return ledger
