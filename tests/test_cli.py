"""The command line as a user types it: what it prints, what it leaves, how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.processes import ZEUS_FLOWS, run_forked
from tests.training_functions import write_job

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
INSTALLED = str(Path(sys.executable).parent / "zeus-flows")


Command = Callable[..., subprocess.CompletedProcess[str]]


def installed(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command that was installed, as a user does."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run([INSTALLED, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def zeus_flows(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The same in a process that has imported everything, with the session's Prefect server."""
    common = {"PREFECT_API_URL": prefect_api, "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect"))}

    def run(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        return run_forked(ZEUS_FLOWS, *words, cwd=cwd, env=os.environ | common | env)

    return run


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_help_imports_nothing_heavy() -> None:
    heavy = ("prefect", "mlflow", "torch", "numpy", "pydantic")
    code = f"import sys, zeus_flows.cli; sys.exit(', '.join(m for m in {heavy} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_help_names_every_command_and_the_exit_codes(tmp_path: Path) -> None:
    done = installed("--help", cwd=tmp_path)
    assert done.returncode == 0
    for word in ("init", "run", "Exit codes"):
        assert word in done.stdout


def test_init_writes_a_job_file_once(tmp_path: Path) -> None:
    first = installed("init", cwd=tmp_path)
    assert (first.returncode, left_in(tmp_path)) == (0, {"job.yaml"})
    assert "next: zeus-flows run job.yaml" in first.stdout
    second = installed("init", cwd=tmp_path)
    assert second.returncode == 2
    assert "--force" in second.stderr


def test_without_a_gpu_the_exit_code_is_4_and_the_text_says_what_to_type(zeus_flows: Command, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", device="auto")
    done = zeus_flows("run", str(job), cwd=tmp_path)
    assert done.returncode == 4
    assert "--simulate v100" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_in(tmp_path) == {"job.yaml"}


def test_a_wrong_job_file_exits_2_with_file_and_line_and_writes_nothing(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", max_epochs=-1)
    done = installed("run", str(job), cwd=tmp_path)
    assert done.returncode == 2
    assert "job.yaml:" in done.stderr
    assert "max_epochs" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_in(tmp_path) == {"job.yaml"}


def test_a_password_on_the_command_line_is_refused_and_not_repeated(zeus_flows: Command, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    done = zeus_flows("run", str(job), "--tracking-uri", "https://me:hunter2@mlflow.example", cwd=tmp_path)
    assert done.returncode == 2
    assert "MLFLOW_TRACKING_URI" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_a_dry_run_shows_the_next_decision_and_writes_nothing(zeus_flows: Command, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml")
    done = zeus_flows("run", str(job), "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "batch size 128" in " ".join(done.stdout.split())
    assert "Nothing was written" in done.stdout
    assert left_in(tmp_path) == {"job.yaml"}


def three_recurrences(command: Command, folder: Path, **env: str) -> dict[str, Any]:
    folder.mkdir()
    assert installed("init", cwd=folder).returncode == 0
    words = ("run", "job.yaml", "--recurrences", "3", "--simulate", "v100", "--seed", "1", "--json")
    done = command(*words, cwd=folder, **env)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_init_and_run_leave_three_observed_runs_and_the_same_seed_decides_the_same(
    zeus_flows: Command, sqlite_uri: str, tmp_path: Path
) -> None:
    # In an empty folder, with nothing but what was installed: Prefect's ephemeral server, its database and MLflow's.
    first = three_recurrences(installed, tmp_path / "first", PREFECT_HOME=str(tmp_path / "prefect"))
    assert (tmp_path / "prefect" / "prefect.db").exists()
    assert [r["recurrence"] for r in first["recurrences"]] == [1, 2, 3]
    assert first["energy_source"] == "simulated"
    for recurrence in first["recurrences"]:
        for attempt in recurrence["attempts"]:
            assert attempt["decision"]["reason"]["text"]
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/first/mlflow.db")
    experiment = client.get_experiment_by_name("flights-late")
    assert experiment is not None
    observed = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'")
    assert {run.data.tags["zf.recurrence"] for run in observed} == {"1", "2", "3"}
    assert all("zf.observation" in run.data.params for run in observed)

    second = three_recurrences(zeus_flows, tmp_path / "second", MLFLOW_TRACKING_URI=sqlite_uri)
    assert not (tmp_path / "second" / "mlflow.db").exists()

    def decisions(document: dict[str, Any]) -> list[Any]:
        return [attempt["decision"] for r in document["recurrences"] for attempt in r["attempts"]]

    assert decisions(first) == decisions(second)


def test_run_again_goes_on_where_it_left_off_and_a_miss_exits_3(
    zeus_flows: Command, sqlite_uri: str, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml")
    first = zeus_flows("run", str(job), "--json", "-n", "2", cwd=tmp_path)
    assert [r["recurrence"] for r in json.loads(first.stdout)["recurrences"]] == [1, 2]
    missing = write_job(tmp_path / "job.yaml", "never", max_epochs=2, max_attempts=1)
    second = zeus_flows("run", str(missing), cwd=tmp_path)
    assert second.returncode == 3, second.stderr
    row = next(line for line in second.stdout.splitlines() if "missed" in line)
    assert row.split()[0] == "3"
    assert "SIMULATED" in second.stdout
    assert "ui --backend-store-uri sqlite:///mlflow.db" in second.stdout


def test_a_gate_s_skips_are_shown_counted_and_in_the_document(
    zeus_flows: Command, sqlite_uri: str, tmp_path: Path
) -> None:
    gate = {"function": "tests.training_functions:evaluate", "max_age": 2}
    job = write_job(tmp_path / "job.yaml", gate=gate)
    shown = zeus_flows("run", str(job), "--recurrences", "3", cwd=tmp_path, COLUMNS="200")
    assert shown.returncode == 0, shown.stderr
    assert "skipped the model of recurrence 1 still meets the target" in " ".join(shown.stdout.split())
    assert "Skipped by the drift gate: 1 recurrence; its evaluations took" in shown.stdout
    done = zeus_flows("run", str(job), "--json", cwd=tmp_path)
    (fourth,) = json.loads(done.stdout)["recurrences"]
    assert (fourth["skipped"], fourth["attempts"], fourth["converged"]) == (True, [], True)
    assert fourth["gate"]["question"]["trained_in"] == 3
    drift = zeus_flows("drift", str(job), cwd=tmp_path)
    assert "The drift gate skipped 2 recurrences." in drift.stdout
    dry = zeus_flows("run", str(job), "--dry-run", cwd=tmp_path)
    assert "The drift gate is asked first" in dry.stdout


def test_a_gate_that_does_not_exist_exits_2_and_nothing_runs(zeus_flows: Command, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.yaml", gate={"function": "tests.training_functions:evaluat"})
    done = zeus_flows("run", str(job), cwd=tmp_path)
    assert done.returncode == 2
    assert "gate.function" in done.stderr
    assert "did you mean 'evaluate'?" in done.stderr
    assert left_in(tmp_path) == {"job.yaml"}


def test_a_train_function_that_breaks_is_shown_from_its_own_lines_on_and_once(
    zeus_flows: Command, sqlite_uri: str, tmp_path: Path
) -> None:
    done = zeus_flows("run", str(write_job(tmp_path / "job.yaml", "crash")), cwd=tmp_path)
    assert done.returncode == 1
    assert "the train function failed; the attempt is recorded as failed" in done.stderr
    assert done.stderr.count("Traceback") == 1
    lines = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert "training_functions.py" in lines[1]
    assert lines[-1] == "ZeroDivisionError: the user's bug"
