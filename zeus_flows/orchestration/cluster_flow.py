"""A cluster simulation as a Prefect flow: shared out on a task runner, written to MLflow."""

from __future__ import annotations

import tempfile
from pathlib import Path

from prefect import flow, runtime
from prefect.artifacts import create_link_artifact, create_table_artifact

from zeus_flows.experiments.cluster.recorded_run import record
from zeus_flows.experiments.cluster.request import ClusterRequest, ClusterResult, answer, write_files
from zeus_flows.experiments.fan_out import FanOut
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.masking import mask_logs
from zeus_flows.orchestration.fan_out import shared_out
from zeus_flows.orchestration.prefect_runs import page_of
from zeus_flows.reporting.links import run_url
from zeus_flows.settings import public_uri, read_settings


def run_cluster(
    request: ClusterRequest,
    *,
    runner: str | None,
    tracked: bool,
    in_turn: FanOut,
    tracking_uri: str | None = None,
) -> ClusterResult:
    """Simulate inside of a flow run.

    Args:
        request: What is asked.
        runner: Prefect task runner that the groups are shared out on; None: one after the other.
        tracked: Whether it is written to MLflow.
        in_turn: Does one after the other, and may tell how far it is.
        tracking_uri: Where MLflow is, before MLFLOW_TRACKING_URI.
    """

    @flow(name="cluster")
    def cluster() -> ClusterResult:
        mask_logs()
        result = answer(request, in_turn if runner is None else shared_out(runner))
        create_table_artifact(
            key="cluster",
            table=[
                {"workload": r.workload, "policy": r.policy, "jobs": r.jobs}
                | {"energy over default": round(r.energy.value, 3), "time over default": round(r.time.value, 3)}
                for r in result.rows
            ],
            description=f"Simulated. {result.source}",
        )
        if tracked:
            _track(request, result, tracking_uri)
        return result

    return cluster()


def _track(request: ClusterRequest, result: ClusterResult, tracking_uri: str | None) -> None:
    """Write the simulation to MLflow, and a link to it to Prefect."""
    uri = read_settings().tracking(public_uri(tracking_uri, "--tracking-uri"))
    context = {
        names.PREFECT_FLOW_RUN_ID: str(runtime.flow_run.id),
        names.PREFECT_FLOW_RUN_NAME: str(runtime.flow_run.name),
        names.PREFECT_URL: page_of(runtime.flow_run.ui_url),
    }
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(request, result, Path(folder))
        experiment_id, run_id = record(Store(uri, patience_s=10.0), request, result, files, context)
    link = run_url(uri, experiment_id).format(run_id=run_id)
    create_link_artifact(key="cluster-mlflow-run", link=link, link_text="the simulation in MLflow")
