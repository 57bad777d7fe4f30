"""A command that tracks with MLflow: its numbers go to the attempt's run, or its own runs are linked."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.builders import decision
from tests.training.test_command import job
from zeus_flows.core.records import EnergySource, Observation, Outcome
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.settings import read_settings
from zeus_flows.training.trainer import LocalTrainer

pytestmark = pytest.mark.slow

LOGS = """
import mlflow
with mlflow.start_run():
    for epoch in range(1, 6):
        mlflow.log_metric("val_acc", 0.19 * epoch, step=epoch)
"""


def train(script: str, folder: Path, uri: str, **changes: Any) -> tuple[Observation, Run, MlflowClient]:
    (folder / "train.py").write_text(textwrap.dedent(script))
    changes = {"metric": {"mlflow": "val_acc"}, "command": ["python", "train.py", "{batch_size}"]} | changes
    job_file = job(folder, **changes)
    ledger = open_direct(job_file.core(), tracking_uri=uri, energy_source=EnergySource.SIMULATED)
    ledger.begin()
    run_id = ledger.decided(decision(1), {})
    trainer = LocalTrainer(job_file, read_settings(), tracking_uri=uri)
    observed = trainer.train(job_file.core(), decision(1), None, lambda _: None, attempt_id=run_id)
    client = MlflowClient(tracking_uri=uri)
    return observed, client.get_run(run_id), client


def test_a_script_that_logs_writes_beside_our_energy_and_tells_its_metric(tmp_path: Path, sqlite_uri: str) -> None:
    observed, run, client = train(LOGS, tmp_path, sqlite_uri)
    assert (observed.outcome, observed.epochs, observed.metric) == (Outcome.CONVERGED, 5, 0.95)
    assert run.data.metrics["val_acc"] == 0.95
    assert names.MADE not in run.data.tags
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["output.txt"]


def test_runs_of_an_experiment_of_its_own_are_linked_and_ours_is_not_harmed(tmp_path: Path, sqlite_uri: str) -> None:
    script = LOGS.replace("import mlflow\n", "import mlflow\nmlflow.set_experiment('theirs')\n")
    observed, run, client = train(script, tmp_path, sqlite_uri)
    assert (observed.outcome, observed.epochs) == (Outcome.CONVERGED, 5)
    assert "val_acc" not in run.data.metrics
    (theirs,) = (client.get_run(run_id) for run_id in run.data.tags[names.MADE].split(","))
    assert theirs.data.tags[names.MADE_BY] == run.info.run_id
    assert theirs.info.status == "FINISHED"
    experiment = client.get_experiment(theirs.info.experiment_id)
    assert experiment.name == "theirs"


def test_a_run_of_its_own_that_a_stopped_script_left_open_is_ended(tmp_path: Path, sqlite_uri: str) -> None:
    script = """
    import mlflow, time
    mlflow.set_experiment("theirs")
    mlflow.start_run()
    mlflow.log_metric("val_acc", 0.95)
    time.sleep(600)
    """
    observed, run, client = train(script, tmp_path, sqlite_uri, grace_seconds=0)
    assert observed.outcome is Outcome.CONVERGED
    assert client.get_run(run.data.tags[names.MADE]).info.status == "KILLED"


def test_several_runs_and_the_end_of_ours_change_nothing_about_the_attempt(tmp_path: Path, sqlite_uri: str) -> None:
    script = LOGS + "with mlflow.start_run():\n    mlflow.log_metric('other', 1)\n"
    observed, run, _ = train(script, tmp_path, sqlite_uri)
    assert observed.outcome is Outcome.CONVERGED
    assert run.info.status == "FINISHED"  # the script's doing
    assert len(run.data.tags[names.MADE].split(",")) == 1
    job_file = job(tmp_path)
    ledger = open_direct(job_file.core(), tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED)
    assert [attempt.run_id for attempt in ledger.unfinished()[0]] == [run.info.run_id]
    ledger.observed(run.info.run_id, observed)
    assert ledger.state().observations == 1
