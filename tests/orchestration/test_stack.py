"""deployments/stack for real: two workers, jobs at once, a worker that is killed and replaced."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.ledger.servers import free_port
from tests.orchestration.test_deployment import flow_runs, prefect, wait_for
from tests.processes import ZEUS_FLOWS, run_forked
from tests.training_functions import write_job

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """The stack of two workers, and the environment that it tells its user to set."""
    folder = Path(tempfile.mkdtemp(prefix="zeus-flows-stack-"))
    folder.chmod(0o755)  # a PostgreSQL that root starts runs as another user, who must find it
    ports = free_port(), free_port()
    words = ["--folder", str(folder), "--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1])]
    log = folder / "up.log"
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }
    with log.open("wb") as output:
        up = subprocess.Popen(
            [sys.executable, str(ROOT / "deployments/stack/up.py"), *words], env=env, stdout=output, stderr=output
        )
    try:
        wait_for("the stack", lambda: "are up" in log.read_text() or up.poll() is not None, 240)
        said = [line.split() for line in log.read_text().splitlines() if line.startswith("  export ")]
        assert len(said) == 2, log.read_text()
        yield env | dict(word.split("=", 1) for _, word in said), folder
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def test_jobs_run_at_once_and_a_killed_worker_is_replaced(stack: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    env, folder = stack
    os.kill(int((folder / "worker-1.pid").read_text()), signal.SIGKILL)
    again = "worker-1 ended (-9) and is started again"
    wait_for("another worker", lambda: again in (folder / "up.log").read_text(), 60)
    (tmp_path / "jobs").mkdir()
    for name in ("first", "second"):
        write_job(tmp_path / f"jobs/{name}.yaml", name=name)
    made = run_forked(ZEUS_FLOWS, "deploy", "jobs", "--pool", "gpu", cwd=tmp_path, env=env)
    assert made.returncode == 0, made.stdout + made.stderr
    for name in ("first", "second"):
        assert prefect(env, "deployment", "run", f"recurrence/{name}").returncode == 0
    for name in ("first", "second"):
        wait_for(name, lambda name=name: bool(flow_runs(env, name, "COMPLETED")), 240)  # type: ignore[misc]
    experiments = MlflowClient(tracking_uri=env["MLFLOW_TRACKING_URI"]).search_experiments()
    assert {"first", "second"} <= {experiment.name for experiment in experiments}
