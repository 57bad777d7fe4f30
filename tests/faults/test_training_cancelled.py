"""Training that is told to stop: by a signal, and by Prefect, for real."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pynvml
import pytest
import yaml
from mlflow import MlflowClient

from tests.gpu.nvml_emulator import Emulator
from tests.orchestration.test_deployment import PREFECT, ROOT, server, wait_for
from tests.training.conftest import emulate, emulator_library
from tests.training_functions import write_job
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.ledger.mlflow.record_text import load_observation

__all__ = ["emulate", "emulator_library", "server"]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]

BEFORE_W = 237.0  # not among the limits that are profiled
QUICK = {"profile_seconds": 0.2, "warmup_seconds": 0.05}


@pytest.fixture
def gpu(emulate: Callable[..., Emulator]) -> Emulator:
    """An emulated GPU whose power limit somebody set before."""
    emulator = emulate(NVMLEMU_GPUS="v100")
    pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(0), int(BEFORE_W * 1e3))
    return emulator


def environment(server: dict[str, str], gpu: Emulator) -> dict[str, str]:
    """Return what a process needs to see the server and the emulated GPU, and this checkout."""
    theirs = {"NVMLEMU_PERMISSION": "allow", "PREFECT_LOGGING_LEVEL": "INFO", "PYTHONPATH": str(ROOT)}
    names = ("LD_LIBRARY_PATH", "NVMLEMU_STATE")
    return server | {name: gpu.environment()[name] for name in names} | theirs


def heed_interrupts() -> None:
    """Undo what a shell does to what it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def endless_job(folder: Path) -> Path:
    return write_job(folder / "job.yaml", "endless", device="nvml", mode="power", max_epochs=10_000, power_limit=QUICK)


def the_observation(uri: str) -> Observation:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("nightly")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'")
    assert run.data.tags["zf.outcome"] == "failed"
    return load_observation(run.data.params["zf.observation"])


def test_a_signal_ends_training_within_seconds_and_puts_the_limit_back(
    server: dict[str, str], gpu: Emulator, tmp_path: Path
) -> None:
    code = "import sys; from zeus_flows.orchestration.recurrence_flow import recurrence; recurrence(sys.argv[1])"
    for number in (signal.SIGTERM, signal.SIGINT):
        uri = f"sqlite:///{tmp_path}/{number.name}.db"
        with (tmp_path / f"{number.name}.log").open("w") as log:
            flow = subprocess.Popen(
                [sys.executable, "-c", code, str(endless_job(tmp_path))],
                env=environment(server, gpu) | {"MLFLOW_TRACKING_URI": uri},
                stdout=log,
                stderr=log,
                preexec_fn=heed_interrupts,
            )
            try:
                wait_for("training at another limit", lambda: gpu.limit_w() != BEFORE_W, 240)
                time.sleep(1)
                began = time.monotonic()
                flow.send_signal(number)
                wait_for("the previous limit", lambda: gpu.limit_w() == BEFORE_W, 5)
                flow.wait(60)
            finally:
                flow.kill()
        assert time.monotonic() - began < 30, (tmp_path / f"{number.name}.log").read_text()
        observed = the_observation(uri)
        assert observed.outcome is Outcome.FAILED
        assert not observed.outcome.blames_the_arm
        assert observed.detail == f"cancelled: the process was told to stop ({number.name})"


def test_a_flow_run_cancelled_in_prefect_stops_training_and_puts_the_limit_back(
    server: dict[str, str], gpu: Emulator, tmp_path: Path
) -> None:
    api = server["PREFECT_API_URL"]
    env = environment(server, gpu)
    deployment = {
        "name": "endless",
        "entrypoint": "flows/recurrence.py:recurrence",
        "parameters": {"job_file": str(endless_job(tmp_path))},
        "work_pool": {"name": "gpu-workers"},
    }
    (tmp_path / "prefect.yaml").write_text(yaml.safe_dump({"name": "test", "deployments": [deployment]}))

    def prefect(*words: str) -> None:
        done = subprocess.run([PREFECT, *words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr

    def flow_run() -> dict[str, Any]:
        found: list[dict[str, Any]] = httpx.post(f"{api}/flow_runs/filter", json={}, timeout=10).json()
        return found[0]

    prefect("work-pool", "create", "--type", "process", "gpu-workers")
    prefect("--no-prompt", "deploy", "--prefect-file", str(tmp_path / "prefect.yaml"), "--all")
    prefect("deployment", "run", "recurrence/endless")
    with (tmp_path / "worker.log").open("w") as log:
        worker = subprocess.Popen(
            [PREFECT, "worker", "start", "--pool", "gpu-workers"], env=env, cwd=ROOT, stdout=log, stderr=log
        )
        try:
            wait_for("training at another limit", lambda: gpu.limit_w() != BEFORE_W, 240)
            began = time.monotonic()
            state = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
            httpx.post(f"{api}/flow_runs/{flow_run()['id']}/set_state", json=state, timeout=10).raise_for_status()
            wait_for("the previous limit", lambda: gpu.limit_w() == BEFORE_W, 60)
            restored_s = time.monotonic() - began
            wait_for("a cancelled flow run", lambda: flow_run()["state_type"] == "CANCELLED", 60)
            cancelled_s = time.monotonic() - began
        finally:
            worker.terminate()
            try:
                worker.wait(60)
            except subprocess.TimeoutExpired:
                worker.kill()
    text = (tmp_path / "worker.log").read_text()
    print(f"limit back {restored_s:.1f} s, run cancelled {cancelled_s:.1f} s after the order")
    assert restored_s < 30, text
    observed = the_observation(server["MLFLOW_TRACKING_URI"])
    assert observed.outcome is Outcome.FAILED
    assert observed.detail == "cancelled: the process was told to stop (SIGTERM)"
