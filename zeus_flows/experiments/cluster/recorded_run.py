"""A cluster simulation in MLflow: one run with what was asked, what came out, and its files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow.entities import Metric

from zeus_flows.core.records import EnergySource
from zeus_flows.experiments.cluster.comparing import ClusterRow
from zeus_flows.experiments.cluster.request import ClusterRequest, ClusterResult
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.names import RunKind

EXPERIMENT = "cluster"


def record(
    store: Store, request: ClusterRequest, result: ClusterResult, files: Sequence[Path], context: Mapping[str, str]
) -> tuple[str, str]:
    """Write a simulation as a run; return the ids of its experiment and of the run.

    Args:
        store: MLflow.
        request: What was asked.
        result: What came out.
        files: Its artifacts.
        context: Tags, such as a link to the flow run.
    """
    experiment_id = store.experiment_id(EXPERIMENT)
    tags = {
        names.KIND: RunKind.SIMULATION,
        names.ENERGY_SOURCE: EnergySource.SIMULATED,
        names.ARRIVALS: result.source,
        **{name: value for name, value in context.items() if value},
    }
    jobs = sum(row.jobs for row in result.rows if row.policy == request.policies[0] and row.workload != "all")
    run_id = store.create_run(experiment_id, name=f"{jobs:,} jobs on {request.gpu}", tags=tags)
    params = {
        names.JOBS: str(jobs),
        names.TRAINING: request.training,
        names.SEEDS: f"{request.seeds} from {request.seed}",
        names.ETA: f"{request.eta:g}",
        names.BETA: f"{request.beta:g}",
    }
    store.log(run_id, params=params, metrics=_metrics(result.rows))
    for file in files:
        store.client.log_artifact(run_id, str(file))
    store.end(run_id)
    return experiment_id, run_id


def _metrics(rows: Sequence[ClusterRow]) -> list[Metric]:
    now_ms = int(time.time() * 1000)
    values = {
        names.over_default(of, row.workload, row.policy): share.value
        for row in rows
        for of, share in (("energy", row.energy), ("time", row.time), ("cost", row.cost))
    }
    return [Metric(name, value, now_ms, 0) for name, value in values.items()]
