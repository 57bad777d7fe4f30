"""Deployments for real: a server, a worker, and a run that nobody but the schedule starts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.orchestration.deployed_runs import remove
from tests.processes import PREFECT, ZEUS_FLOWS, Forked, run_forked
from tests.training_functions import write_job

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]


def wait_for(what: str, done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(1)


@pytest.fixture
def server(prefect_api: str, sqlite_uri: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment that talks to the session's Prefect server; what a test deploys there goes with it."""
    yield os.environ | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": prefect_api,
        "MLFLOW_TRACKING_URI": sqlite_uri,
        "ZEUS_FLOWS_STATE_DIR": str(tmp_path / "state"),
        "PYTHONPATH": str(ROOT),
    }
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        for folder in (tmp_path, ROOT):
            remove(folder)


def prefect(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run one of Prefect's commands where a user would."""
    return run_forked(PREFECT, *words, cwd=ROOT, env=env, timeout=180)


def create_pool(env: dict[str, str]) -> str:
    """Make a work pool with a name of its own."""
    pool = f"gpu-workers-{uuid4().hex[:8]}"
    done = prefect(env, "work-pool", "create", "--type", "process", pool)
    assert done.returncode == 0, done.stdout + done.stderr
    return pool


def deploy(env: dict[str, str], folder: Path, text: str) -> None:
    """Deploy everything in a text."""
    (folder / "prefect.yaml").write_text(text)
    done = prefect(env, "--no-prompt", "deploy", "--prefect-file", str(folder / "prefect.yaml"), "--all")
    assert done.returncode == 0, done.stdout + done.stderr


def flow_runs(env: dict[str, str], deployment: str, *states: str) -> list[dict[str, Any]]:
    """Return a deployment's flow runs, those in given states if any are given."""
    body: dict[str, Any] = {"deployments": {"name": {"any_": [deployment]}}}
    if states:
        body["flow_runs"] = {"state": {"type": {"any_": states}}}
    found: list[dict[str, Any]] = httpx.post(f"{env['PREFECT_API_URL']}/flow_runs/filter", json=body, timeout=10).json()
    return found


def test_a_scheduled_run_of_the_deployment_completes_a_recurrence(server: dict[str, str], tmp_path: Path) -> None:
    write_job(tmp_path / "job.yaml")
    pool = f"gpu-{uuid4().hex[:8]}"
    words = ("deploy", "job.yaml", "--cron", "* * * * *", "--pool", pool)
    made = run_forked(ZEUS_FLOWS, *words, cwd=tmp_path, env=server)
    assert made.returncode == 0, made.stdout + made.stderr
    worker = Forked(PREFECT, "worker", "start", "--pool", pool, cwd=Path("/"), env=server)
    try:
        wait_for("a completed flow run", lambda: bool(flow_runs(server, "nightly", "COMPLETED")), 240)
    finally:
        worker.terminate()
        worker.wait(60)

    done = flow_runs(server, "nightly", "COMPLETED")[0]
    assert (done["auto_scheduled"], done["name"]) == (True, "nightly #1")
    client = MlflowClient(tracking_uri=server["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("nightly")
    assert experiment is not None
    observed = client.search_runs([experiment.experiment_id], "tags.`zf.outcome` = 'converged'")
    assert done["id"] in {run.data.tags["zf.prefect.flow_run_id"] for run in observed}


def test_prefects_own_file_makes_what_deploy_makes(server: dict[str, str], tmp_path: Path) -> None:
    pool = create_pool(server)
    deploy(server, tmp_path, (ROOT / "deployments/prefect.yaml").read_text().replace("name: gpu\n", f"name: {pool}\n"))

    def made(flow: str, name: str) -> dict[str, Any]:
        answer = httpx.get(f"{server['PREFECT_API_URL']}/deployments/name/{flow}/{name}", timeout=10)
        found: dict[str, Any] = answer.raise_for_status().json()
        ours = ("entrypoint", "tags", "work_pool_name", "pull_steps", "concurrency_options", "enforce_parameter_schema")
        parameters = {key: found["parameters"].get(key) for key in ("job_file", "experiment_file", "folder", "digest")}
        return {key: found[key] for key in ours} | parameters

    names = [("recurrence", "flights-late"), ("capriccio", "capriccio-flights")]
    by_prefect = [made(*name) for name in names]
    files = ("deployments/jobs/flights.yaml", "deployments/experiments/flights.yaml")
    ours = run_forked(ZEUS_FLOWS, "deploy", *files, "--pool", pool, cwd=ROOT, env=server)
    assert ours.returncode == 0, ours.stdout + ours.stderr
    assert "2 updated" in ours.stdout  # parameters are pinned on the server too
    assert [made(*name) for name in names] == by_prefect


def test_serve_runs_what_is_due_without_workers_and_lets_schedules_rest_when_it_ends(
    server: dict[str, str], tmp_path: Path
) -> None:
    write_job(tmp_path / "job.yaml", name="served")
    words = ("serve", "job.yaml", "--cron", "0 0 1 1 *")
    serving = Forked(ZEUS_FLOWS, *words, cwd=tmp_path, env=server | {"PREFECT_RUNNER_POLL_FREQUENCY": "2"}, leads=True)
    try:
        serving.wait_until_it_says("serving 1; Ctrl-C ends it")
        started = prefect(server, "deployment", "run", "recurrence/served")
        assert started.returncode == 0, started.stdout + started.stderr
        wait_for("a completed flow run", lambda: bool(flow_runs(server, "served", "COMPLETED")), 240)
        serving.send_signal(signal.SIGINT)
        serving.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(serving.pid, signal.SIGKILL)
    (done,) = flow_runs(server, "served", "COMPLETED")
    assert done["name"] == "served #1"
    found = httpx.get(f"{server['PREFECT_API_URL']}/deployments/name/recurrence/served", timeout=10).json()
    assert (found["work_pool_name"], found["paused"]) == (None, True)
