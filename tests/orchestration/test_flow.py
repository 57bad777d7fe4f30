"""The flow against real Prefect and real MLflow."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterId
from prefect.states import Running
from prefect.variables import Variable

from tests.builders import decision
from tests.training_functions import write_job
from zeus_flows.core.job import Mode
from zeus_flows.core.records import EnergySource, Outcome
from zeus_flows.job_file import load_job
from zeus_flows.ledger.lease import this_process
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.record_text import load_decision, load_observation
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.orchestration import events, recurrence_flow
from zeus_flows.orchestration.recurrence_flow import RecurrenceFailed, recurrence

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.xdist_group("prefect")]


def runs(uri: str, kind: str) -> list[dict[str, Any]]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("nightly")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], f"tags.`zf.kind` = '{kind}'", order_by=["start_time ASC"])
    return [run.to_dictionary() for run in found]


def test_a_recurrence_leaves_a_decision_an_observation_and_the_series(tmp_path: Path, sqlite_uri: str) -> None:
    job = write_job(tmp_path / "job.yaml")
    for number in (1, 2, 3):
        assert recurrence(str(job), tracking_uri=sqlite_uri).number == number
    attempts = runs(sqlite_uri, "attempt")
    assert len(attempts) >= 3
    for run in attempts:
        data = run["data"]
        decision = load_decision(data["params"]["zf.decision"])
        observation = load_observation(data["params"]["zf.observation"])
        assert data["params"]["zf.batch_size"] == str(decision.batch_size) == str(observation.batch_size)
        assert data["tags"]["zf.energy_source"] == "simulated"
        assert data["tags"]["zf.reason"] == decision.reason.text != ""
        assert data["tags"]["zf.gpu"] == "Simulated V100 x1"
        assert data["metrics"]["zf.energy_to_accuracy_j"] == pytest.approx(
            observation.energy_j, rel=1e-4
        )  # five digits
        assert run["info"]["status"] == "FINISHED"
    (window,) = runs(sqlite_uri, "drift-window")
    client = MlflowClient(tracking_uri=sqlite_uri)
    for name in ("cost_j", "energy_to_accuracy_j", "time_to_accuracy_s", "batch_size", "power_limit_w"):
        series = client.get_metric_history(str(window["info"]["run_id"]), f"zf.{name}")
        assert [point.step for point in series] == [1, 2, 3]
    assert {run["data"]["tags"]["zf.drift_window"] for run in attempts} == {window["info"]["run_id"]}


def test_per_epoch_energy_time_and_metric_are_logged_at_the_epoch(tmp_path: Path, sqlite_uri: str) -> None:
    recurrence(str(write_job(tmp_path / "job.yaml")), tracking_uri=sqlite_uri)
    (run,) = runs(sqlite_uri, "attempt")
    observation = load_observation(run["data"]["params"]["zf.observation"])
    client = MlflowClient(tracking_uri=sqlite_uri)
    for name in ("metric", "energy_j", "time_s", "power_limit_w"):
        points = client.get_metric_history(str(run["info"]["run_id"]), f"zf.epoch/{name}")
        assert [point.step for point in points] == list(range(1, observation.epochs + 1))


def test_the_flow_run_has_tasks_artifacts_and_is_linked_from_mlflow(tmp_path: Path, sqlite_uri: str) -> None:
    recurrence(str(write_job(tmp_path / "job.yaml")), tracking_uri=sqlite_uri)
    (run,) = runs(sqlite_uri, "attempt")
    flow_run_id = run["data"]["tags"]["zf.prefect.flow_run_id"]
    with get_client(sync_client=True) as client:
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))
        assert sorted(task.name.split("-")[0] for task in tasks) == ["decide", "observe", "train"]
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        )
    assert {artifact.key: artifact.type for artifact in found} == {
        "nightly-decision": "table",
        "nightly-mlflow-run": "markdown",
        "nightly-profile": "markdown",
    }
    assert any(str(run["info"]["run_id"]) in str(artifact.data) for artifact in found)


def test_a_recurrence_in_which_nothing_converges_fails_its_flow_run(tmp_path: Path, sqlite_uri: str) -> None:
    job = write_job(tmp_path / "job.yaml", "never", max_epochs=2, max_attempts=2)
    with pytest.raises(RecurrenceFailed, match="the target was not reached") as caught:
        recurrence(str(job), tracking_uri=sqlite_uri)
    assert len(caught.value.recurrence.attempts) == 2
    assert len(runs(sqlite_uri, "attempt")) == 2


def test_a_crash_in_the_train_function_fails_the_flow_and_the_run_and_blames_no_arm(
    tmp_path: Path, sqlite_uri: str
) -> None:
    with pytest.raises(ZeroDivisionError, match="the user's bug"):
        recurrence(str(write_job(tmp_path / "job.yaml", "crash")), tracking_uri=sqlite_uri)
    (run,) = runs(sqlite_uri, "attempt")
    assert str(run["info"]["status"]) == "FAILED"
    assert run["data"]["tags"]["zf.detail"] == "ZeroDivisionError: the user's bug"
    assert load_observation(run["data"]["params"]["zf.observation"]).outcome is Outcome.FAILED


def test_a_changed_version_opens_the_next_drift_window(tmp_path: Path, sqlite_uri: str) -> None:
    recurrence(str(write_job(tmp_path / "job.yaml")), tracking_uri=sqlite_uri)
    recurrence(str(write_job(tmp_path / "job.yaml", version="2")), tracking_uri=sqlite_uri)
    first, second = runs(sqlite_uri, "drift-window")
    assert first["data"]["params"]["zf.next_window"] == second["info"]["run_id"]
    assert second["data"]["params"]["zf.opened_by"] == "fingerprint"
    assert [run["data"]["tags"]["zf.drift_window"] for run in runs(sqlite_uri, "attempt")] == [
        first["info"]["run_id"],
        second["info"]["run_id"],
    ]


def test_one_variable_rolls_a_fleet_back_and_neither_it_nor_a_caller_raises_a_mode(
    tmp_path: Path, sqlite_uri: str
) -> None:
    stages = {"observe": 1, "power": 2}
    job = str(write_job(tmp_path / "job.yaml", mode="power", rollout=stages))
    tries: tuple[tuple[str, Mode | None, str, str], ...] = (
        ("full", Mode.FULL, "observe", "its roll-out, up to recurrence 1"),
        ("full", None, "power", "as its job file says"),
        ("of", None, "power", "as its job file says"),  # no mode: a typing error stops nothing
        ("observe", None, "observe", "by the Prefect variable zeus_flows_mode"),
        ("off", Mode.OBSERVE, "off", "by the Prefect variable zeus_flows_mode"),
        ("power", Mode.OBSERVE, "observe", "by the parameter mode"),
    )
    try:
        for stated, asked, mode, why in tries:
            Variable.set("zeus_flows_mode", stated, overwrite=True)
            recurrence(job, tracking_uri=sqlite_uri, mode=asked)
            tags = runs(sqlite_uri, "attempt")[-1]["data"]["tags"]
            assert tags["zf.mode"] == mode
            assert f"the mode is {mode}" in tags["zf.reason"]
            assert why in tags["zf.reason"]
    finally:
        Variable.unset("zeus_flows_mode")


def test_a_recurrence_that_would_be_late_is_tagged_and_alerts(
    tmp_path: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[tuple[str, dict[str, Any]]]()
    monkeypatch.setattr(events, "emit_event", lambda *, event, resource, payload: told.append((event, payload)))
    job = str(write_job(tmp_path / "job.yaml", mode="power"))
    recurrence(job, tracking_uri=sqlite_uri)
    assert [event for event, _ in told] == ["zeus-flows.decided"]
    monkeypatch.setattr(recurrence_flow, "_seconds_until", lambda due: -60.0)
    write_job(tmp_path / "job.yaml", mode="power", ready_by="06:00 UTC")
    recurrence(job, tracking_uri=sqlite_uri)
    first, second = (run["data"]["tags"] for run in runs(sqlite_uri, "attempt"))
    assert ("zf.late" in first, second["zf.late"]) == (False, "true")
    assert "it must be ready by 06:00 UTC, which is over since 60 s" in second["zf.reason"]
    assert [event for event, _ in told[1:]] == ["zeus-flows.decided", "zeus-flows.late", "zeus-flows.late"]
    assert {(p["job"], p["recurrence"], p["seconds_left"]) for e, p in told if "late" in e} == {("nightly", 2, -60.0)}


def test_what_a_killed_process_left_is_closed_in_mlflow_and_in_prefect_by_the_next_recurrence(
    tmp_path: Path, sqlite_uri: str
) -> None:
    path = write_job(tmp_path / "job.yaml")
    with get_client(sync_client=True) as client:
        killed = client.create_flow_run(recurrence, parameters={"job_file": str(path)}, state=Running())
    dead = subprocess.Popen(["true"])
    dead.wait()
    holder = replace(this_process(flow_run_id=str(killed.id)), pid=dead.pid, started=1)
    job = load_job(path).core()
    ledger = MlflowLedger(job, Store(sqlite_uri), EnergySource.SIMULATED, holder=holder)
    ledger.decided(decision(ledger.begin(), batch_size=64, explores=True), {})

    assert recurrence(str(path), tracking_uri=sqlite_uri).number == 2

    left, _ = runs(sqlite_uri, "attempt")
    assert (left["info"]["status"], left["data"]["tags"]["zf.outcome"]) == ("FAILED", "failed")
    assert left["data"]["tags"]["zf.detail"].startswith("declared dead")
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(killed.id).state
    assert state is not None
    assert state.is_crashed()
    assert "declared dead by zeus_flows" in str(state.message)
    assert open_direct(job, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED).history().in_flight == ()


def test_a_gate_that_passes_makes_the_flow_run_skipped(tmp_path: Path, sqlite_uri: str) -> None:
    gate = {"function": "tests.training_functions:evaluate", "parameters": {"progress": 1.5}}
    path = str(write_job(tmp_path / "job.yaml", gate=gate))
    assert not recurrence(path, tracking_uri=sqlite_uri).skipped
    assert recurrence(path, tracking_uri=sqlite_uri).skipped

    state = recurrence(path, tracking_uri=sqlite_uri, return_state=True)

    assert (state.name, state.is_completed()) == ("Skipped", True)
    assert "the model of recurrence 1 still meets the target" in str(state.message)
    assert len(runs(sqlite_uri, "attempt")) == 1
    gates = runs(sqlite_uri, "gate")
    assert [run["data"]["tags"]["zf.recurrence"] for run in gates] == ["2", "3"]
    assert gates[-1]["data"]["tags"]["zf.prefect.flow_run_id"] == str(state.state_details.flow_run_id)
    with get_client(sync_client=True) as client:
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id]))
        (artifact,) = client.read_artifacts(artifact_filter=mine)
    assert artifact.key == "nightly-gate"
    assert "still meets the target" in str(artifact.data)


def test_a_fleet_that_is_rolled_back_trains_whatever_the_gate_finds(tmp_path: Path, sqlite_uri: str) -> None:
    gate = {"function": "tests.training_functions:evaluate"}
    path = str(write_job(tmp_path / "job.yaml", gate=gate))
    try:
        for mode, asked in (("full", 0), ("power", 1), ("off", 1)):
            Variable.set("zeus_flows_mode", mode, overwrite=True)
            assert not recurrence(path, tracking_uri=sqlite_uri).skipped
            assert len(runs(sqlite_uri, "gate")) == asked
    finally:
        Variable.unset("zeus_flows_mode")
