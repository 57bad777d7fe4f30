"""Missed runs lead to one: a scheduled run that begins while a newer one is due ends as `Superseded`.

With no worker, or with a holder that takes longer than the schedule's period, Prefect keeps every run that was due.
What they would train is what the newest trains. A run that somebody asked for is never superseded, so a backfill is as
many runs as are asked for.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilterExpectedStartTime
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled

from zeus_flows.orchestration.next_runs import scheduled_runs
from zeus_flows.orchestration.run_names import name_upcoming

log = logging.getLogger(__name__)

#: The state's name; its type is Cancelled, which is neither a success nor a failure.
SUPERSEDED: Final = "Superseded"
_PAGE: Final = 200


def superseded() -> State[Any] | None:
    """Return the state in which this flow run ends at once, where a newer one is due; None where it is to go on.

    Older ones that wait are ended either way: of thirty missed runs two begin at most, and one goes on.
    """
    if runtime.deployment.id is None:
        return None
    with get_client(sync_client=True) as client:
        me = client.read_flow_run(UUID(str(runtime.flow_run.id)))
        if not me.auto_scheduled:
            return None
        newest = end_superseded(client, UUID(str(runtime.deployment.id)), than=me)
        name_upcoming(client, UUID(str(runtime.deployment.id)), str(runtime.deployment.name))
    return None if newest is None or newest.id == me.id else _state(newest)


def end_superseded(client: SyncPrefectClient, deployment_id: UUID, *, than: FlowRun | None = None) -> FlowRun | None:
    """End the due runs of a deployment that wait behind a newer one; return the newest, which may be `than`."""
    waiting = [run for run in _due(client, deployment_id) if run.auto_scheduled and (than is None or run.id != than.id)]
    if not waiting and than is None:
        return None
    newest = max((*waiting, *([] if than is None else [than])), key=_age)
    for run in waiting:
        if run.id != newest.id:
            client.set_flow_run_state(run.id, _state(newest), force=True)
    if len(waiting) > 1:
        log.warning("%d runs that were due wait no longer: %s is newer", len(waiting) - 1, newest.name)
    return newest


def _due(client: SyncPrefectClient, deployment_id: UUID) -> list[FlowRun]:
    """Return the runs of a deployment that should have begun by now, those of Prefect's scheduler and others."""
    found: list[FlowRun] = []
    while True:
        by_now = FlowRunFilterExpectedStartTime(before_=datetime.now(UTC))
        newest_first = FlowRunSort.EXPECTED_START_TIME_DESC
        page = scheduled_runs(client, deployment_id, by_now, sort=newest_first, limit=_PAGE, offset=len(found))
        found += page
        if len(page) < _PAGE:
            return found


def _age(run: FlowRun) -> tuple[datetime, str]:
    due = run.expected_start_time
    assert due is not None
    return due, str(run.id)


def _state(newest: FlowRun) -> State[Any]:
    due = newest.expected_start_time
    return Cancelled(name=SUPERSEDED, message=f"a newer run of this deployment was due at {due:%Y-%m-%d %H:%M:%S} UTC")
