"""Makes Prefect's deployments what the files say: what is there, what is wanted, and the difference.

What is not stated stays as it is: a deployment that somebody has paused is not let go by deploying it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import Flow
from prefect.settings import get_current_settings
from prefect.utilities.callables import parameter_schema

from zeus_flows import __version__
from zeus_flows.errors import ConfigError
from zeus_flows.masking import without_secrets
from zeus_flows.orchestration import deployed
from zeus_flows.orchestration.deployable import Deployable
from zeus_flows.orchestration.pools import DEFAULT_POOL
from zeus_flows.orchestration.run_names import UPCOMING, name_upcoming

#: Seconds that Prefect leaves a run to start, and keeps the slot of one that has died. The least that it takes.
GRACE_S: Final = 60
_DIGITS: Final = 12  # of a digest, where people read it


@dataclass(frozen=True, slots=True)
class DeploymentWishes:
    """What was asked of all deployments; None: as it is.

    Attributes:
        cron: When to run.
        timezone: Whose clock `cron` is by.
        pool: The work pool.
        paused: Whether schedules rest.
        grace_s: Seconds that a run may take to start.
        served: Whether a process of ours runs them, and no worker.
    """

    cron: str | None = None
    timezone: str = "UTC"
    pool: str | None = None
    paused: bool | None = None
    grace_s: int = GRACE_S
    served: bool = False


@dataclass(frozen=True, slots=True)
class DeploymentChange:
    """What is to be done about a deployment.

    Attributes:
        deployable: The file it comes from.
        wanted: The deployment as it should be.
        found: As it is; None where there is none.
        there: Its id; None where there is none.
    """

    deployable: Deployable
    wanted: Mapping[str, Any]
    found: Mapping[str, Any] | None = None
    there: UUID | None = None

    @property
    def kind(self) -> str:
        """`create`, `update` or `unchanged`."""
        return "create" if self.found is None else "update" if self.differences else "unchanged"

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """What is and what should be, by name; parameters each by its own."""
        before, after = _flat(self.found or {}), _flat(self.wanted)
        names = [
            name for name in (*after, *(n for n in before if n not in after)) if before.get(name) != after.get(name)
        ]
        if any(
            name in self.wanted["parameters"] for name in names
        ):  # then the schema that pins them goes without saying
            names = [name for name in names if name != "parameter schema"]
        return {name: (before.get(name), after.get(name)) for name in names}


@contextmanager
def prefect_api() -> Iterator[SyncPrefectClient]:
    """Talk to the configured Prefect API; what goes wrong with it is told with what to type.

    Raises:
        ConfigError: none is configured, it does not answer, or it refuses.
    """
    url = get_current_settings().api.url
    if url is None:
        raise ConfigError(
            "no Prefect API is configured, and an embedded one ends with the command: schedules need a server\n"
            "  type `prefect server start` in another terminal, then\n"
            "  `prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api`, then this command again"
        )
    shown = without_secrets(str(url))
    try:
        with get_client(sync_client=True) as client:
            yield client
    except PrefectHTTPStatusError as error:
        raise ConfigError(f"Prefect at {shown} refused: {_detail(error)}") from None
    except httpx.HTTPError as error:
        raise ConfigError(
            f"Prefect at {shown} does not answer ({type(error).__name__})\n"
            "  start it, or correct PREFECT_API_URL: `prefect config view` shows where it is set"
        ) from None


def plan(client: SyncPrefectClient, deployable: Deployable, asked: DeploymentWishes) -> DeploymentChange:
    """Return what is to be done so that a file's deployment is as it says."""
    try:
        found = client.read_deployment_by_name(deployable.full_name)
    except ObjectNotFound:
        return DeploymentChange(deployable, _wanted(deployable, asked, {}))
    before = _as_found(found)
    return DeploymentChange(deployable, _wanted(deployable, asked, before), before, found.id)


def apply(client: SyncPrefectClient, change: DeploymentChange) -> UUID:
    """Make a deployment what it should be; return its id. One that is so already is left alone."""
    if change.there is not None and change.kind == "unchanged":
        return change.there
    wanted = change.wanted
    schedule = wanted["schedule"]
    made = client.create_deployment(
        flow_id=client.create_flow_from_name(change.deployable.flow),
        name=change.deployable.name,
        version=wanted["version"],
        description=wanted["description"],
        tags=wanted["tags"],
        entrypoint=wanted["entrypoint"],
        pull_steps=[],
        parameters=wanted["parameters"],
        parameter_openapi_schema=wanted["parameter schema"],
        enforce_parameter_schema=True,
        schedules=[] if schedule is None else [DeploymentScheduleCreate(schedule=CronSchedule(**schedule))],
        paused=wanted["paused"],
        work_pool_name=wanted["work pool"],
        concurrency_limit=wanted["limit"],
        concurrency_options=_concurrency(wanted),
        job_variables={},
    )
    if schedule is not None and not wanted["paused"]:
        client.request("POST", "/deployments/{id}/schedule", path_params={"id": made}, json={"min_runs": UPCOMING})
        name_upcoming(client, made, change.deployable.name)
    return made


def _wanted(deployable: Deployable, asked: DeploymentWishes, before: Mapping[str, Any]) -> dict[str, Any]:
    cron = None if asked.cron is None else {"cron": asked.cron, "timezone": asked.timezone, "day_or": True}
    flow: Flow[..., Any] = getattr(deployed, deployable.flow)
    return {
        "parameters": deployable.parameters,
        "schedule": cron or before.get("schedule"),
        "work pool": None if asked.served else asked.pool or before.get("work pool") or DEFAULT_POOL,
        "paused": before.get("paused", False) if asked.paused is None else asked.paused,
        "tags": list(deployable.tags),
        "description": deployable.about,
        "entrypoint": f"{deployed.__name__}.{deployable.flow}",
        "version": __version__,
        "limit": deployable.limit,
        "grace period": None if deployable.limit is None else asked.grace_s,
        "collisions": None if deployable.limit is None else ConcurrencyLimitStrategy.ENQUEUE.value,
        "parameter schema": pinned_schema(flow, deployable),
        "schema is enforced": True,
        "job variables": {},
        "pull steps": [],
    }


def _concurrency(wanted: Mapping[str, Any]) -> ConcurrencyOptions | None:
    if wanted["limit"] is None:
        return None
    strategy = ConcurrencyLimitStrategy(wanted["collisions"])
    return ConcurrencyOptions(collision_strategy=strategy, grace_period_seconds=wanted["grace period"])


def _as_found(found: DeploymentResponse) -> dict[str, Any]:
    """Return a deployment as it is, in the words of `_wanted`; several schedules are none that we would make."""
    options, limit = found.concurrency_options, found.global_concurrency_limit
    schedules = [_schedule(s.schedule.model_dump(mode="json")) for s in found.schedules if s.active or found.paused]
    return {
        "parameters": dict(found.parameters),
        "schedule": None if not schedules else schedules[0] if len(schedules) == 1 else {"cron": "several"},
        "work pool": found.work_pool_name,
        "paused": found.paused,
        "tags": list(found.tags),
        "description": found.description,
        "entrypoint": found.entrypoint,
        "version": found.version,
        "limit": None if limit is None else limit.limit,
        "grace period": None if options is None else options.grace_period_seconds,
        "collisions": None if options is None else options.collision_strategy.value,
        "parameter schema": found.parameter_openapi_schema,
        "schema is enforced": found.enforce_parameter_schema,
        "job variables": dict(found.job_variables or {}),
        "pull steps": list(found.pull_steps or []),
    }


def _schedule(dumped: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dumped.get(name) for name in ("cron", "timezone", "day_or")} if "cron" in dumped else dict(dumped)


def pinned_schema(flow: Flow[..., Any], deployable: Deployable) -> dict[str, Any]:
    """Return what the server checks a caller's parameters against: each pinned one can have its own value only."""
    schema = parameter_schema(flow).model_dump(exclude_unset=True)
    properties = {
        name: about
        if name in deployable.free
        else {"title": about["title"], "position": about["position"], "enum": [value]}
        for name, about in schema["properties"].items()
        for value in [deployable.parameters.get(name)]
        if name in deployable.free or name in deployable.parameters
    }
    return {
        "title": "Parameters",
        "type": "object",
        "properties": properties,
        "required": [],
        "definitions": schema.get("definitions", {}),
        "additionalProperties": False,
    }


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with each parameter by its own name."""
    rest = {name: value for name, value in state.items() if name != "parameters"}
    return dict(state.get("parameters", {})) | rest


def _detail(error: PrefectHTTPStatusError) -> str:
    """Return what the API says of a request that it refused."""
    try:
        return str(error.response.json()["detail"])
    except (ValueError, LookupError, TypeError):
        return f"status {error.response.status_code}"


def shown(name: str, value: Any) -> str:
    """Return one side of a difference as people read it.

    >>> shown("schedule", {"cron": "0 2 * * *", "timezone": "UTC"}), shown("digest", "0123456789abcdef" * 4)
    ('0 2 * * * UTC', '0123456789ab')
    """
    match name, value:
        case _, None:
            return "none"
        case "digest", str():
            return value[:_DIGITS]
        case "schedule", dict():
            return " ".join(str(value[key]) for key in ("cron", "timezone") if value.get(key))
        case "parameter schema", _:
            return "other" if value else "none"
        case _, list():
            return " ".join(map(str, value)) or "none"
        case _:
            return str(value)
