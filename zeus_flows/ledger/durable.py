"""A ledger that training can rely on while MLflow is away.

Decisions are read and written directly, within a bound; where MLflow does not answer, the default batch size stands in
and its decision is kept. Everything an attempt brings goes into the outbox first and is delivered by a thread, so that
training never waits for MLflow. What is left when the process ends is delivered by the next recurrence on this machine.

Delivery is at least once and every delivery is idempotent (write-once params, metrics with their own time stamps), so
what arrives, arrives once. A delivery that is refused for good (the attempt was declared dead) is dropped, and said.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from zeus_flows.core import policy
from zeus_flows.core.records import Decision, Job, Observation
from zeus_flows.errors import AlreadyObserved, DeclaredDead, StoreError, StoreUnavailable, UnknownAttempt
from zeus_flows.ledger import codec
from zeus_flows.ledger.janitor import Buried, sweep
from zeus_flows.ledger.lease import HEARTBEAT_S, Holder
from zeus_flows.ledger.mlflow import MlflowLedger
from zeus_flows.ledger.outbox import Item, Outbox
from zeus_flows.ledger.points import reached
from zeus_flows.ledger.protocol import EpochReport, History, Ledger
from zeus_flows.ledger.store import Store

log = logging.getLogger(__name__)

#: Seconds within which a decision must be read and written; one call more may be under way then.
DECIDE_WITHIN_S: Final = 20.0
#: Seconds an outcome waits for its delivery after training; it is safe in the outbox meanwhile.
WAIT_S: Final = 20.0
_RETRY_S: Final = 2.0


class DurableLedger:
    """A ledger over `MlflowLedger` and an outbox.

    Args:
        job: Whose ledger this is.
        open_ledger: Opens the MLflow side on a store; called for the deciding and for the delivering thread.
        tracking_uri: Where.
        outbox: Where writes go first.
        holder: Who this is to other processes.
    """

    def __init__(
        self,
        job: Job,
        open_ledger: Callable[[Store], MlflowLedger],
        *,
        tracking_uri: str,
        outbox: Outbox,
        holder: Holder,
    ) -> None:
        self._job, self._outbox, self._holder = job, outbox, holder
        self._store = Store(tracking_uri, patience_s=3.0)
        self._ledger = open_ledger(self._store)
        self._delivering = open_ledger(Store(tracking_uri))
        self._key = json.dumps([tracking_uri.rpartition("@")[2], job.name])
        self._refused: dict[int, StoreError] = {}
        self._beating: str | None = None
        self._attempt = ""
        self._work = threading.Event()
        self._stop = threading.Event()
        self._away = False
        self.degraded = self._guessed = False
        self._thread = threading.Thread(target=self._deliver_for_ever, name="zeus-flows-outbox", daemon=True)
        self._thread.start()

    @property
    def experiment_id(self) -> str:
        """The experiment that holds the attempts; empty while MLflow is away."""
        try:
            return self._ledger.experiment_id
        except StoreUnavailable:
            return ""

    def begin(self) -> int:
        """Take the next recurrence number; a guess where MLflow does not answer, put right on delivery."""
        self.degraded = self._guessed = False
        try:
            with self._store.within(DECIDE_WITHIN_S):
                number = self._ledger.begin()
        except StoreUnavailable as error:
            self._degrade(error)
            self._guessed = True
            return self._outbox.guess_recurrence(self._key)
        self._outbox.saw_recurrence(self._key, number)
        return number

    def history(self) -> History:
        """Return the history; an empty one, marked as degraded, where MLflow does not answer."""
        if not self.degraded:
            try:
                with self._store.within(DECIDE_WITHIN_S):
                    return self._ledger.history()
            except StoreUnavailable as error:
                self._degrade(error)
        return History(policy.initial(self._job), degraded=True)

    def decided(self, decision: Decision, context: Mapping[str, str]) -> str:
        """Write a decision, or keep it to be written, and begin to say that its holder is alive."""
        if not self.degraded:
            try:
                with self._store.within(DECIDE_WITHIN_S):
                    self._attempt = self._beating = self._ledger.decided(decision, context)
                    return self._attempt
            except StoreUnavailable as error:
                self._degrade(error)
        payload = {"decision": codec.dump_decision(decision), "context": dict(context), "guessed": self._guessed}
        self._attempt = f"{self._holder.token}-{decision.recurrence}-{decision.attempt}"
        self._put(self._attempt, "decided", json.dumps(payload))
        reached("after-spool-decision")
        return self._attempt

    def epoch(self, attempt_id: str, report: EpochReport) -> None:
        """Keep what one epoch brought; deliver it soon."""
        self._put(attempt_id, "epoch", json.dumps(asdict(replace(report, wall_s=time.time()))))
        reached("after-spool-epoch")

    def observed(self, attempt_id: str, observation: Observation) -> None:
        """Keep an outcome; wait a while for its delivery.

        Raises:
            AlreadyObserved: the attempt has another one; it may have been declared dead.
        """
        item = self._put(attempt_id, "observed", codec.dump_observation(observation))
        reached("after-spool-observation")
        self._beating = None
        self._wait(item)

    def ended(self, recurrence: int, observations: Sequence[Observation]) -> None:
        """Keep a recurrence's end; deliver it soon."""
        texts = [codec.dump_observation(observation) for observation in observations]
        payload = json.dumps({"recurrence": recurrence, "observations": texts})
        item = self._put(self._attempt, "ended", payload)
        reached("after-spool-end")
        self._beating = None
        self._wait(item)

    def sweep(self, **prefect: Any) -> list[Buried]:
        """Close what is dead (`janitor.sweep`); nothing where MLflow does not answer."""
        try:
            with self._store.within(DECIDE_WITHIN_S):
                return sweep(self._ledger, self._outbox, **prefect)
        except StoreUnavailable as error:
            log.warning("%s; the janitor will come with the next recurrence", error)
            return []

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation that was delivered and counts."""
        return self._ledger.observations()

    def close(self, *, flush_s: float = 5.0) -> None:
        """Stop delivering, after a last while to deliver what is left."""
        give_up = time.monotonic() + (0.0 if self._away else flush_s)
        while time.monotonic() < give_up and self._outbox.due(self._key, owner=self._holder.dump()):
            time.sleep(0.05)
        self._stop.set()
        self._work.set()
        self._thread.join(timeout=10)

    # -- the outbox ----------------------------------------------------------------------------------------------

    def _put(self, attempt: str, kind: str, payload: str) -> int:
        item = self._outbox.put(self._key, attempt, kind, payload, owner=self._holder.dump(), wall_s=time.time())
        self._work.set()
        return item

    def _wait(self, item: int) -> None:
        give_up = time.monotonic() + WAIT_S
        while self._outbox.waiting(self._key, item) and not self._away and time.monotonic() < give_up:
            time.sleep(0.01)
        refused = self._refused.pop(item, None)
        if refused is not None:
            raise refused
        if self._outbox.waiting(self._key, item):
            log.warning("MLflow does not answer; what this run brought is kept and will be delivered by the next one")

    def _deliver_for_ever(self) -> None:
        beat_at = time.monotonic() + HEARTBEAT_S
        while not self._stop.is_set():
            self._work.wait(timeout=_RETRY_S)
            self._work.clear()
            try:
                self._deliver()
                if self._beating and time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + HEARTBEAT_S
                    self._holder = self._holder.next()
                    self._delivering.heartbeat(self._beating, self._holder)
                self._away = False
            except StoreError as error:
                if not self._away:
                    log.warning("%s; training goes on, records are kept in the outbox", error)
                self._away = True

    def _deliver(self) -> int:
        items = self._outbox.due(self._key, owner=self._holder.dump())
        for item in items:
            try:
                run_id = self._deliver_one(item)
            except (AlreadyObserved, DeclaredDead, UnknownAttempt) as refusal:
                log.warning("a record was refused and dropped: %s", refusal)
                self._refused[item.id] = refusal
                run_id = None
            reached("after-deliver")
            self._outbox.remove(item.id, token=item.attempt if run_id else None, run_id=run_id)
        return len(items)

    def _deliver_one(self, item: Item) -> str | None:
        """Deliver an item; return the run that a decision's token has become."""
        ledger = self._delivering
        known = self._outbox.run_of(item.attempt)
        run_id = known or item.attempt

        def numbered(text: str) -> Observation:
            observation = codec.load_observation(text)
            return replace(observation, recurrence=ledger.recurrence_of(known)) if known else observation

        match item.kind:
            case "decided":
                data = json.loads(item.payload)
                decision = codec.load_decision(data["decision"])
                if data["guessed"]:
                    decision = replace(decision, recurrence=ledger.begin(token=item.attempt.rpartition("-")[0]))
                return ledger.decided(decision, data["context"])
            case "epoch":
                ledger.epoch(run_id, EpochReport(**json.loads(item.payload)))
            case "observed":
                ledger.observed(run_id, numbered(item.payload), at_s=item.wall_s)
            case "ended":
                data = json.loads(item.payload)
                recurrence = ledger.recurrence_of(known) if known else int(data["recurrence"])
                ledger.ended(recurrence, [numbered(text) for text in data["observations"]], at_s=item.wall_s)
        return None

    def _degrade(self, error: StoreUnavailable) -> None:
        log.warning("%s; this recurrence runs at the default batch size", error)
        self._away = self.degraded = True


def _conforms(ledger: DurableLedger) -> Ledger:
    return ledger
