"""A train function that misbehaves: the attempt is closed, what converged is kept, and the process ends. Add a line."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.builders import decision
from tests.hostile.conftest import Command
from tests.processes import ZEUS_FLOWS, Forked
from tests.training_functions import write_job
from zeus_flows.core.attempt import AttemptFailed
from zeus_flows.core.json import jsonable, plain_text
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.job_file import load_job
from zeus_flows.ledger.mlflow.record_text import load_observation
from zeus_flows.settings import read_settings
from zeus_flows.training.trainer import LocalTrainer

#: Functions that break, their parameters, and what is kept of it.
BREAKS: dict[str, tuple[dict[str, Any], str]] = {
    "unspeakable": ({}, "Unspeakable: (its text cannot be made)"),
    "circular": ({}, "RuntimeError: round and round"),
    "surrogate": ({}, "ValueError: half  a character and [31m colour"),
    "enormous": ({}, "ValueError: xxxx"),
    "orders": ({}, "Order: out of the way"),
    "exits": ({"code": 0}, "TrainFunctionFailed: the train function called sys.exit(0)"),
    "leaves": ({}, "TrainFunctionFailed: the train function called sys.exit('so long')"),
}


def misbehaving(folder: Path, function: str, parameters: dict[str, Any] | None = None, **changes: Any) -> Path:
    train = {"function": f"tests.hostile.misbehaviour:{function}", "parameters": parameters or {}, "retries": 0}
    return write_job(folder / "job.yaml", train=train, **changes)


@pytest.mark.parametrize("function", BREAKS)
def test_whatever_it_raises_the_attempt_has_an_observation_that_can_be_kept(function: str, tmp_path: Path) -> None:
    parameters, words = BREAKS[function]
    job_file = load_job(misbehaving(tmp_path, function, parameters))
    trainer = LocalTrainer(job_file, read_settings())
    with pytest.raises(AttemptFailed) as caught:
        trainer.train(job_file.core(), decision(1, batch_size=64), None, lambda _: None)
    observation = caught.value.observation
    assert (observation.outcome, observation.detail[: len(words)]) == (Outcome.FAILED, words)
    assert len(plain_text(jsonable(observation)).encode()) < 6_000
    cause = caught.value.__cause__
    assert len(f"{cause!s}{cause!r}") > 0, "what Prefect logs and stores can be told"


def outcomes(uri: str, job: str = "nightly") -> list[Observation]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(job)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'", order_by=["start_time"])
    assert all(run.info.status != "RUNNING" for run in runs)
    return [load_observation(run.data.params["zf.observation"]) for run in runs]


@pytest.mark.parametrize("function", ["exits", "unspeakable"])
def test_a_train_function_that_breaks_oddly_exits_1_and_its_attempt_is_closed(
    function: str, zeus_flows: Command, sqlite_uri: str, tmp_path: Path
) -> None:
    done = zeus_flows("run", str(misbehaving(tmp_path, function)), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert BREAKS[function][1].partition(": ")[2] in done.stderr
    assert [o.outcome for o in outcomes(sqlite_uri)] == [Outcome.FAILED]


#: What a function may do after it has reached the target: the observation counts, and the process ends.
HARMS = [
    "closes standard output",
    "leaves a thread",
    "deletes the state directory",
    "forks",
    "forks and comes back",
    "prints much",
    "changes the folder",
    "changes signals",
]


@pytest.mark.parametrize("what", HARMS)
def test_what_converged_is_kept_and_the_process_ends_whatever_is_done_then(
    what: str, zeus_flows: Command, sqlite_uri: str, tmp_path: Path
) -> None:
    job = misbehaving(tmp_path, "converges_then", {"what": what})
    done = zeus_flows("run", str(job), cwd=tmp_path, timeout=60)
    seen = outcomes(sqlite_uri)
    assert [o.outcome for o in seen] == [Outcome.CONVERGED], done.stderr
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_train_function_that_closes_all_files_loses_nothing_and_the_process_ends(
    zeus_flows: Command, sqlite_uri: str, tmp_path: Path
) -> None:
    """Connections to MLflow and Prefect are gone; the next recurrence delivers what waits in the outbox."""
    job = misbehaving(tmp_path, "converges_then", {"what": "closes all files"})
    done = zeus_flows("run", str(job), cwd=tmp_path, timeout=60)
    assert "training closed this process's files; the next recurrence delivers what it brought" in done.stderr
    assert done.returncode == 1
    assert zeus_flows("janitor", str(job), cwd=tmp_path).returncode == 0
    assert [o.outcome for o in outcomes(sqlite_uri)] == [Outcome.CONVERGED]


def test_sigterm_ends_a_training_that_catches_everything(prefect_api: str, sqlite_uri: str, tmp_path: Path) -> None:
    job = misbehaving(tmp_path, "deaf")
    environment = os.environ | {"PREFECT_API_URL": prefect_api, "MLFLOW_TRACKING_URI": sqlite_uri}
    process = Forked(ZEUS_FLOWS, "run", str(job), cwd=tmp_path, env=environment)
    try:
        process.wait_until_it_says("training")
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 143
    finally:
        process.kill()
    assert process.stderr.strip().splitlines()[-1].startswith("zeus-flows: SIGTERM: training did not stop")
    assert "Traceback" not in process.stderr
