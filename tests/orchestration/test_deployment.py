"""deployments/prefect.yaml for real: a server, a worker, and a run that nobody but the schedule starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient

ROOT = Path(__file__).parents[2]
PREFECT = str(Path(sys.executable).parent / "prefect")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]


def wait_for(what: str, done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Prefect server of its own; yields the environment that talks to it."""
    port = free_port()
    env = os.environ | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "ZEUS_FLOWS_STATE_DIR": str(tmp_path / "state"),
        # The default is a minute between the scheduler's looks at new deployments.
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
    }
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)], env=env, stdout=log, stderr=log
        )
        try:
            wait_for("the Prefect server's start", lambda: healthy(env["PREFECT_API_URL"]), 180)
            yield env
        finally:
            process.terminate()
            process.wait(30)


def healthy(api: str) -> bool:
    try:
        return httpx.get(f"{api}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_scheduled_run_of_the_deployment_completes_a_recurrence(server: dict[str, str], tmp_path: Path) -> None:
    every_minute = (ROOT / "deployments/prefect.yaml").read_text().replace('cron: "0 * * * *"', 'cron: "* * * * *"')
    prefect_file = tmp_path / "prefect.yaml"
    prefect_file.write_text(every_minute)

    def prefect(*words: str) -> str:
        done = subprocess.run([PREFECT, *words], env=server, cwd=ROOT, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    prefect("work-pool", "create", "--type", "process", "gpu-workers")
    prefect("--no-prompt", "deploy", "--prefect-file", str(prefect_file), "--all")

    def flow_runs(state: str) -> list[dict[str, object]]:
        body = {"flow_runs": {"state": {"type": {"any_": [state]}}}}
        found: list[dict[str, object]] = httpx.post(
            f"{server['PREFECT_API_URL']}/flow_runs/filter", json=body, timeout=10
        ).json()
        return found

    with (tmp_path / "worker.log").open("w") as log:
        worker = subprocess.Popen(
            [PREFECT, "worker", "start", "--pool", "gpu-workers"], env=server, cwd=ROOT, stdout=log, stderr=log
        )
        try:
            wait_for("a completed flow run", lambda: bool(flow_runs("COMPLETED")), 240)
        finally:
            worker.terminate()
            worker.wait(60)

    done = flow_runs("COMPLETED")[0]
    assert done["auto_scheduled"] is True
    client = MlflowClient(tracking_uri=server["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("flights-late")
    assert experiment is not None
    observed = client.search_runs([experiment.experiment_id], "tags.`zf.outcome` = 'converged'")
    assert done["id"] in {run.data.tags["zf.prefect.flow_run_id"] for run in observed}


def test_the_server_refuses_parameters_that_the_flow_does_not_have(server: dict[str, str]) -> None:
    def prefect(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PREFECT, *words], env=server, cwd=ROOT, capture_output=True, text=True, timeout=180)

    prefect("work-pool", "create", "--type", "process", "gpu-workers")
    assert prefect("--no-prompt", "deploy", "--prefect-file", "deployments/prefect.yaml", "--all").returncode == 0
    refused = prefect("deployment", "run", "recurrence/flights-hourly", "--param", "function=os:system")
    assert refused.returncode != 0
    refused = prefect("deployment", "run", "recurrence/flights-hourly", "--param", "simulate=h100")
    assert refused.returncode != 0
