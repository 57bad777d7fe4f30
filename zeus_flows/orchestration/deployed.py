"""The flows that deployments run: `zeus-flows deploy` and `deployments/prefect.yaml` name them by their module.

They take what is pinned from their deployment, work in the folder it names, and then do what the same flows do by hand.
What is heavy is imported once it is sure that something is to be run.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import flow, runtime

from zeus_flows.core.job import Mode
from zeus_flows.job_file import SimulatedGpu, parse_job
from zeus_flows.orchestration.pinned import PinnedFile, pinned_parameters, with_credentials
from zeus_flows.settings import read_settings

if TYPE_CHECKING:
    from zeus_flows.orchestration.capriccio_flow import Summary
    from zeus_flows.recurrence.loop import Recurrence


def _name_of_run() -> str:
    """Return what a run is called until it has a number: its deployment and when it was due."""
    due = runtime.flow_run.scheduled_start_time
    return f"{runtime.deployment.name or runtime.flow_run.flow_name} {due:%Y-%m-%d %H:%M}"


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
    counts = pinned_parameters(stated, free=("seed", "mode"))
    with contextlib.chdir(counts["folder"] or "."):
        file = PinnedFile(Path(counts["job_file"]), counts["digest"], f"zeus-flows deploy {counts['job_file']}")
        job = parse_job(file.read(), source=counts["job_file"]).overridden(
            simulate=counts["simulate"], seed=counts["seed"]
        )
        from zeus_flows.orchestration.recurrence_flow import ended, run_one

        uri = with_credentials(counts["tracking_uri"], read_settings())
        return ended(run_one(job, tracking_uri=uri, mode=counts["mode"]))


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
    counts = pinned_parameters(stated, free=())
    with contextlib.chdir(counts["folder"] or "."):
        path = counts["experiment_file"]
        PinnedFile(Path(path), counts["digest"], f"zeus-flows deploy {path}").read()
        from zeus_flows.orchestration.capriccio_flow import run
        from zeus_flows.orchestration.capriccio_view import Silent

        return run(path, None, with_credentials(counts["tracking_uri"], read_settings()), None, Silent())
