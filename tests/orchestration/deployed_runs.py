"""Runs of deployments in this process: what a worker's child does, without the worker."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from click.testing import CliRunner, Result
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow_sync
from prefect.states import Pending

from zeus_flows.cli import main
from zeus_flows.orchestration import deployed


def zeus_flows(*words: str | Path) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(main, [str(word) for word in words])


def read_deployment(full_name: str) -> DeploymentResponse:
    with get_client(sync_client=True) as client:
        return client.read_deployment_by_name(full_name)


def ours(folder: Path) -> list[DeploymentResponse]:
    """Return the deployments that work in a folder; others may belong to tests that run meanwhile."""
    with get_client(sync_client=True) as client:
        return [found for found in client.read_deployments() if found.parameters.get("folder") == str(folder)]


def remove(folder: Path) -> None:
    """Remove what was deployed from a folder, the janitors of its pools included."""
    with get_client(sync_client=True) as client:
        for found in ours(folder):
            client.delete_deployment(found.id)
            with suppress(ObjectNotFound):
                client.delete_deployment(client.read_deployment_by_name(f"janitor/{found.work_pool_name}").id)


def start(full_name: str, **request: Any) -> FlowRun:
    """Ask the API for a run of a deployment, with a body of the caller's choice."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(full_name)
        made = client.request("POST", f"/deployments/{deployment.id}/create_flow_run", json=request)  # type: ignore[arg-type]
        return FlowRun.model_validate(made.json())


def read_run(run_id: UUID) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(run_id)


def run_here(run: FlowRun, flow: str = "recurrence") -> State[Any]:
    """Run a flow run as a worker's child would; return the state that it ends in."""
    with get_client(sync_client=True) as client:
        accepted: State[Any] | None = client.set_flow_run_state(run.id, Pending()).state
        assert accepted is not None
        if not accepted.is_pending():
            return accepted
        run = client.read_flow_run(run.id)
    ended = run_flow_sync(getattr(deployed, flow), flow_run=run, parameters=run.parameters, return_type="state")
    assert isinstance(ended, State)
    return ended
