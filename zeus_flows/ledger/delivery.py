"""Delivers what is in the outbox to MLflow, in a thread of its own.

Delivery is at least once and every delivery is idempotent (write-once params, metrics with their own time stamps), so
what arrives, arrives once. A delivery that is refused for good (the attempt was declared dead) is dropped, and said.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.json import from_text
from zeus_flows.core.records import Observation
from zeus_flows.errors import LedgerDamaged, StoreDenied, StoreError, StoreUnavailable, UnknownAttempt
from zeus_flows.killpoints import reached
from zeus_flows.ledger.attempt_ref import AttemptRef, ByRun, ByToken, read_ref
from zeus_flows.ledger.lease import HEARTBEAT_S, Holder, read_holder
from zeus_flows.ledger.link import Link
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.layout import Whereabouts
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.reading import Reading
from zeus_flows.ledger.mlflow.run_note import DecisionNote
from zeus_flows.ledger.outbox import Item, Outbox

log = logging.getLogger(__name__)

#: Seconds an outcome waits for its delivery after training, while MLflow answers; it is safe in the outbox meanwhile.
WAIT_S: Final = 20.0
#: Seconds for which attempts wait in all while MLflow does not answer.
STALL_S: Final = 2.0
#: Seconds for which a recurrence waits, before it decides, for what others left here to be delivered.
SETTLE_S: Final = 4.0
#: Seconds that a process takes at its end for what the disk did not take and MLflow has not.
UNKEPT_S: Final = 30.0
_RETRY_S: Final = 2.0


class ItemKind(StrEnum):
    """What an item of the outbox is, which says how its payload is read."""

    GATED = "gated"  # a GateCheck
    DECIDED = "decided"  # a KeptDecision
    EPOCH = "epoch"  # an EpochReport
    OBSERVED = "observed"  # an observation's text
    ENDED = "ended"  # a KeptEnd


@dataclass(frozen=True, slots=True)
class KeptDecision:
    """A decision that MLflow did not take.

    Attributes:
        decision: Its text.
        context: What it was written with.
        guessed: Whether its recurrence has no number yet.
        holder: Who decided.
    """

    decision: str
    context: Mapping[str, str]
    guessed: bool
    holder: str


@dataclass(frozen=True, slots=True)
class KeptEnd:
    """The end of a recurrence, and the texts of what was observed in it."""

    recurrence: int
    observations: tuple[str, ...] = ()


class Delivery:
    """A thread that delivers an outbox's items and says that whoever trains is alive.

    Args:
        ledger: Where to, on a store of the thread's own.
        outbox: Where from.
        holder: Who this is to other processes.
        link: Told whether MLflow answers.

    Attributes:
        holder: The same, one beat further with each heartbeat.
        training: The attempt, or the check of a drift gate, whose holder says that it is alive.
        decided_on: What the decision of the attempt in training was taken on, which need not be read again.
    """

    def __init__(self, ledger: MlflowLedger, outbox: Outbox, holder: Holder, link: Link) -> None:
        self._ledger, self._outbox, self._link, self.holder = ledger, outbox, link, holder
        self.training: AttemptRef | None = None
        self.decided_on: tuple[Whereabouts, Reading, Mapping[str, DecisionNote]] | None = None
        self._shared: tuple[Whereabouts, Reading, Mapping[str, DecisionNote]] | None = None
        self._refused: dict[int, StoreError] = {}
        self._stall_left_s = STALL_S
        self._work = threading.Event()
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._moved = threading.Event()  # something was delivered, or could not be
        self._tries = 0
        self._thread = threading.Thread(target=self._deliver_for_ever, name="zeus-flows-outbox", daemon=True)
        self._thread.start()

    def put(self, attempt: AttemptRef | None, kind: ItemKind, payload: str) -> int:
        """Keep something in the outbox, to be delivered soon; return the item's id."""
        name = str(attempt) if attempt is not None else ""
        owner = self.holder.dump()
        item = self._outbox.put(self._ledger.key, name, kind, payload, owner=owner, wall_s=time.time())
        self._work.set()
        return item

    def wait(self, item: int) -> None:
        """Wait a while for an item's delivery; all waits share one bound while MLflow does not answer.

        Raises:
            StoreError: it was refused for good.
        """
        self._stall_left_s -= self._linger(lambda: self._is_waiting(item), self._stall_left_s)
        refused = self._refused.pop(item, None)
        if refused is not None:
            raise refused
        if self._is_waiting(item):
            kept = (
                "will be delivered by the next one" if item > 0 else "in memory only: it is lost when this process ends"
            )
            log.warning("MLflow does not answer; what this run brought is kept and %s", kept)

    def settle(self) -> None:
        """Wait a while for what is here to be delivered."""
        self._linger(self._is_anything_due, SETTLE_S)

    def flush(self, *, most_s: float) -> None:
        """Take a last while to deliver what is left, and longer where it would be lost otherwise."""
        if self._outbox.unkept(self._ledger.key, token=self.holder.token):
            most_s = max(most_s, UNKEPT_S)
        give_up, tries = time.monotonic() + most_s, self._tries
        self._hurry.set()
        self._work.set()
        while time.monotonic() < give_up and self._is_anything_due():
            in_vain = (
                self._link.is_away and self._tries > tries + 1
            )  # one may have been under way; one more was in vain
            if in_vain and not self._outbox.unkept(self._ledger.key, token=self.holder.token):
                break
            self._moved.wait(0.05)
            self._moved.clear()

    def stop(self) -> None:
        """Let the delivery under way be the last one."""
        self._stop.set()
        self._work.set()

    def close(self) -> None:
        """Stop, and leave the rest to the next recurrence on this machine."""
        self.stop()
        self._thread.join(timeout=10)
        if not self._thread.is_alive():  # else it may yet deliver: the items stay its own as long as this process
            lost = self._outbox.release(self._ledger.key, token=self.holder.token)
            if lost:
                log.error("%d records are lost: neither MLflow nor the state directory took them", lost)
            self._outbox.close()

    def _is_waiting(self, item: int) -> bool:
        return self._outbox.holds(item)

    def _is_anything_due(self) -> bool:
        return bool(self._outbox.due(self._ledger.key, owner=self.holder.dump()))

    def _linger(self, pending: Callable[[], bool], stall_s: float) -> float:
        """Wait for a delivery as long as MLflow answers; return for how long it did not, at most `stall_s`."""
        began = time.monotonic()
        silent_s = 0.0
        while pending() and not self._link.is_away and (now := time.monotonic()) < began + WAIT_S:
            silent_s = now - max(began, self._ledger.store.answered_s)
            if silent_s >= stall_s:
                return stall_s
            self._moved.wait(min(0.1, stall_s - silent_s))
            self._moved.clear()
        return max(silent_s, 0.0)

    # -- in the thread -----------------------------------------------------------------------------------------------

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
                    self._link.heard()
            except Exception as error:  # whatever it was, the thread must live: heartbeats depend on it
                if self._link.lost():
                    what = error if isinstance(error, StoreError) else type(error).__name__
                    log.warning("%s; training goes on, records are kept in the outbox", what)
                self._moved.set()
                self._hurry.wait(_RETRY_S)
            self._tries += 1

    def _beat(self) -> int:
        """Say that the holder of the attempt in training is alive; return how often that was said."""
        run_id = self._run_of(self.training)
        if not run_id:
            return 0
        self.holder = self.holder.next()
        self._ledger.heartbeat(run_id, self.holder)
        reached("after-heartbeat")
        return 1

    def _run_of(self, attempt: AttemptRef | None) -> str | None:
        """Return an attempt's run; None where a token names it and its decision was not delivered; empty for none."""
        match attempt:
            case None:
                return ""
            case ByRun(run_id):
                return run_id
            case ByToken():
                return self._outbox.run_of(str(attempt))

    def _deliver(self) -> int:
        """Deliver what is due; return how much that was."""
        delivered = 0
        for item in self._outbox.due(self._ledger.key, owner=self.holder.dump()):
            if self._stop.is_set():
                break
            reached("before-deliver")
            try:
                run_id = self._deliver_one(item)
            except (StoreUnavailable, StoreDenied, LedgerDamaged):
                raise
            except StoreError as refusal:
                log.warning("a record was refused and dropped: %s", refusal)
                self._refused[item.id] = refusal
                run_id = None
            reached("after-deliver")
            self._outbox.remove(item.id, token=item.attempt if run_id else None, run_id=run_id)
            self._moved.set()
            reached("after-remove")
            delivered += 1
        return delivered

    def _deliver_one(self, item: Item) -> str | None:
        """Deliver an item; return the run that a decision's token has become."""
        attempt, ledger = read_ref(item.attempt), self._ledger
        if (known := self.decided_on) is not None and known is not self._shared:
            ledger.share(*known)
            self._shared = known
        if item.kind == ItemKind.DECIDED:
            return self._deliver_decision(item, attempt)
        run_id = self._run_of(attempt)
        if run_id is None:
            raise UnknownAttempt(f"the decision of attempt {attempt} was refused")

        def numbered(text: str) -> Observation:
            observation = codec.load_observation(text)
            return replace(observation, recurrence=ledger.recurrence_of(run_id)) if guessed else observation

        guessed = isinstance(attempt, ByToken)
        match ItemKind(item.kind):
            case ItemKind.GATED:
                ledger.gated(run_id, from_text(GateCheck, item.payload), at_s=item.wall_s)
            case ItemKind.EPOCH:
                ledger.epoch(run_id, from_text(EpochReport, item.payload))
            case ItemKind.OBSERVED:
                ledger.observed(run_id, numbered(item.payload), at_s=item.wall_s)
            case ItemKind.ENDED:
                end = from_text(KeptEnd, item.payload)
                recurrence = ledger.recurrence_of(run_id) if guessed else end.recurrence
                ledger.ended(recurrence, [numbered(text) for text in end.observations], at_s=item.wall_s)
        return None

    def _deliver_decision(self, item: Item, attempt: AttemptRef | None) -> str:
        kept = from_text(KeptDecision, item.payload)
        decision, holder = codec.load_decision(kept.decision), read_holder(kept.holder)
        if kept.guessed and isinstance(attempt, ByToken):
            number = self._ledger.begin(attempt.recurrence, holder=holder, asked_before=True)
            reached("after-late-claim")
            decision = replace(decision, recurrence=number)
        return self._ledger.decided(decision, kept.context, holder=holder, at_s=item.wall_s)
