"""Training that is told to stop: by a signal, and by Prefect, for real."""

from __future__ import annotations

import shutil
import signal
import subprocess
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
from tests.orchestration.test_deployment import ROOT, create_pool, deploy, flow_runs, prefect, server, wait_for
from tests.processes import PREFECT, Forked
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
        shutil.copy(server["MLFLOW_TRACKING_URI"].removeprefix("sqlite:///"), uri.removeprefix("sqlite:///"))
        env = environment(server, gpu) | {"MLFLOW_TRACKING_URI": uri}
        flow = Forked(code, str(endless_job(tmp_path)), env=env)
        try:
            wait_for("training at another limit", lambda: gpu.limit_w() != BEFORE_W, 240)
            time.sleep(1)
            began = time.monotonic()
            flow.send_signal(number)
            wait_for("the previous limit", lambda: gpu.limit_w() == BEFORE_W, 5)
            flow.wait(60)
        finally:
            flow.kill()
        assert time.monotonic() - began < 30, flow.stdout + flow.stderr
        observed = the_observation(uri)
        assert observed.outcome is Outcome.FAILED
        assert not observed.outcome.blames_the_arm
        assert observed.detail == f"cancelled: the process was told to stop ({number.name})"


def test_a_flow_run_cancelled_in_prefect_stops_training_and_puts_the_limit_back(
    server: dict[str, str], gpu: Emulator, tmp_path: Path
) -> None:
    api = server["PREFECT_API_URL"]
    env = environment(server, gpu)
    pool = create_pool(env)
    deployment = {
        "name": "endless",
        "entrypoint": "flows/recurrence.py:recurrence",
        "parameters": {"job_file": str(endless_job(tmp_path))},
        "work_pool": {"name": pool},
    }
    deploy(env, tmp_path, yaml.safe_dump({"name": "test", "deployments": [deployment]}))
    started = prefect(env, "deployment", "run", "recurrence/endless")
    assert started.returncode == 0, started.stdout + started.stderr

    def flow_run() -> dict[str, Any]:
        (found,) = flow_runs(env, "endless")
        return found

    worker = Forked(PREFECT, "worker", "start", "--pool", pool, cwd=ROOT, env=env)
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
    print(f"limit back {restored_s:.1f} s, run cancelled {cancelled_s:.1f} s after the order")
    assert restored_s < 30, worker.stdout + worker.stderr
    observed = the_observation(server["MLFLOW_TRACKING_URI"])
    assert observed.outcome is Outcome.FAILED
    assert observed.detail == "cancelled: the process was told to stop (SIGTERM)"
