"""The work pool that our deployments run in: process workers, and nothing that a caller may replace.

Prefect's own template of a process pool lets whoever may start a run state another command, environment or folder for
it (`job_variables`). Ours has no such variables. It must not have an `env` of its own either: Prefect would merge a
caller's into it, variable or not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound

from zeus_flows.errors import ConfigError

#: Of a pool that `deploy` makes where none is named.
DEFAULT_POOL: Final = "gpu"


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What is to be done about a work pool.

    Attributes:
        name: Which.
        change: `create`, `lock`, or `unchanged`.
        open_to_callers: What a caller of a run may replace as the pool is now.
        type: Of its workers.
    """

    name: str
    change: str
    open_to_callers: tuple[str, ...] = ()
    type: str = "process"

    @property
    def worker_command(self) -> str:
        """What starts a worker: a process worker without a limit would train all that is due at once."""
        return f"prefect worker start --pool {self.name}" + (" --limit 1" if self.type == "process" else "")


def process_template() -> dict[str, Any]:
    """Return the base job template of a process pool in which callers can replace nothing."""
    text = files("zeus_flows").joinpath("templates/process-pool.json").read_text(encoding="utf-8")
    template: dict[str, Any] = json.loads(text)
    return template


def plan_pool(client: SyncPrefectClient, name: str, *, lock: bool) -> PoolChange:
    """Return what is to be done about a pool; one of another kind is its owner's to lock."""
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        return PoolChange(name, "create")
    exposed = open_variables(pool.base_job_template)
    if lock and exposed and pool.type != "process":
        raise ConfigError(f"--lock-pool is for process pools, and {name} is of the type {pool.type}")
    return PoolChange(name, "lock" if lock and exposed else "unchanged", exposed, pool.type)


def apply_pool(client: SyncPrefectClient, change: PoolChange) -> None:
    """Make or lock a pool."""
    if change.change == "create":
        about = "Recurring training by zeus_flows; callers of runs can replace neither command, environment nor folder."
        template = process_template()
        client.create_work_pool(
            WorkPoolCreate(name=change.name, type="process", base_job_template=template, description=about)
        )
    elif change.change == "lock":
        client.update_work_pool(change.name, WorkPoolUpdate(base_job_template=process_template()))


def open_variables(template: dict[str, Any]) -> tuple[str, ...]:
    """Return what a template lets a caller of a run replace.

    >>> open_variables({"variables": {"properties": {"env": {}, "command": {}}}}), open_variables(process_template())
    (('command', 'env'), ())
    """
    stated = set(template.get("variables", {}).get("properties", {}))
    if isinstance(template.get("job_configuration", {}).get("env"), dict):
        stated.add("env")
    return tuple(sorted(stated))
