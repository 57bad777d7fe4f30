"""The power promises over whole recurrences: `zeus-flows run` in another process, through Prefect, on emulated GPUs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pynvml
import pytest
from mlflow import MlflowClient
from prefect.settings import PREFECT_API_URL

from tests.gpu.nvml_emulator import Emulator, build, emulated
from tests.processes import ZEUS_FLOWS, Forked
from zeus_flows.gpu.journal import Journal, journal_folder
from zeus_flows.gpu.nvml import Nvml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.xdist_group("prefect"),
]

PREVIOUS_W = 210.0  # measured too, so that what was saved can be told
JOB = """\
name: guarded
train: {function: "slowly:train"}
target: {metric: m, value: 1.0, better: higher}
batch_sizes: [32]
default_batch_size: 32
max_epochs: 2
max_attempts: 1
device: auto
power_limit: {profile_seconds: 0.2, warmup_seconds: 0.05}
"""
TRAIN = """\
import time

def train(session):
    for epoch in session.epochs():
        for batch in session.steps([0] * 400):
            time.sleep(0.01)
        session.report_metric(1.0)
"""


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[Emulator]:
    library = build(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler to build the emulated NVML with")
    with emulated(library, tmp_path / "gpus") as emulator:
        Nvml().devices()[0].set_power_limit_w(PREVIOUS_W)
        yield emulator


class Run:
    """`zeus-flows run` in another process."""

    def __init__(self, emulator: Emulator, folder: Path, uri: str, **switches: str) -> None:
        self.emulator = emulator
        (folder / "job.yaml").write_text(JOB)
        (folder / "slowly.py").write_text(TRAIN)
        self.state_dir = folder / "state"
        switches |= {"ZEUS_FLOWS_STATE_DIR": str(self.state_dir), "PREFECT_API_URL": PREFECT_API_URL.value()}
        env = emulator.environment(**switches)
        self.process = Forked(ZEUS_FLOWS, "run", "job.yaml", "--tracking-uri", uri, cwd=folder, env=env, leads=True)

    @property
    def output(self) -> str:
        return self.process.stdout + self.process.stderr

    def wait_until_limits_are_changed(self) -> None:
        journal = Journal(journal_folder(self.state_dir))
        end = time.monotonic() + 120
        while not journal.uuids() or self.emulator.limit_w() == PREVIOUS_W:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end
            time.sleep(0.05)

    def end(self, within_s: float = 120.0) -> tuple[int, str]:
        """Return exit code and output; what it started goes with it."""
        try:
            return self.process.wait(timeout=within_s), self.output
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def outcomes(uri: str) -> list[str]:
    client = MlflowClient(uri)
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    tags = [run.data.tags for run in client.search_runs(ids)]
    return sorted(tag["zf.outcome"] for tag in tags if "zf.outcome" in tag)


def test_a_recurrence_that_is_cancelled_puts_the_previous_limit_back(
    emulator: Emulator, tmp_path: Path, sqlite_uri: str
) -> None:
    run = Run(emulator, tmp_path, sqlite_uri)
    run.wait_until_limits_are_changed()
    assert emulator.limit_w() != PREVIOUS_W
    run.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + 5.0
    while emulator.limit_w() != PREVIOUS_W and time.monotonic() < end:
        time.sleep(0.05)
    assert emulator.limit_w() == PREVIOUS_W
    run.end()
    assert outcomes(sqlite_uri) == ["failed"]


def test_a_recurrence_puts_back_what_a_killed_one_left(emulator: Emulator, tmp_path: Path, sqlite_uri: str) -> None:
    run = Run(emulator, tmp_path, sqlite_uri)
    run.wait_until_limits_are_changed()
    run.process.kill()
    run.end()
    assert emulator.limit_w() != PREVIOUS_W
    code, output = Run(emulator, tmp_path, sqlite_uri).end()
    assert code == 0, output
    assert emulator.limit_w() == PREVIOUS_W
    assert "converged" in outcomes(sqlite_uri)


def test_a_recurrence_without_permission_measures_and_exits_with_0(
    emulator: Emulator, tmp_path: Path, sqlite_uri: str
) -> None:
    code, output = Run(emulator, tmp_path, sqlite_uri, NVMLEMU_PERMISSION="deny").end()
    assert code == 0, output
    assert output.count("measuring only") == 1
    assert emulator.limit_w() == PREVIOUS_W
    assert outcomes(sqlite_uri) == ["converged"]


def test_a_lost_gpu_fails_the_attempt_and_does_not_blame_the_arm(
    emulator: Emulator, tmp_path: Path, sqlite_uri: str
) -> None:
    run = Run(emulator, tmp_path, sqlite_uri, NVMLEMU_FAIL=f"*:{pynvml.NVML_ERROR_GPU_IS_LOST}:5000")
    run.wait_until_limits_are_changed()
    device = Nvml().devices()[0]
    while emulator.calls() <= 5000:
        device.energy_j()
    lost = time.monotonic()
    while not outcomes(sqlite_uri):
        assert time.monotonic() - lost < 10.0
        time.sleep(0.2)
    assert outcomes(sqlite_uri) == ["failed"]
    assert run.end()[0] != 0
