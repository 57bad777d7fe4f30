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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Final

from zeus_flows.core import policy
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.job import Job
from zeus_flows.core.json import from_plain, jsonable
from zeus_flows.core.records import Decision, Gap, Observation
from zeus_flows.errors import StoreDenied, StoreError, StoreUnavailable, UnknownAttempt
from zeus_flows.killpoints import reached
from zeus_flows.ledger.janitor import Buried, sweep
from zeus_flows.ledger.lease import HEARTBEAT_S, Holder, read_holder
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.outbox import Item, Outbox
from zeus_flows.ledger.protocol import History, Ledger

log = logging.getLogger(__name__)

#: Seconds of MLflow's time within which a decision must be read and written; half of it where it was away just now.
DECIDE_WITHIN_S: Final = 18.0
#: Seconds that the janitor may take before that.
SWEEP_WITHIN_S: Final = 8.0
#: Seconds an outcome waits for its delivery after training, while MLflow answers; it is safe in the outbox meanwhile.
WAIT_S: Final = 20.0
#: Seconds for which attempts wait in all while MLflow does not answer.
STALL_S: Final = 2.0
#: Seconds for which a recurrence waits, before it decides, for what others left here to be delivered.
SETTLE_S: Final = 4.0
_RETRY_S: Final = 2.0


class DurableLedger:
    """A ledger over `MlflowLedger` and an outbox.

    Args:
        job: Whose ledger this is.
        open_ledger: Opens the MLflow side on a store; called for the deciding and for the delivering thread, and for
            one that folds the history anew where an earlier version wrote its snapshot.
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
        self._deliveries = Store(tracking_uri)
        self._delivering = open_ledger(self._deliveries)
        self._open_ledger, self._tracking_uri = open_ledger, tracking_uri
        self._refolding: threading.Thread | None = None
        self._refolded_in = 0  # which recurrence of this process
        self._key = self._ledger.key
        self._refused: dict[int, StoreError] = {}
        self._begun = 0
        self._guessed = self.degraded = self._away = False
        self._attempt: str | None = None  # of this recurrence, the newest
        self._training: str | None = None  # the attempt whose holder says that it is alive
        self._left_s, self._stall_left_s = DECIDE_WITHIN_S, STALL_S
        self._work = threading.Event()
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._tries = 0
        self._thread = threading.Thread(target=self._deliver_for_ever, name="zeus-flows-outbox", daemon=True)
        self._thread.start()

    @property
    def experiment_id(self) -> str:
        """The experiment that holds the attempts; empty while MLflow is away."""
        try:
            with self._deciding():
                return self._ledger.experiment_id
        except StoreUnavailable:
            self._away = True
            return ""

    def begin(self) -> int:
        """Take the next recurrence number; a guess where MLflow does not answer, put right on delivery."""
        self.degraded = self._guessed = False
        self._attempt = None
        self._begun += 1
        self._left_s = DECIDE_WITHIN_S / 2 if self._away else DECIDE_WITHIN_S
        try:
            with self._deciding():
                number = self._ledger.begin(self._token)
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
                with self._deciding():
                    found = self._ledger.history(wait_for_refold=False)
                self._refold()
                return found
            except StoreUnavailable as error:
                self._degrade(error)
        return History(policy.initial(self._job), degraded=True)

    def asked(self, recurrence: int, context: Mapping[str, str]) -> str:
        """Write that a drift gate is being asked, and begin to say that whoever asks is alive.

        Raises:
            StoreUnavailable: MLflow did not answer; what comes next does without it.
        """
        try:
            with self._deciding():
                self._training = self._ledger.asked(recurrence, context)
                return self._training
        except StoreUnavailable as error:
            self._degrade(error)
            raise

    def gated(self, check_id: str, check: GateCheck) -> None:
        """Keep what a gate found; wait a while for its delivery."""
        self._training = None
        item = self._put(check_id, "gated", json.dumps(jsonable(check)))
        reached("after-spool-gate")
        self._wait(item)

    def decided(self, decision: Decision, context: Mapping[str, str]) -> str:
        """Write a decision, or keep it to be written, and begin to say that its holder is alive."""
        if not self.degraded:
            try:
                with self._deciding():
                    self._attempt = self._training = self._ledger.decided(decision, context)
                    return self._attempt
            except StoreUnavailable as error:
                self._degrade(error)
            finally:
                self._left_s = DECIDE_WITHIN_S
        payload = {
            "decision": codec.dump_decision(decision),
            "context": dict(context),
            "guessed": self._guessed,
            "holder": self._holder.dump(),
        }
        self._attempt = self._training = f"{self._token}-{decision.attempt}"
        self._put(self._attempt, "decided", json.dumps(payload))
        reached("after-spool-decision")
        return self._attempt

    def epoch(self, attempt_id: str, report: EpochReport) -> None:
        """Keep what one epoch brought; deliver it soon. Training does not end because one cannot be kept."""
        try:
            self._put(attempt_id, "epoch", json.dumps(asdict(replace(report, wall_s=time.time()))))
        except StoreError as error:
            log.warning("epoch %d is not recorded: %s", report.epoch, error)
        reached("after-spool-epoch")

    def observed(self, attempt_id: str, observation: Observation) -> None:
        """Keep an outcome; wait a while for its delivery.

        Raises:
            AlreadyObserved: the attempt has another one; it may have been declared dead.
        """
        item = self._put(attempt_id, "observed", codec.dump_observation(observation))
        reached("after-spool-observation")
        self._training = None
        self._wait(item)

    def ended(self, recurrence: int, observations: Sequence[Observation]) -> None:
        """Keep a recurrence's end; deliver it soon."""
        self._training = None
        if self._attempt is None and self._guessed:
            return  # its number was a guess and nothing bears it
        texts = [codec.dump_observation(observation) for observation in observations]
        payload = json.dumps({"recurrence": recurrence, "observations": texts})
        item = self._put(self._attempt or "", "ended", payload)
        reached("after-spool-end")
        self._wait(item)

    def sweep(self, **prefect: Any) -> list[Buried]:
        """Deliver what the dead left here, then close what is dead (`janitor.sweep`); nothing while MLflow is away."""
        self._linger(lambda: bool(self._outbox.due(self._key, owner=self._holder.dump())), SETTLE_S)
        reached("after-settle")
        try:
            with self._store.within(SWEEP_WITHIN_S):
                return sweep(self._ledger, self._outbox, **prefect)
        except StoreUnavailable as error:
            self._away = True
            log.warning("%s; the janitor will come with the next recurrence", error)
            return []

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation that was delivered and counts."""
        return self._ledger.observations()

    def gaps(self) -> tuple[Gap, ...]:
        """Return every recurrence that the fold passes over and whose end was delivered."""
        return self._ledger.gaps()

    def close(self, *, flush_s: float = 5.0) -> None:
        """Stop delivering, after a last while to deliver what is left; the rest is left to the next recurrence."""
        give_up, tries = time.monotonic() + flush_s, self._tries
        self._hurry.set()
        self._work.set()
        while time.monotonic() < give_up and self._outbox.due(self._key, owner=self._holder.dump()):
            if self._away and self._tries > tries + 1:  # one may have been under way; one more was in vain
                break
            time.sleep(0.02)
        self._stop.set()
        self._work.set()
        if self._refolding is not None:
            self._refolding.join(timeout=1)  # it keeps what it has folded
        self._thread.join(timeout=10)
        if not self._thread.is_alive():  # else it may yet deliver: the items stay its own as long as this process
            self._outbox.release(self._key, token=self._holder.token)
            self._outbox.close()

    # -- a snapshot of an earlier version -------------------------------------------------------------------------

    def _refold(self) -> None:
        """Begin to fold the history anew where an earlier version wrote its snapshot, once in a recurrence."""
        if self._refolded_in == self._begun or not self._ledger.is_outdated:
            return
        if self._refolding is not None and self._refolding.is_alive():
            return
        self._refolded_in = self._begun
        self._refolding = threading.Thread(target=self._refold_all, name="zeus-flows-refold", daemon=True)
        self._refolding.start()

    def _refold_all(self) -> None:
        try:
            self._open_ledger(Store(self._tracking_uri)).refold(self._stop.is_set)
        except Exception as error:  # decisions do without
            what = error if isinstance(error, StoreError) else type(error).__name__
            log.warning("%s; the next recurrence goes on folding the history anew", what)

    # -- the outbox ----------------------------------------------------------------------------------------------

    @property
    def _token(self) -> str:
        """Names this recurrence while it may have no number."""
        return f"{self._holder.token}.{self._begun}"

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Let all calls up to a decision share one bound; what happens between them does not count."""
        began = time.monotonic()
        try:
            with self._store.within(self._left_s):
                yield
        finally:
            self._left_s -= time.monotonic() - began

    def _put(self, attempt: str, kind: str, payload: str) -> int:
        item = self._outbox.put(self._key, attempt, kind, payload, owner=self._holder.dump(), wall_s=time.time())
        self._work.set()
        return item

    def _wait(self, item: int) -> None:
        self._stall_left_s -= self._linger(lambda: self._outbox.waiting(self._key, item), self._stall_left_s)
        refused = self._refused.pop(item, None)
        if refused is not None:
            raise refused
        if self._outbox.waiting(self._key, item):
            log.warning("MLflow does not answer; what this run brought is kept and will be delivered by the next one")

    def _linger(self, pending: Callable[[], bool], stall_s: float) -> float:
        """Wait for a delivery as long as MLflow answers; return for how long it did not, at most `stall_s`."""
        began = time.monotonic()
        silent_s = 0.0
        while pending() and not self._away and (now := time.monotonic()) < began + WAIT_S:
            silent_s = now - max(began, self._deliveries.answered_s)
            if silent_s >= stall_s:
                return stall_s
            time.sleep(0.01)
        return max(silent_s, 0.0)

    def _deliver_for_ever(self) -> None:
        beat_at = time.monotonic() + HEARTBEAT_S
        while not self._stop.is_set():
            self._work.wait(timeout=0.05 if self._hurry.is_set() else _RETRY_S)
            self._work.clear()
            try:
                heard = self._deliver()
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + HEARTBEAT_S
                    heard += self._beat()
                if heard:
                    self._away = False
            except Exception as error:  # whatever it was, the thread must live: heartbeats depend on it
                if not self._away:
                    what = error if isinstance(error, StoreError) else type(error).__name__
                    log.warning("%s; training goes on, records are kept in the outbox", what)
                self._away = True
                self._hurry.wait(_RETRY_S)
            self._tries += 1

    def _beat(self) -> int:
        """Say that the holder of the attempt in training is alive; return how often that was said."""
        run_id = self._run_of(self._training) if self._training else None
        if run_id is None:
            return 0
        self._holder = self._holder.next()
        self._delivering.heartbeat(run_id, self._holder)
        reached("after-heartbeat")
        return 1

    def _run_of(self, attempt: str) -> str | None:
        """Return an attempt's run; None where it is named by a token and its decision was not delivered yet."""
        return self._outbox.run_of(attempt) if "-" in attempt else attempt

    def _deliver(self) -> int:
        delivered = 0
        for item in self._outbox.due(self._key, owner=self._holder.dump()):
            if self._stop.is_set():
                break
            reached("before-deliver")
            try:
                run_id = self._deliver_one(item)
            except (StoreUnavailable, StoreDenied):
                raise
            except StoreError as refusal:
                log.warning("a record was refused and dropped: %s", refusal)
                self._refused[item.id] = refusal
                run_id = None
            reached("after-deliver")
            self._outbox.remove(item.id, token=item.attempt if run_id else None, run_id=run_id)
            reached("after-remove")
            delivered += 1
        return delivered

    def _deliver_one(self, item: Item) -> str | None:
        """Deliver an item; return the run that a decision's token has become."""
        ledger = self._delivering
        if item.kind == "decided":
            data = json.loads(item.payload)
            decision, holder = codec.load_decision(data["decision"]), read_holder(data["holder"])
            if data["guessed"]:
                number = ledger.begin(item.attempt.rpartition("-")[0], holder=holder, asked_before=True)
                reached("after-late-claim")
                decision = replace(decision, recurrence=number)
            return ledger.decided(decision, data["context"], holder=holder, at_s=item.wall_s)
        run_id = self._run_of(item.attempt)
        if run_id is None:
            raise UnknownAttempt(f"the decision of attempt {item.attempt} was refused")
        named_by_token = "-" in item.attempt

        def numbered(text: str) -> Observation:
            observation = codec.load_observation(text)
            return replace(observation, recurrence=ledger.recurrence_of(run_id)) if named_by_token else observation

        match item.kind:
            case "gated":
                ledger.gated(run_id, from_plain(GateCheck, json.loads(item.payload)), at_s=item.wall_s)
            case "epoch":
                ledger.epoch(run_id, EpochReport(**json.loads(item.payload)))
            case "observed":
                ledger.observed(run_id, numbered(item.payload), at_s=item.wall_s)
            case "ended":
                data = json.loads(item.payload)
                recurrence = ledger.recurrence_of(run_id) if named_by_token else int(data["recurrence"])
                ledger.ended(recurrence, [numbered(text) for text in data["observations"]], at_s=item.wall_s)
        return None

    def _degrade(self, error: StoreUnavailable) -> None:
        log.warning("%s; this recurrence runs at the default batch size", error)
        self._away = self.degraded = True


def _conforms(ledger: DurableLedger) -> Ledger:
    return ledger
