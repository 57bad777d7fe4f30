"""A script that knows nothing of us, and tells of no step, on the emulated driver: a real process on a real clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.builders import decision
from tests.gpu.nvml_emulator import Emulator
from tests.training.rig import job_file
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.power_profile import Knob
from zeus_flows.core.records import Observation
from zeus_flows.gpu.open_gpus import open_gpus
from zeus_flows.training.forms.command import find_command
from zeus_flows.training.session import Session

pytestmark = pytest.mark.slow

#: What a GPU does with a script: a kernel that follows the clock, then a wait for the next batch.
SCRIPT = """
import ctypes, os, time

gpu = ctypes.CDLL(os.environ["LIBRARY"])  # the driver, as CUDA has it
gpu.nvmlInit_v2()
gpu.nvmlEmuEpochSeconds.restype = ctypes.c_double
number = ctypes.c_double


def runs(seconds, watts, follows):
    gpu.nvmlEmuSetLoad(0, number(seconds), number(watts), number(1.0), number(follows))
    time.sleep(gpu.nvmlEmuEpochSeconds(0))


for epoch in range(12):
    for step in range({steps} if epoch == 0 else {later}):
        runs({busy}, 240.0, 0.4)
        runs({waits}, 90.0, 0.0)
    print("val_acc=%.2f" % (0.95 if os.path.exists("enough") else 0.5), flush=True)
"""


def trained(
    emulator: Emulator, folder: Path, knob: Knob, *, steps: int, busy: float = 0.4, waits: float = 0.2
) -> Observation:
    (folder / "train.py").write_text(SCRIPT.format(steps=steps, later=min(steps, 9), busy=busy, waits=waits))
    file = job_file(
        knob=knob,
        eta=1.0,
        max_epochs=12,
        train={
            "command": [sys.executable, "train.py", "{batch_size}"],
            "folder": str(folder),
            "metric": {"pattern": "val_acc=([0-9.]+)"},
            "environment": {"LIBRARY": str(emulator.library)},
        },
        power_limit={"profile_seconds": 1.0, "warmup_seconds": 0.2, "limits": [250, 150]},
    )
    with open_gpus(
        "nvml",
        workload=None,
        batch_size=64,
        samples_per_epoch=None,
        state_dir=folder / "state",
        visible=None,
        knob=knob,
    ) as gpus:
        seen: list[float | None] = []

        def report(epoch: EpochReport) -> None:
            seen.append(epoch.setting)
            if len(seen) > 2 and seen[-1] == seen[-2]:  # it has settled
                (folder / "enough").touch()

        session = Session(file, file.core(), decision(1), gpus, report=report)
        find_command(file)(session, gpus=gpus)
        return session.observation()


def test_its_clocks_are_tuned_by_its_period_and_reset(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_UPDATE_MS="20")
    observed = trained(emulator, tmp_path, Knob.CLOCKS, steps=30)
    assert observed.converged
    assert observed.profile is not None
    assert observed.profile.complete
    assert 3 <= len(observed.profile.measurements) <= 8
    speeds = [m.samples_per_s for m in observed.profile.measurements]
    assert all(lower <= 1.02 * higher for higher, lower in pairwise(speeds)), "a lower clock is no faster"
    slowest = observed.profile.measurements[-1].setting / 1380.0
    assert speeds[-1] / speeds[0] == pytest.approx(0.6 / (0.2 + 0.4 * (0.6 + 0.4 / slowest)), rel=0.05)
    assert observed.setting is not None
    assert observed.setting < 1380.0, "half of its time does not follow the clock"
    assert (emulator.locked_mhz(), emulator.limit_w()) == (0, 250.0)


def test_its_power_limits_are_profiled_without_progress_lines(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_UPDATE_MS="20")
    observed = trained(emulator, tmp_path, Knob.POWER_LIMIT, steps=30)
    assert observed.profile is not None
    assert [m.setting for m in observed.profile.measurements] == [250.0, 150.0]
    assert observed.setting is not None
    assert emulator.limit_w() == 250.0


def test_without_a_period_an_epoch_is_a_step(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_UPDATE_MS="20")
    observed = trained(emulator, tmp_path, Knob.CLOCKS, steps=1, busy=1.5, waits=0.0)
    assert observed.converged
    assert observed.samples_per_epoch == 1
    assert observed.profile is not None
    assert emulator.locked_mhz() == 0
