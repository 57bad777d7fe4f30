"""What of a training reaches Prefect and MLflow: why it ended, tracebacks, and retries from a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from tests.training_functions import write_job
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.ledger.mlflow.record_text import load_observation
from zeus_flows.orchestration.recurrence_flow import recurrence

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.xdist_group("prefect")]


def attempts(uri: str) -> list[tuple[Run, Observation]]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("nightly")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'", order_by=["start_time ASC"])
    return [(run, load_observation(run.data.params["zf.observation"])) for run in found]


def job(folder: Path, function: str, **parameters: Any) -> str:
    train = {"function": f"tests.training_functions:{function}", "parameters": parameters}
    return str(write_job(folder / "job.yaml", train=train))


def test_a_training_task_that_broke_is_retried_from_its_checkpoint_in_the_same_attempt(
    tmp_path: Path, sqlite_uri: str
) -> None:
    done = recurrence(job(tmp_path, "fragile", breaks_in=[3, 5]), tracking_uri=sqlite_uri)
    assert done.converged
    ((run, observed),) = attempts(sqlite_uri)
    assert (observed.outcome, observed.epochs) == (Outcome.CONVERGED, 6)
    client = MlflowClient(tracking_uri=sqlite_uri)
    for name in ("metric", "energy_j", "time_s"):
        points = client.get_metric_history(run.info.run_id, f"zf.epoch/{name}")
        assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
        assert [point.value for point in points] == sorted(point.value for point in points)
    flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[run.data.tags["zf.prefect.flow_run_id"]]))
    with get_client(sync_client=True) as prefect:
        (trained,) = [t for t in prefect.read_task_runs(flow_run_filter=flow_run) if t.name.startswith("train")]
    assert trained.run_count == 3


def test_a_traceback_reaches_mlflow_and_the_exception_prefect(tmp_path: Path, sqlite_uri: str) -> None:
    with pytest.raises(ZeroDivisionError, match="the user's bug"):
        recurrence(job(tmp_path, "crash"), tracking_uri=sqlite_uri)
    ((run, observed),) = attempts(sqlite_uri)
    assert run.info.status == "FAILED"
    assert observed.outcome is Outcome.FAILED
    assert 'training_functions.py", line' in observed.traceback
    assert observed.traceback.endswith("ZeroDivisionError: the user's bug")
    flow_run_id = run.data.tags["zf.prefect.flow_run_id"]
    with get_client(sync_client=True) as prefect:
        state = prefect.read_flow_run(UUID(flow_run_id)).state
        tasks = prefect.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
    assert state is not None
    assert "ZeroDivisionError: the user's bug" in str(state.message)
    (trained,) = [t for t in tasks if t.name.startswith("train")]
    assert trained.state is not None
    assert trained.state.is_failed()
    assert "ZeroDivisionError: the user's bug" in str(trained.state.message)
    assert trained.run_count == 1


def test_why_an_attempt_ended_is_said_in_the_log_in_mlflow_and_in_prefect(
    tmp_path: Path, sqlite_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("prefect.task_runs", "zeus_flows"):
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        with caplog.at_level(logging.INFO):
            recurrence(job(tmp_path, "hungry", fits=64), tracking_uri=sqlite_uri)
    finally:
        for name in ("prefect.task_runs", "zeus_flows"):
            logging.getLogger(name).setLevel(logging.NOTSET)
    (first, _), (second, _) = attempts(sqlite_uri)
    assert first.data.tags["zf.detail"] == "batch size 128 does not fit Simulated V100 x1"
    assert second.data.tags["zf.outcome"] == "converged"
    for name in ("prefect.task_runs", "zeus_flows.training.session"):
        said = [record.getMessage() for record in caplog.records if record.name == name]
        assert any("batch size 128 does not fit" in text for text in said)
        assert any(second.data.tags["zf.detail"] in text for text in said)
