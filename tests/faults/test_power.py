"""Promises 6 to 8, with real processes, real signals and the real pynvml on emulated GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.gpu import job_on_gpu
from tests.gpu.nvml_emulator import Emulator, build, emulated, set_limit_elsewhere
from zeus_flows.gpu.journal import Journal, journal_folder
from zeus_flows.gpu.nvml import Nvml

pytestmark = pytest.mark.slow

PREVIOUS_W = 200.0  # what an administrator set, neither the default nor the greatest


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build(tmp_path_factory.mktemp("emulator"))
    if built is None:
        pytest.skip("there is no C compiler to build the emulated NVML with")
    return built


@pytest.fixture
def emulator(library: Path, tmp_path: Path) -> Iterator[Emulator]:
    with emulated(library, tmp_path / "gpus", NVMLEMU_GPUS="v100,v100") as emulator:
        for device in Nvml().devices():
            device.set_power_limit_w(PREVIOUS_W)
        yield emulator


class Job:
    """A job in another process."""

    def __init__(self, emulator: Emulator, state_dir: Path, what: str, **switches: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(job_on_gpu.__file__)), str(state_dir), what],
            env=emulator.environment(**switches),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # ignored where tests run in the background
        )
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline().strip()

    def end(self, number: signal.Signals | None = None, within_s: float = 15.0) -> tuple[int, str, str]:
        """Return exit code, output and log, after a signal or by itself."""
        if number is not None:
            self.process.send_signal(number)
        try:
            out, err = self.process.communicate(timeout=within_s)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_previous_limit_is_back_within_five_seconds_of_a_signal(
    emulator: Emulator, tmp_path: Path, number: signal.Signals
) -> None:
    job = Job(emulator, tmp_path, "wait")
    assert job.first == "ready 100 True"
    assert emulator.limit_w() == 100.0
    code, _, _ = job.end(number, within_s=5.0)
    assert code == -number
    assert emulator.limit_w() == PREVIOUS_W
    assert emulator.limit_w(1) == PREVIOUS_W
    assert Journal(journal_folder(tmp_path)).uuids() == ()


@pytest.mark.parametrize(("what", "code"), [("0.1", 0), ("exit", 3), ("raise", 1), ("with", 1)])
def test_the_previous_limit_is_back_after_exit_and_exceptions(
    emulator: Emulator, tmp_path: Path, what: str, code: int
) -> None:
    job = Job(emulator, tmp_path, what)
    assert job.first == "ready 100 True"
    assert job.end()[0] == code
    assert emulator.limit_w() == PREVIOUS_W


def test_a_handler_that_was_there_before_still_ends_the_job_its_way(emulator: Emulator, tmp_path: Path) -> None:
    code, _, log = Job(emulator, tmp_path, "prefect").end(signal.SIGTERM, within_s=5.0)
    assert code == 1
    assert "terminated" in log
    assert emulator.limit_w() == PREVIOUS_W


def test_a_signal_amid_changes_with_a_slow_driver_still_puts_the_limit_back(emulator: Emulator, tmp_path: Path) -> None:
    job = Job(emulator, tmp_path, "busy", NVMLEMU_SET_MS="40")
    time.sleep(0.3)
    assert job.end(signal.SIGTERM, within_s=5.0)[0] == -signal.SIGTERM
    assert emulator.limit_w() == PREVIOUS_W


def test_after_sigkill_the_next_job_puts_the_previous_limit_back(emulator: Emulator, tmp_path: Path) -> None:
    Job(emulator, tmp_path, "wait").end(signal.SIGKILL)
    assert emulator.limit_w() == 100.0
    job = Job(emulator, tmp_path, "0.1")
    code, _, log = job.end()
    assert code == 0
    assert "ended without putting it back; the power limit is" in log
    assert emulator.limit_w() == PREVIOUS_W


def test_after_sigkill_a_job_on_another_gpu_puts_the_previous_limit_back(emulator: Emulator, tmp_path: Path) -> None:
    Job(emulator, tmp_path, "wait").end(signal.SIGKILL)
    other = subprocess.run(
        [sys.executable, "-c", OTHER_GPU, str(tmp_path)],
        env=emulator.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the power limit is 200 W again" in other.stderr
    assert emulator.limit_w() == PREVIOUS_W


OTHER_GPU = """
import sys
from pathlib import Path
from zeus_flows.gpu.open_gpus import open_gpus
open_gpus("nvml", workload=None, batch_size=1, samples_per_epoch=None, state_dir=Path(sys.argv[1]), visible="1").close()
"""


def test_after_sigkill_a_command_puts_the_previous_limit_back(emulator: Emulator, tmp_path: Path) -> None:
    Job(emulator, tmp_path, "wait").end(signal.SIGKILL)
    assert emulator.limit_w() == 100.0
    restored = subprocess.run(
        [sys.executable, "-c", "from zeus_flows.cli.gpu import restore_power_command; restore_power_command()"],
        env=emulator.environment(ZEUS_FLOWS_STATE_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert restored.returncode == 0, restored.stderr
    assert "200 W again" in restored.stdout
    assert emulator.limit_w() == PREVIOUS_W


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_locked_clocks_are_reset_within_five_seconds_of_a_signal(
    emulator: Emulator, tmp_path: Path, number: signal.Signals
) -> None:
    job = Job(emulator, tmp_path, "clocks")
    assert (emulator.locked_mhz(), emulator.locked_mhz(1), emulator.limit_w()) == (900, 0, PREVIOUS_W)
    assert job.end(number, within_s=5.0)[0] == -number
    assert (emulator.locked_mhz(), emulator.limit_w()) == (0, PREVIOUS_W)
    assert Journal(journal_folder(tmp_path)).uuids() == ()


def test_after_sigkill_the_next_job_resets_clocks_and_a_limit_of_somebody_else_stays(
    emulator: Emulator, tmp_path: Path
) -> None:
    Job(emulator, tmp_path, "clocks").end(signal.SIGKILL)
    assert emulator.locked_mhz() == 900
    set_limit_elsewhere(emulator, 175.0)
    code, _, log = Job(emulator, tmp_path, "0.1").end()
    assert (code, emulator.locked_mhz(), emulator.limit_w()) == (0, 0, 175.0)
    assert "ended without putting it back; the clocks are not locked any more" in log


def test_after_sigkill_a_command_locks_clocks_again_as_somebody_had_them(emulator: Emulator, tmp_path: Path) -> None:
    Job(emulator, tmp_path, "clocks", LOCKED_BEFORE="1200").end(signal.SIGKILL)
    assert emulator.locked_mhz() == 900
    restored = subprocess.run(
        [sys.executable, "-c", "from zeus_flows.cli.gpu import restore_power_command; restore_power_command()"],
        env=emulator.environment(ZEUS_FLOWS_STATE_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert restored.returncode == 0, restored.stderr
    assert "the clocks are locked to 1200 MHz again" in restored.stdout
    assert emulator.locked_mhz() == 1200


def test_a_gpu_that_is_lost_with_its_clocks_locked_keeps_its_journal(emulator: Emulator, tmp_path: Path) -> None:
    job = Job(emulator, tmp_path, "clocks", NVMLEMU_FAIL="nvmlDeviceResetGpuLockedClocks:15:0")
    code, _, log = job.end(signal.SIGTERM, within_s=5.0)
    assert code == -signal.SIGTERM
    assert "its journal is kept" in log
    assert len(Journal(journal_folder(tmp_path)).uuids()) == 1
    assert Job(emulator, tmp_path, "0.1").end()[0] == 0
    assert emulator.locked_mhz() == 0


def test_workers_that_outlive_a_killed_job_do_not_keep_its_gpu(emulator: Emulator, tmp_path: Path) -> None:
    job = Job(emulator, tmp_path, "workers")
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    try:
        following = Job(emulator, tmp_path, "0.1")
        assert following.first == "ready 100 True"
        assert following.end()[0] == 0
    finally:
        os.killpg(job.process.pid, signal.SIGKILL)  # the worker
    assert emulator.limit_w() == PREVIOUS_W


def test_the_second_job_on_a_gpu_observes_only(emulator: Emulator, tmp_path: Path) -> None:
    first = Job(emulator, tmp_path, "wait")
    second = Job(emulator, tmp_path, "0.2")
    assert second.first == "ready 100 False"
    code, out, log = second.end()
    assert code == 0
    assert "span False True" in out  # the joules are not its own
    assert log.count("WARNING") == 1
    assert f"process {first.process.pid}" in log
    assert emulator.limit_w() == 100.0
    first.end(signal.SIGTERM)
    assert emulator.limit_w() == PREVIOUS_W


def test_without_permission_a_job_measures_warns_once_and_exits_with_0(emulator: Emulator, tmp_path: Path) -> None:
    job = Job(emulator, tmp_path, "0.2", NVMLEMU_PERMISSION="deny")
    assert job.first == "ready 200 False"
    code, out, log = job.end()
    assert code == 0
    assert "span True True" in out
    assert log.count("WARNING") == 1
    assert "--cap-add=SYS_ADMIN" in log


def test_readings_that_fail_are_partial_and_the_limit_is_put_back(emulator: Emulator, tmp_path: Path) -> None:
    failing = f"nvmlDeviceGetTotalEnergyConsumption:{pynvml.NVML_ERROR_UNKNOWN}:200"
    job = Job(emulator, tmp_path, "0.5", NVMLEMU_FAIL=failing)
    burn(emulator, 200)
    code, out, _ = job.end()
    assert code == 0
    assert "span False" in out
    assert emulator.limit_w() == PREVIOUS_W


def burn(emulator: Emulator, calls: int) -> None:
    device = Nvml().devices()[0]
    for _ in range(calls):
        device.energy_j()


def test_a_lost_gpu_ends_the_job_within_ten_seconds(emulator: Emulator, tmp_path: Path) -> None:
    lost = f"*:{pynvml.NVML_ERROR_GPU_IS_LOST}:500"
    job = Job(emulator, tmp_path, "wait", NVMLEMU_FAIL=lost)
    assert job.first == "ready 100 True"
    burn(emulator, 500)
    begin = time.monotonic()
    code, out, log = job.end(within_s=10.0)
    assert code == 4
    assert time.monotonic() - begin < 10.0
    assert "DeviceLost" in out
    assert "its journal is kept" in log
    assert len(Journal(journal_folder(tmp_path)).uuids()) == 1
