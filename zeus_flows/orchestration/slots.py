"""A deployment's slot: held while its run lives, and given back soon after it has died.

Prefect keeps the slot of a run by a lease. Its engine takes one of five minutes; ours is renewed for the deployment's
grace period, so that a killed run's slot is free after that. Where the lease itself is lost, as when a server that
keeps leases in memory is started again, a slot stays taken by a run that looks as if it went on. So a run also says who
it is and that it lives, and whoever looks (`reap`) closes those that do not.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from zeus_flows.ledger.lease import DEAD_AFTER_S, HEARTBEAT_S, is_gone, read_holder, this_process

log = logging.getLogger(__name__)

#: Every deployment of ours has it.
TAG: Final = "zeus-flows"
#: Prefect's own name for it, so that automations which look for dead runs find ours.
HEARTBEAT: Final = "prefect.flow-run.heartbeat"
#: A flow run's label that says which process it is.
HOLDER: Final = "zeus-flows.holder"
#: Seconds between renewals of a lease. Every 225 s the engine's own makes it five minutes until the next of ours.
RENEW_S: Final = 10.0
#: Seconds beyond the grace period after which a run that never began is dead.
_PENDING_TOO_LONG_S: Final = 30.0


@contextmanager
def kept() -> Iterator[None]:
    """Keep this flow run's slot by a short lease, and say that it lives, until the block ends.

    Runs of the same deployment that have died are closed. Nothing where it is no run of a deployment. Where Prefect
    does not answer, training goes on; a lease that has run out meanwhile is the engine's to notice.
    """
    if runtime.deployment.id is None:
        yield
        return
    over = threading.Event()
    beats = contextvars.copy_context()
    thread = threading.Thread(target=beats.run, args=(_beat, over), name="zeus-flows-slot", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5.0)


def _beat(over: threading.Event) -> None:
    """Renew the lease and send heartbeats until told that the run is over."""
    run_id = UUID(str(runtime.flow_run.id))
    beat, lease = 0, None
    with get_client(sync_client=True) as client:
        while True:
            try:
                if lease is None:
                    client.update_flow_run_labels(run_id, {HOLDER: this_process(flow_run_id=str(run_id)).dump()})
                    deployment = client.read_deployment(UUID(str(runtime.deployment.id)))
                    lease = _lease_of(client, run_id, deployment)
                    reap(client, deployment)
                lease.renew(client)
                if beat % round(HEARTBEAT_S / RENEW_S) == 0:
                    emit_event(HEARTBEAT, resource={"prefect.resource.id": f"prefect.flow-run.{run_id}"})
            except (ObjectNotFound, httpx.HTTPError) as error:
                log.warning("Prefect was not told that flow run %s lives: %s", run_id, type(error).__name__)
            beat += 1
            if over.wait(RENEW_S):
                return


class _Lease:
    """A lease of a deployment's slot, or none: a deployment may have no limit."""

    def __init__(self, lease_id: UUID | None, seconds: float) -> None:
        self._id, self._seconds = lease_id, seconds

    def renew(self, client: SyncPrefectClient) -> None:
        """Hold the slot so many seconds from now."""
        if self._id is not None:
            client.renew_concurrency_lease(lease_id=self._id, lease_duration=self._seconds)


def _lease_of(client: SyncPrefectClient, run_id: UUID, deployment: DeploymentResponse) -> _Lease:
    run = client.read_flow_run(run_id)
    held = None if run.state is None else run.state.state_details.deployment_concurrency_lease_id
    return _Lease(held, grace_s(deployment))


def grace_s(deployment: DeploymentResponse) -> float:
    """Return the seconds that a deployment's run may take to start, and that its slot outlives it."""
    options = deployment.concurrency_options
    return 60.0 if options is None or options.grace_period_seconds is None else float(options.grace_period_seconds)


def reap(client: SyncPrefectClient, deployment: DeploymentResponse) -> list[FlowRun]:
    """Close those runs of a deployment that have died; return them.

    On its own machine a process that is gone is known to be dead at once; from elsewhere, when it has sent heartbeats
    and none for five minutes of the server's clock. One that never began is dead half a minute after its grace period.
    """
    found = client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING]))
        ),
    )
    dead = []
    for run in found:
        if str(run.id) == str(runtime.flow_run.id):
            continue
        why = _cause_of_death(client, run, grace_s(deployment))
        if why is not None:
            log.warning("%s (%s) was closed: %s", run.name, run.id, why)
            client.set_flow_run_state(run.id, Crashed(message=f"declared dead by zeus_flows: {why}"), force=True)
            dead.append(run)
    return dead


def _cause_of_death(client: SyncPrefectClient, run: FlowRun, grace: float) -> str | None:
    assert run.state is not None
    now, heard = _last_heard(client, run.id)
    if run.state.is_pending():
        waited = (now - run.state.timestamp).total_seconds()
        return f"it did not begin within {waited:.0f} s" if waited > grace + _PENDING_TOO_LONG_S else None
    holder = read_holder(str(run.labels.get(HOLDER, "")))
    gone = None if holder is None else is_gone(holder)
    if holder is not None and gone:
        return f"process {holder.pid} on {holder.host} has ended"
    if gone is False or heard is None:
        return None
    silent_s = (now - heard).total_seconds()
    return f"nothing was heard of it for {silent_s:.0f} s" if silent_s > DEAD_AFTER_S else None


def _last_heard(client: SyncPrefectClient, run_id: UUID) -> tuple[datetime, datetime | None]:
    """Return the server's time, and when it last received a heartbeat of a run; None where it never has."""
    wanted: dict[str, Any] = {
        "filter": {
            "occurred": {"since": (datetime.now(UTC) - timedelta(days=7)).isoformat()},
            "event": {"name": [HEARTBEAT]},
            "resource": {"id": [f"prefect.flow-run.{run_id}"]},
            "order": "DESC",
        },
        "limit": 1,
    }
    answer = client.request("POST", "/events/filter", json=wanted)
    now = parsedate_to_datetime(answer.headers["date"]) if "date" in answer.headers else datetime.now(UTC)
    events = answer.json()["events"]
    return now, datetime.fromisoformat(events[0]["received"]) if events else None
