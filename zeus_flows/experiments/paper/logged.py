"""A figure as an MLflow run: its table and pictures as artifacts, its claims as description and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlflow.entities import Metric

from zeus_flows.experiments.paper.result import Result
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.names import RunKind

EXPERIMENT = "zeus-paper-figures"
_NOTE = "mlflow.note.content"


def log_figure(
    store: Store, title: str, result: Result, files: Sequence[Path], *, settings: dict[str, str], compared: bool
) -> tuple[str, str]:
    """Log one figure as a run of its own, every time anew; return the experiment's id and the run's.

    Args:
        store: MLflow.
        title: What the run is called.
        result: Table and claims.
        files: What is kept as artifacts.
        settings: What it was computed with, as params.
        compared: Whether the claims may be held against the published ones: models of workloads may not.
    """
    experiment_id = store.experiment_id(EXPERIMENT)
    tags = {names.KIND: RunKind.FIGURE, _NOTE: _described(result, compared=compared)}
    run_id = store.create_run(experiment_id, name=title, tags=tags)
    met = sum(claim.met for claim in result.claims)
    counts = {names.CLAIMS_MET: met, names.CLAIMS_MISSED: len(result.claims) - met} if compared else {}
    store.log(run_id, params=settings, metrics=[Metric(name, value, 0, 0) for name, value in counts.items()])
    for file in files:
        store.client.log_artifact(run_id, str(file))
    store.end(run_id)
    return experiment_id, run_id


def _described(result: Result, *, compared: bool) -> str:
    """Return the claims as a table in Markdown."""
    if not compared:
        return "Computed from built-in models on a simulated GPU: not compared with what was published."
    head = ["| claim | published | here | tolerance | |", "| --- | --- | --- | --- | --- |"]
    verdicts = {True: "met", False: "**not met**"}
    rows = [f"| {c.what} | {c.published} | {c.ours} | {c.tolerance} | {verdicts[c.met]} |" for c in result.claims]
    return "\n".join([*head, *rows])
