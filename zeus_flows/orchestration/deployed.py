"""The flows that deployments run: `zeus-flows deploy` and `deployments/prefect.yaml` name them by their module.

They take what is pinned from their deployment, work in the folder it names, and then do what the same flows do by hand.
What is heavy is imported once it is sure that something is to be run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from prefect import flow, get_run_logger, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.responses import DeploymentResponse

from zeus_flows.core.job import Mode
from zeus_flows.job_file import parse_job
from zeus_flows.job_sections.gpu_section import SimulatedGpu
from zeus_flows.orchestration.pinned import PinnedFile, pinned_parameters
from zeus_flows.orchestration.relay import outliving_the_worker
from zeus_flows.orchestration.run_names import due_name
from zeus_flows.orchestration.slots import TAG, kept, reap
from zeus_flows.orchestration.superseding import end_superseded, superseded

if TYPE_CHECKING:
    from zeus_flows.orchestration.capriccio_flow import Summary
    from zeus_flows.recurrence.loop import Recurrence


_PAGE: Final = 200  # of deployments, the most that Prefect gives at once


def _name_of_run() -> str:
    """Return what a run is called until it has a number: its deployment and when it was due."""
    return due_name(str(runtime.deployment.name or runtime.flow_run.flow_name), runtime.flow_run.scheduled_start_time)


@flow(name="recurrence", flow_run_name=_name_of_run, validate_parameters=True)
def recurrence(
    job_file: str,
    folder: str | None = None,
    digest: str | None = None,
    tracking_uri: str | None = None,
    simulate: SimulatedGpu | None = None,
    seed: int | None = None,
    mode: Mode | None = None,
) -> Recurrence:
    """Run one recurrence of a deployed job. All but `seed` and `mode` is pinned by the deployment.

    Args:
        job_file: Path of the job file, from `folder`, on the machine that runs the flow.
        folder: Where the run works.
        digest: SHA-256 of the job file; another file is refused.
        tracking_uri: Where MLflow runs go, without credentials: those are in the worker's environment.
        simulate: Run on a simulated GPU, whatever the job file says.
        seed: The job's seed, whatever the job file says.
        mode: Change less than the job file allows; one that would change more changes nothing.
    """
    stated = {
        "job_file": job_file,
        "folder": folder,
        "digest": digest,
        "tracking_uri": tracking_uri,
        "simulate": simulate,
        "seed": seed,
        "mode": mode,
    }
    if (state := superseded()) is not None:  # Prefect keeps the state, and nothing has run
        return cast("Recurrence", state)
    counts = pinned_parameters(stated, free=("seed", "mode"))
    with outliving_the_worker(), kept(), contextlib.chdir(counts["folder"] or "."):
        file = PinnedFile(Path(counts["job_file"]), counts["digest"], f"zeus-flows deploy {counts['job_file']}")
        job = parse_job(file.read(), source=counts["job_file"]).overridden(
            simulate=counts["simulate"], seed=counts["seed"]
        )
        from zeus_flows.orchestration.recurrence_flow import ended, run_one

        return ended(run_one(job, tracking_uri=counts["tracking_uri"], mode=counts["mode"]))


@flow(name="capriccio", flow_run_name=_name_of_run, validate_parameters=True)
def capriccio(
    experiment_file: str, folder: str | None = None, digest: str | None = None, tracking_uri: str | None = None
) -> Summary:
    """Run a deployed drift experiment from where it stands. All of it is pinned by the deployment.

    Args:
        experiment_file: Path of the experiment file, from `folder`, on the machine that runs the flow.
        folder: Where the run works; the report goes there.
        digest: SHA-256 of the experiment file; another file is refused.
        tracking_uri: Where MLflow runs go, without credentials: those are in the worker's environment.
    """
    stated: dict[str, Any] = {
        "experiment_file": experiment_file,
        "folder": folder,
        "digest": digest,
        "tracking_uri": tracking_uri,
    }
    if (state := superseded()) is not None:
        return cast("Summary", state)
    counts = pinned_parameters(stated, free=())
    with outliving_the_worker(), kept(), contextlib.chdir(counts["folder"] or "."):
        path = counts["experiment_file"]
        PinnedFile(Path(path), counts["digest"], f"zeus-flows deploy {path}").read()
        from zeus_flows.orchestration.capriccio_flow import run
        from zeus_flows.orchestration.capriccio_view import Silent

        return run(path, None, counts["tracking_uri"], None, Silent())


@flow(name="janitor", flow_run_name="janitor")
def janitor() -> list[str]:
    """Close the runs of our deployments that have died, and end those that wait behind a newer one; return their names.

    An automation starts it where a run has to wait for a slot (`zeus_flows.orchestration.janitors`). It has no limit
    itself: nothing can keep it from running.
    """
    closed: list[str] = []
    with get_client(sync_client=True) as client:
        for deployment in _our_deployments(client):
            dead = reap(client, deployment)
            end_superseded(client, deployment.id)
            closed += [run.name for run in dead]
    get_run_logger().info("closed: %s", ", ".join(closed) or "nothing, all that run are alive")
    return closed


def _our_deployments(client: SyncPrefectClient) -> Iterator[DeploymentResponse]:
    ours, page = DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG])), 0
    while found := client.read_deployments(deployment_filter=ours, limit=_PAGE, offset=page * _PAGE):
        yield from found
        page += 1
