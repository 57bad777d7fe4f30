"""Closes what is dead, so that the next recurrence explores on.

It runs first in every recurrence, and as `zeus-flows janitor`. A killed process leaves an attempt without an
observation; while that looks like an exploration under way, everyone else would run the best known arm for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from zeus_flows.errors import StoreUnavailable
from zeus_flows.killpoints import reached
from zeus_flows.ledger.attempt_ref import AttemptRef, ByRun, ByToken, read_ref
from zeus_flows.ledger.lease import DEAD_AFTER_S, Holder, is_gone, monotonic_s, read_holder, this_process
from zeus_flows.ledger.mlflow.attempts import OpenAttempt
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.outbox import Outbox

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Buried:
    """A recurrence that was closed, and why; `attempts` had no observation."""

    recurrence: int
    attempts: int
    why: str
    flow_run_id: str


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did, and what it did not come to.

    Attributes:
        buried: The recurrences that were closed.
        unseen: Recurrences that have not ended and were not looked at, as MLflow did not answer in time.
        why: Why the sweep broke off; empty where it did not. Without `unseen` it came to nothing at all.
    """

    buried: tuple[Buried, ...] = ()
    unseen: tuple[int, ...] = ()
    why: str = ""


def sweep(
    ledger: MlflowLedger,
    outbox: Outbox,
    *,
    flow_run_ended: Callable[[str], bool] = lambda _: False,
    bury_flow_run: Callable[[str, str], None] = lambda _run, _why: None,
) -> Swept:
    """Close recurrences whose holder is dead; return them, and what there was no time for.

    A holder is dead when its process has ended on this machine, its machine was rebooted, its flow run has ended, or
    its lease has not changed for five minutes of this machine's clock. What this machine's outbox still has to say
    about a recurrence goes first: a dead process may have left an observation there.

    Args:
        ledger: Where to look.
        outbox: What waits for delivery here, and what this machine saw of leases.
        flow_run_ended: Whether Prefect says that a flow run is over.
        bury_flow_run: Tells Prefect that a flow run is over, and why.
    """
    try:
        attempts, page = ledger.unfinished()
    except StoreUnavailable as error:
        return Swept(why=str(error))
    waiting = frozenset(map(read_ref, outbox.unsettled(ledger.key)))
    left = [recurrence for recurrence in sorted(page.claims) if recurrence not in page.ended]
    buried = []
    try:
        for attempt in attempts:
            if attempt.decision.recurrence in page.ended and ByRun(attempt.run_id) not in waiting:
                ledger.declare_dead(attempt, "its recurrence had ended")
        while left:
            mine = [attempt for attempt in attempts if attempt.decision.recurrence == left[0]]
            found = _bury_if_dead(ledger, outbox, left[0], mine, page, waiting, flow_run_ended, bury_flow_run)
            buried += [found] if found else []
            del left[0]
    except StoreUnavailable as error:
        return Swept(tuple(buried), tuple(left), str(error))
    return Swept(tuple(buried))


def _bury_if_dead(
    ledger: MlflowLedger,
    outbox: Outbox,
    recurrence: int,
    mine: Sequence[OpenAttempt],
    page: Page,
    waiting: Collection[AttemptRef | None],
    flow_run_ended: Callable[[str], bool],
    bury_flow_run: Callable[[str, str], None],
) -> Buried | None:
    """Close a recurrence whose holder is dead; None where it is not, or something about it is still to be delivered.

    Args:
        ledger: Where it is.
        outbox: As of `sweep`.
        recurrence: Which.
        mine: Its attempts without an observation.
        page: The page that it is on.
        waiting: What is still to be delivered.
        flow_run_ended: As of `sweep`.
        bury_flow_run: As of `sweep`.
    """
    claim, gate = page.claims[recurrence], page.gates.get(recurrence, "")
    if _is_waited_for(claim, (gate, *page.attempts_of(recurrence).values()), waiting):
        return None
    lease = mine[-1].lease if mine else (ledger.gate_lease(gate) if gate else claim)
    holder = read_holder(lease) or read_holder(claim)
    sighting = mine[-1].run_id if mine else f"{ledger.key} {recurrence}.{len(page.attempts_of(recurrence))}{gate}"
    why = _cause_of_death(sighting, lease, holder, outbox, flow_run_ended)
    if why is None:
        return None
    for attempt in mine:
        ledger.declare_dead(attempt, why)
    reached("after-declare-dead")
    if holder is not None and holder.flow_run_id:  # before the end is written: after it nobody would come back
        bury_flow_run(holder.flow_run_id, why)
    reached("after-bury")
    ledger.bury(recurrence)
    reached("after-close-dead")
    for attempt in ledger.open_attempts_of(recurrence):  # written since we looked, by one that is alive after all
        ledger.declare_dead(attempt, why)
    log.warning("recurrence %d was closed: %s", recurrence, why)
    return Buried(recurrence, len(mine), why, holder.flow_run_id if holder else "")


def sweep_orphans(ledger: MlflowLedger, *, now_s: float, older_than_s: float = 86_400.0, most: int = 500) -> list[str]:
    """Delete runs that were created and never linked, because their process died in between; return their ids.

    They count for nothing; they only look as if something were running. Only the newest `most` runs that look so are
    checked, and those a day old: a younger one may be linked in a moment.
    """
    orphans = [
        str(run.info.run_id)
        for run in ledger.unended_runs(most=most)
        if run.info.start_time < (now_s - older_than_s) * 1000 and not ledger.is_linked(run)
    ]
    for run_id in orphans:
        ledger.discard(run_id)
    return orphans


def _is_waited_for(claim: str, run_ids: Iterable[str], waiting: Collection[AttemptRef | None]) -> bool:
    """Return whether something about a recurrence is still in this machine's outbox; the end of one may name no run."""
    holder = read_holder(claim)
    tokens = {attempt.recurrence for attempt in waiting if isinstance(attempt, ByToken)}
    return (holder is not None and holder.token in tokens) or any(read_ref(run_id) in waiting for run_id in run_ids)


def _cause_of_death(
    sighting: str, lease: str, holder: Holder | None, outbox: Outbox, flow_run_ended: Callable[[str], bool]
) -> str | None:
    if holder is not None:
        gone = is_gone(holder)
        if gone:
            return f"process {holder.pid} on {holder.host} has ended"
        if gone is False:
            return None
        if holder.flow_run_id and flow_run_ended(holder.flow_run_id):
            return "its flow run has ended"
    silent_s = outbox.unchanged_for_s(sighting, lease, boot=this_process().boot, now_s=monotonic_s())
    return f"nothing was heard of it for {silent_s:.0f} s" if silent_s >= DEAD_AFTER_S else None
