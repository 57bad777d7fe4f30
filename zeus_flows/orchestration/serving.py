"""Deployments that a process of ours runs, for people without workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from prefect import serve
from prefect.client.orchestration import SyncPrefectClient
from prefect.deployments.runner import RunnerDeployment

from zeus_flows.errors import ConfigError
from zeus_flows.orchestration.deployments import DeploymentChange
from zeus_flows.orchestration.slots import reap
from zeus_flows.orchestration.superseding import end_superseded


class Served(RunnerDeployment):
    """A deployment as Prefect's runner takes one; it is there already."""

    there: UUID

    async def aapply(self, *_args: Any, **_kwargs: Any) -> UUID:
        """Return its id: there is nothing to make."""
        return self.there


def refuse_pools(changes: Sequence[DeploymentChange]) -> None:
    """Raise where a worker runs a deployment already: both would."""
    for change in changes:
        pool = (change.found or {}).get("work pool")
        if pool:
            name = change.deployable.full_name
            raise ConfigError(
                f"{name} is deployed to the work pool {pool}, whose workers run it\n"
                f"  type `prefect worker start --pool {pool} --limit 1`, or "
                f"`prefect deployment delete {name}` and this again"
            )


def tidy(client: SyncPrefectClient, ids: Sequence[UUID]) -> None:
    """Close what an earlier process left: nobody else looks after what has no pool."""
    for deployment_id in ids:
        reap(client, client.read_deployment(deployment_id))
        end_superseded(client, deployment_id)


def serve_deployments(changes: Sequence[DeploymentChange], ids: Sequence[UUID]) -> None:
    """Run what is due, each in a process of its own, until told to stop; schedules rest from then on."""
    served = [
        Served(name=change.deployable.name, flow_name=change.deployable.flow, there=there)
        for change, there in zip(changes, ids, strict=True)
    ]
    serve(*served, print_starting_message=False)
