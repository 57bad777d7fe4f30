"""When the jobs of a fleet run next, as far as Prefect knows. No server is started to ask it."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Final
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import PrefectException
from prefect.settings import get_current_settings

from zeus_flows.orchestration.slots import TAG

log = logging.getLogger(__name__)

_OF_JOB: Final = "job:"
_PAGE, _PAGES = 200, 20
_NOT_BEGUN: Final = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]))


def scheduled_runs(
    client: SyncPrefectClient,
    deployment_id: UUID,
    when: FlowRunFilterExpectedStartTime,
    *,
    sort: FlowRunSort,
    limit: int,
    offset: int = 0,
) -> list[FlowRun]:
    """Return runs of a deployment that have not begun and are due by then, or after that."""
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id])),
        flow_run_filter=FlowRunFilter(state=_NOT_BEGUN, expected_start_time=when),
        sort=sort,
        limit=limit,
        offset=offset,
    )


def next_runs() -> dict[str, datetime] | None:
    """Return when each job that has a deployment runs next; None where no Prefect server is named, or it is away."""
    if get_current_settings().api.url is None:
        return None
    try:
        with get_client(sync_client=True) as client:
            return _scheduled(client)
    except (httpx.HTTPError, PrefectException, OSError, RuntimeError) as error:
        log.warning("Prefect does not say when jobs run next: %s", type(error).__name__)
        return None


def _scheduled(client: SyncPrefectClient) -> dict[str, datetime]:
    found = dict[str, datetime]()
    due = FlowRunFilter(tags=FlowRunFilterTags(all_=[TAG]), state=_NOT_BEGUN)
    for page in range(_PAGES):
        runs = client.read_flow_runs(
            flow_run_filter=due, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=_PAGE, offset=page * _PAGE
        )
        for run in runs:
            for tag in run.tags:
                if tag.startswith(_OF_JOB) and run.expected_start_time is not None:
                    found.setdefault(tag.removeprefix(_OF_JOB), run.expected_start_time)
        if len(runs) < _PAGE:
            break
    return found
