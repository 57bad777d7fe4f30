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

from mlflow.entities import Metric, Run

from zeus_flows.core import policy
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.records import Decision, EnergySource, Gpu, InFlight, Job, Observation, Outcome, jsonable
from zeus_flows.core.windows import beliefs, best_arm, boundary
from zeus_flows.errors import AlreadyDecided, AlreadyObserved, DeclaredDead
from zeus_flows.ledger import codec, pages, snapshot
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
        start_ms = max(int((time.time() if at_s is None else at_s) * 1000), self._newest_start_ms() + 1)
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
        values = {
            "zf.epoch/energy_j": report.energy_j,
            "zf.epoch/time_s": report.time_s,
            "zf.epoch/power_limit_w": report.power_limit_w,
            "zf.epoch/metric": report.metric,
        }
        self._store.log(attempt_id, metrics=_metrics(values, step=report.epoch, at_s=report.wall_s))

    def observed(self, attempt_id: str, observation: Observation, *, at_s: float | None = None) -> None:
        """Write an attempt's outcome; the first one stands."""
        text = codec.dump_observation(observation)
        reached("before-observation")
        if self._store.set_once(attempt_id, "zf.observation", text) != text:
            raise AlreadyObserved(f"{self._name(observation)} has its observation")
        reached("after-observation")
        self._closed[attempt_id] = observation
        values = {
            "zf.batch_size": float(observation.batch_size),
            "zf.power_limit_w": observation.power_limit_w,
            "zf.energy_to_accuracy_j": observation.energy_j,
            "zf.time_to_accuracy_s": observation.time_s,
            "zf.cost_j": observed_cost(self._job, observation),
            "zf.epochs": float(observation.epochs),
            "zf.converged": float(observation.converged),
        }
        self._store.log(
            attempt_id,
            metrics=_metrics(values, step=observation.recurrence, at_s=at_s),
            tags={"zf.outcome": observation.outcome.value, "zf.detail": codec.fits_tag(observation.detail)},
        )
        reached("after-outcome")
        self._store.end(attempt_id, "FAILED" if observation.outcome is Outcome.FAILED else "FINISHED")
        reached("after-terminate")

    def ended(self, recurrence: int, observations: Sequence[Observation], *, at_s: float | None = None) -> None:
        """Close a recurrence and write its point of the drift window's series."""
        if observations:
            last = observations[-1]
            values = {
                "zf.cost_j": sum(observed_cost(self._job, o) for o in observations),
                "zf.energy_to_accuracy_j": sum(o.energy_j for o in observations),
                "zf.time_to_accuracy_s": sum(o.time_s for o in observations),
                "zf.batch_size": float(last.batch_size),
                "zf.power_limit_w": last.power_limit_w,
                "zf.attempts": float(len(observations)),
            }
            self._store.log(self.window().run_id, metrics=_metrics(values, step=recurrence, at_s=at_s))
            reached("after-series")
        self.close(recurrence)
        reached("after-end")
        if observations:
            self._end_window(recurrence, observations)

    def close(self, recurrence: int, how: str = "ended") -> None:
        """Say that nothing will be added to a recurrence."""
        self._store.set_once(self._page(pages.number_of(recurrence)), pages.end(recurrence), how)

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
        page = Page().read(self._store.params(self._page(pages.number_of(recurrence))))
        return self._read_attempts(page.attempts_of(recurrence).values())

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
        found = boundary(self._job, before, after, observations, recurrences=recurrence - window.first + 1)
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

    # -- names -------------------------------------------------------------------------------------------------------

    def _name(self, record: Decision | Observation) -> str:
        return f"attempt {record.recurrence}.{record.attempt} of {self._job.name}"

    def _decision_tags(self, decision: Decision, context: Mapping[str, str]) -> dict[str, str]:
        return {
            "zf.kind": "attempt",
            "zf.recurrence": str(decision.recurrence),
            "zf.attempt": str(decision.attempt),
            "zf.fingerprint": self._job.fingerprint,
            "zf.energy_source": self._energy_source.value,
            "zf.policy": decision.policy,
            "zf.mode": self._job.mode.value,
            "zf.reason": decision.reason.text,
            "zf.explores": str(decision.explores).lower(),
            "zf.degraded": str(decision.degraded).lower(),
            "zf.drift_window": self.window().run_id,
            **context,
        }


def _pause_s(tries: int) -> float:
    """Return how long to wait after a lost race: at random, so that those who lost together part."""
    return uuid.uuid4().int % 1000 / 1000 * min(0.5, 0.02 * 2.0 ** min(tries, 9))


def _metrics(values: Mapping[str, float | None], *, step: int, at_s: float | None) -> list[Metric]:
    at_ms = int((time.time() if at_s is None else at_s) * 1000)
    return [Metric(name, value, at_ms, step) for name, value in values.items() if value is not None]


def _conforms(ledger: MlflowLedger) -> Ledger:
    return ledger
