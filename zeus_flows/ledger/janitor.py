"""Closes what is dead, so that the next recurrence explores on.

It runs first in every recurrence, and as `zeus-flows janitor`. A killed process leaves an attempt without an
observation; while that looks like an exploration under way, everyone else would run the best known arm for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from zeus_flows.killpoints import reached
from zeus_flows.ledger.attempt_ref import AttemptRef, ByRun, ByToken, read_ref
from zeus_flows.ledger.lease import DEAD_AFTER_S, Holder, is_gone, monotonic_s, read_holder, this_process
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.outbox import Outbox

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Buried:
    """A recurrence that was closed, and why; `attempts` had no observation."""

    recurrence: int
    attempts: int
    why: str
    flow_run_id: str


def sweep(
    ledger: MlflowLedger,
    outbox: Outbox,
    *,
    flow_run_ended: Callable[[str], bool] = lambda _: False,
    bury_flow_run: Callable[[str, str], None] = lambda _run, _why: None,
) -> list[Buried]:
    """Close recurrences whose holder is dead; return them.

    A holder is dead when its process has ended on this machine, its machine was rebooted, its flow run has ended, or
    its lease has not changed for five minutes of this machine's clock. What this machine's outbox still has to say
    about a recurrence goes first: a dead process may have left an observation there.

    Args:
        ledger: Where to look.
        outbox: What waits for delivery here, and what this machine saw of leases.
        flow_run_ended: Whether Prefect says that a flow run is over.
        bury_flow_run: Tells Prefect that a flow run is over, and why.
    """
    attempts, page = ledger.unfinished()
    waiting = frozenset(map(read_ref, outbox.unsettled(ledger.key)))
    for attempt in attempts:
        if attempt.decision.recurrence in page.ended and ByRun(attempt.run_id) not in waiting:
            ledger.declare_dead(attempt, "its recurrence had ended")
    buried = []
    for recurrence, claim in sorted(page.claims.items()):
        gate = page.gates.get(recurrence, "")
        if recurrence in page.ended or _is_waited_for(claim, (gate, *page.attempts_of(recurrence).values()), waiting):
            continue
        mine = [attempt for attempt in attempts if attempt.decision.recurrence == recurrence]
        lease = mine[-1].lease if mine else (ledger.gate_lease(gate) if gate else claim)
        holder = read_holder(lease) or read_holder(claim)
        sighting = mine[-1].run_id if mine else f"{ledger.key} {recurrence}.{len(page.attempts_of(recurrence))}{gate}"
        why = _cause_of_death(sighting, lease, holder, outbox, flow_run_ended)
        if why is None:
            continue
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
        buried.append(Buried(recurrence, len(mine), why, holder.flow_run_id if holder else ""))
    return buried


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
