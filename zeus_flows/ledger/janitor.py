"""Closes what is dead, so that the next recurrence explores on.

It runs first in every recurrence, and as `zeus-flows janitor`. A killed process leaves an attempt without an
observation; while that looks like an exploration under way, everyone else would run the best known arm for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from zeus_flows.ledger.lease import DEAD_AFTER_S, Holder, is_gone, monotonic_s, read_holder, this_process
from zeus_flows.ledger.mlflow import MlflowLedger
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
    its lease has not changed for five minutes of this machine's clock.

    Args:
        ledger: Where to look.
        outbox: Remembers what this machine saw of leases.
        flow_run_ended: Whether Prefect says that a flow run is over.
        bury_flow_run: Tells Prefect that a flow run is over, and why.
    """
    attempts = ledger.open_attempts()
    buried = []
    for recurrence, claim in sorted(ledger.open_claims().items()):
        mine = [attempt for attempt in attempts if attempt.decision.recurrence == recurrence]
        lease = mine[-1].lease if mine else claim
        holder = read_holder(lease) or read_holder(claim)
        why = _cause_of_death(f"{ledger.name}/{recurrence}.{len(mine)}", lease, holder, outbox, flow_run_ended)
        if why is None:
            continue
        for attempt in mine:
            ledger.declare_dead(attempt, why)
        ledger.close(recurrence, "dead")
        flow_run_id = holder.flow_run_id if holder else ""
        if flow_run_id:
            bury_flow_run(flow_run_id, why)
        log.warning("recurrence %d was closed: %s", recurrence, why)
        buried.append(Buried(recurrence, len(mine), why, flow_run_id))
    return buried


def _cause_of_death(
    name: str, lease: str, holder: Holder | None, outbox: Outbox, flow_run_ended: Callable[[str], bool]
) -> str | None:
    if holder is not None:
        gone = is_gone(holder)
        if gone:
            return f"process {holder.pid} on {holder.host} has ended"
        if gone is False:
            return None
        if holder.flow_run_id and flow_run_ended(holder.flow_run_id):
            return "its flow run has ended"
    silent_s = outbox.unchanged_for_s(name, lease, boot=this_process().boot, now_s=monotonic_s())
    return f"nothing was heard of it for {silent_s:.0f} s" if silent_s >= DEAD_AFTER_S else None
