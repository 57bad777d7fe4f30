"""A ledger that training can rely on while MLflow is away.

Decisions are read and written directly, within a bound; where MLflow does not answer, the default batch size stands in
and its decision is kept. Everything an attempt brings goes into the outbox first and is delivered by a thread
(`zeus_flows.ledger.delivery`), so that training never waits for MLflow. What is left when the process ends is delivered
by the next recurrence on this machine. Where the outbox's disk is full or gone, the thread delivers from memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

from zeus_flows.core import policy
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.job import Job
from zeus_flows.core.json import to_text
from zeus_flows.core.records import Decision, Gap, Observation
from zeus_flows.errors import StoreUnavailable
from zeus_flows.killpoints import reached
from zeus_flows.ledger.attempt_ref import AttemptRef, ByRun, ByToken, read_ref
from zeus_flows.ledger.delivery import Delivery, ItemKind, KeptDecision, KeptEnd
from zeus_flows.ledger.janitor import Swept, sweep
from zeus_flows.ledger.lease import Holder
from zeus_flows.ledger.link import Link
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.outbox import Outbox
from zeus_flows.ledger.protocol import History, Ledger
from zeus_flows.ledger.refolding import Refolding

log = logging.getLogger(__name__)

#: Seconds of MLflow's time within which a decision must be read and written; half of it where it was away just now.
DECIDE_WITHIN_S: Final = 18.0
#: Seconds that figures may take.
ATTACH_WITHIN_S: Final = 10.0
#: Seconds that the janitor may take before that.
SWEEP_WITHIN_S: Final = 8.0


class Standing(Enum):
    """What MLflow knows of the recurrence under way."""

    NUMBERED = auto()  # its number, and it has answered ever since
    DEGRADED = auto()  # its number; then it did not answer
    GUESSED = auto()  # nothing: the number is a guess


@dataclass(slots=True)
class _Recurrence:
    """The recurrence under way.

    Attributes:
        token: Names it while it may have no number.
        standing: What MLflow knows of it.
        attempt: The newest one.
        left_s: Seconds of MLflow's time that are left up to its next decision.
    """

    token: str
    standing: Standing = Standing.NUMBERED
    attempt: AttemptRef | None = None
    left_s: float = DECIDE_WITHIN_S


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
        self._job, self._outbox, self._token = job, outbox, holder.token
        self._ledger = open_ledger(Store(tracking_uri, patience_s=3.0))
        self._link = Link()
        self._delivery = Delivery(open_ledger(Store(tracking_uri)), outbox, holder, self._link)
        self._refolding = Refolding(lambda: open_ledger(Store(tracking_uri)))
        self._begun = 0
        self._now = _Recurrence(f"{self._token}.{self._begun}")

    @property
    def experiment_id(self) -> str:
        """The experiment that holds the attempts; empty while MLflow is away."""
        try:
            with self._deciding():
                return self._ledger.experiment_id
        except StoreUnavailable:
            self._link.lost()
            return ""

    def begin(self) -> int:
        """Take the next recurrence number; a guess where MLflow does not answer, put right on delivery."""
        self._begun += 1
        within_s = DECIDE_WITHIN_S / 2 if self._link.is_away else DECIDE_WITHIN_S
        self._now = _Recurrence(f"{self._token}.{self._begun}", left_s=within_s)
        try:
            with self._deciding():
                number = self._ledger.begin(self._now.token)
        except StoreUnavailable as error:
            self._degrade(error, Standing.GUESSED)
            return self._outbox.guess_recurrence(self._ledger.key)
        self._outbox.saw_recurrence(self._ledger.key, number)
        return number

    def history(self) -> History:
        """Return the history; an empty one, marked as degraded, where MLflow does not answer."""
        if self._now.standing is Standing.NUMBERED:
            try:
                with self._deciding():
                    found = self._ledger.history(wait_for_refold=False)
                if self._ledger.is_outdated:
                    self._refolding.begin(self._now.token)
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
                run_id = self._ledger.asked(recurrence, context)
        except StoreUnavailable as error:
            self._degrade(error)
            raise
        self._delivery.training = ByRun(run_id)
        return run_id

    def gated(self, check_id: str, check: GateCheck) -> None:
        """Keep what a gate found; wait a while for its delivery."""
        self._delivery.training = None
        item = self._delivery.put(read_ref(check_id), ItemKind.GATED, to_text(check))
        reached("after-spool-gate")
        self._delivery.wait(item)

    def decided(self, decision: Decision, context: Mapping[str, str]) -> str:
        """Write a decision, or keep it to be written, and begin to say that its holder is alive."""
        self._now.attempt = self._delivery.training = self._decided(decision, context)
        if self._now.standing is Standing.NUMBERED:
            self._delivery.decided_on = self._ledger.decided_on()
        return str(self._now.attempt)

    def epoch(self, attempt_id: str, report: EpochReport) -> None:
        """Keep what one epoch brought; deliver it soon."""
        self._delivery.put(read_ref(attempt_id), ItemKind.EPOCH, to_text(replace(report, wall_s=time.time())))
        reached("after-spool-epoch")

    def observed(self, attempt_id: str, observation: Observation) -> None:
        """Keep an outcome; wait a while for its delivery.

        Raises:
            AlreadyObserved: the attempt has another one; it may have been declared dead.
        """
        item = self._delivery.put(read_ref(attempt_id), ItemKind.OBSERVED, codec.dump_observation(observation))
        reached("after-spool-observation")
        self._delivery.training = None
        self._delivery.wait(item)

    def ended(self, recurrence: int, observations: Sequence[Observation]) -> None:
        """Keep a recurrence's end; deliver it soon."""
        self._delivery.training = None
        if self._now.attempt is None and self._now.standing is Standing.GUESSED:
            return  # its number was a guess and nothing bears it
        end = KeptEnd(recurrence, tuple(codec.dump_observation(observation) for observation in observations))
        item = self._delivery.put(self._now.attempt, ItemKind.ENDED, to_text(end))
        reached("after-spool-end")
        self._delivery.wait(item)

    def sweep(self, *, within_s: float = SWEEP_WITHIN_S, **prefect: Any) -> Swept:
        """Deliver what the dead left here, then close what is dead (`janitor.sweep`), as far as time and MLflow go."""
        self._delivery.settle()
        reached("after-settle")
        with self._ledger.store.within(within_s):
            swept = sweep(self._ledger, self._outbox, **prefect)
        if swept.why:
            self._link.lost()
            log.warning("%s; the janitor will come with the next recurrence", swept.why)
        else:
            self._ledger.go_on()
        return swept

    def run_of(self, attempt_id: str) -> str | None:
        """Return the run of an attempt; None where its decision still waits to be delivered."""
        match read_ref(attempt_id):
            case ByRun(run_id):
                return run_id
            case ByToken() as token:
                return self._outbox.run_of(str(token))
            case _:
                return None

    def attach(self, attempt_id: str, folder: Path, name: str) -> None:
        """Add a folder's files to an attempt's run, under a name; not where MLflow is away, as people can do without.

        Raises:
            Exception: the artifact store refused; it may raise anything.
        """
        run_id = self.run_of(attempt_id)
        if run_id is not None and not self.is_away:
            with self._ledger.store.within(ATTACH_WITHIN_S):
                self._ledger.store.ask(lambda client: client.log_artifacts(run_id, str(folder), name))

    @property
    def is_away(self) -> bool:
        """Whether MLflow did not answer when it was last asked."""
        return self._link.is_away

    @property
    def key(self) -> str:
        """Names the store and the job, without secrets."""
        return self._ledger.key

    def left(self) -> int:
        """Return about how many attempts something is still to be delivered from this machine."""
        return len(self._outbox.unsettled(self._ledger.key))

    def observations(self) -> tuple[Observation, ...]:
        """Return every observation that was delivered and counts."""
        return self._ledger.observations()

    def gaps(self) -> tuple[Gap, ...]:
        """Return every recurrence that the fold passes over and whose end was delivered."""
        return self._ledger.gaps()

    def close(self, *, flush_s: float = 5.0) -> None:
        """Stop delivering, after a last while to deliver what is left; the rest is left to the next recurrence."""
        self._delivery.flush(most_s=flush_s)
        self._delivery.stop()
        self._refolding.close()
        self._delivery.close()

    def _decided(self, decision: Decision, context: Mapping[str, str]) -> AttemptRef:
        """Write a decision, or keep it to be written; return what its attempt is called."""
        if self._now.standing is Standing.NUMBERED:
            try:
                with self._deciding():
                    return ByRun(self._ledger.decided(decision, context))
            except StoreUnavailable as error:
                self._degrade(error)
            finally:
                self._now.left_s = DECIDE_WITHIN_S
        attempt = ByToken(self._now.token, decision.attempt)
        kept = KeptDecision(
            codec.dump_decision(decision),
            context,
            guessed=self._now.standing is Standing.GUESSED,
            holder=self._delivery.holder.dump(),
        )
        self._delivery.put(attempt, ItemKind.DECIDED, to_text(kept))
        reached("after-spool-decision")
        return attempt

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Let all calls up to a decision share one bound; what happens between them does not count."""
        began = time.monotonic()
        try:
            with self._ledger.store.within(self._now.left_s):
                yield
        finally:
            self._now.left_s -= time.monotonic() - began

    def _degrade(self, error: StoreUnavailable, to: Standing = Standing.DEGRADED) -> None:
        log.warning("%s; this recurrence runs at the default batch size", error)
        self._link.lost()
        if self._now.standing is Standing.NUMBERED:
            self._now.standing = to


def _conforms(ledger: DurableLedger) -> Ledger:
    return ledger
