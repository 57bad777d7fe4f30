"""What flow runs are called until they have a number: their deployment, and when they are due."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilterExpectedStartTime
from prefect.client.schemas.sorting import FlowRunSort

from zeus_flows.orchestration.next_runs import scheduled_runs

#: So many runs to come are named; Prefect's scheduler makes three at least.
UPCOMING: Final = 3


def due_name(deployment: str, due: datetime) -> str:
    """Return the name of a run that has not begun.

    >>> due_name("nightly-ranker", datetime(2026, 11, 19, 2, tzinfo=UTC))
    'nightly-ranker 2026-11-19 02:00'
    """
    return f"{deployment} {due.astimezone(UTC):%Y-%m-%d %H:%M}"


def name_upcoming(client: SyncPrefectClient, deployment_id: UUID, deployment: str) -> None:
    """Name the next runs that Prefect has scheduled: it gives them names of chance."""
    later = FlowRunFilterExpectedStartTime(after_=datetime.now(UTC))
    upcoming = scheduled_runs(client, deployment_id, later, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=UPCOMING)
    for run in upcoming:
        assert run.expected_start_time is not None
        name = due_name(deployment, run.expected_start_time)
        if run.auto_scheduled and run.name != name:
            client.update_flow_run(run.id, name=name)
