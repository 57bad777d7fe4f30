"""A session that tunes clocks: the same way as power limits, on simulated GPUs and on the emulated driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.nvml_emulator import Emulator
from tests.training.emulated_job import EmulatedJob, SimulatedJob, Training
from tests.training.rig import attempt, fitted_gpu, job_file
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.power_profile import Knob, PowerProfile
from zeus_flows.core.records import Observation
from zeus_flows.gpu.simulated import CHIPS, Load

RESNET50 = Load(3554.0, 238.0, active=0.92, clock_bound=0.52)
TRAINING = Training(epochs={32: 6, 64: 4, 128: 5}, evaluation=2.0)


def by_clocks(load: Load = RESNET50, chip: str = "v100", **changes: object) -> tuple[Job, Observation]:
    file = job_file(knob="clocks", **changes)
    observed, _ = attempt(fitted_gpu(chip, load, Knob.CLOCKS), 0.5, 0.95, file=file)
    return file.core(), observed


def cheapest(job: Job, load: Load = RESNET50, chip: str = "v100") -> float:
    """Return the least cost of an epoch at any clock that the GPU has, by the chip's model alone."""
    low, high = CHIPS[chip].clocks_mhz
    limit_w = CHIPS[chip].limits_w[1]
    return min(cost(job, mhz / high, load, chip, limit_w) for mhz in range(high, low - 1, -15))


def cost(job: Job, f: float, load: Load, chip: str, limit_w: float) -> float:
    seconds, watts = CHIPS[chip].epoch(load, limit_w, f)
    return job.objective_eta * watts * seconds + (1 - job.objective_eta) * limit_w * seconds


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("chip", ["v100", "a40", "rtx6000"])
def test_the_clock_that_is_settled_on_costs_little_more_than_the_best_of_all(chip: str, eta: float) -> None:
    job, observed = by_clocks(chip=chip, eta=eta)
    assert observed.setting is not None
    settled = cost(job, observed.setting / CHIPS[chip].clocks_mhz[1], RESNET50, chip, CHIPS[chip].limits_w[1])
    assert settled <= 1.01 * cheapest(job, chip=chip)


def test_a_handful_of_clocks_is_measured_and_power_limits_are_left_alone() -> None:
    gpus = fitted_gpu("v100", RESNET50, Knob.CLOCKS)
    observed, epochs = attempt(gpus, 0.5, 0.95, file=job_file(knob="clocks", eta=1.0))
    assert observed.profile is not None
    assert observed.profile.complete
    assert 3 <= len(observed.profile.measurements) <= 8
    assert (observed.knob, observed.setting_before) == (Knob.CLOCKS, 1380.0)
    assert 135.0 < (observed.setting or 0.0) < 1380.0
    assert {report.knob for report in epochs} == {Knob.CLOCKS}
    assert gpus.power.limit_w() == 250.0


def test_a_bound_on_slowdown_holds_for_clocks() -> None:
    section = {"choose_by": "max_slowdown", "slowdown": 1.05}
    _, observed = by_clocks(power_limit=section)
    assert isinstance(observed.profile, PowerProfile)
    speeds = {m.setting: m.samples_per_s for m in observed.profile.measurements}
    assert observed.setting is not None
    assert speeds[observed.setting] * 1.05 >= max(speeds.values())
    assert observed.setting < 1380.0


def test_observing_profiles_clocks_and_trains_as_ever() -> None:
    _, observed = by_clocks(mode=Mode.OBSERVE, eta=1.0)
    assert observed.setting == 1380.0
    assert "MHz instead of 1380 MHz it would have taken" in observed.detail


def test_a_gpu_whose_clocks_cannot_be_locked_is_measured_only() -> None:
    _, observed = by_clocks(chip="p100")
    assert observed.converged
    assert (observed.setting, observed.setting_before) == (None, None)
    assert observed.energy_j > 0


@pytest.mark.parametrize("emulated", [False, True])
def test_a_job_learns_and_saves_with_clocks_as_it_does_with_power_limits(
    emulated: bool, emulate: Callable[..., Emulator], tmp_path: Path
) -> None:
    if emulated:
        emulator = emulate(NVMLEMU_CLOCK="virtual")
        job: EmulatedJob = EmulatedJob(emulator, tmp_path, TRAINING, knob="clocks")
    else:
        job = SimulatedJob(tmp_path, TRAINING, knob="clocks")
    last = job.recur(8)[-1].attempts[-1][1]
    assert last.knob is Knob.CLOCKS
    assert last.setting is not None
    assert last.profiling_time_s == 0.0 or last.profile is not None
    state = job.ledger.history().state
    assert {p.gpu.knob for p in state.profiles.values()} == {Knob.CLOCKS}
    if emulated:
        assert emulator.locked_mhz() == 0
        assert emulator.limit_w() == 250.0


def test_changing_the_knob_keeps_epochs_and_profiles_anew(tmp_path: Path) -> None:
    limits = SimulatedJob(tmp_path, TRAINING)
    limits.recur(6)
    known = limits.ledger.history().state
    clocks = SimulatedJob(tmp_path, TRAINING, knob="clocks")
    clocks.steps.ledger = limits.ledger
    last = clocks.recur(1)[-1].attempts[-1][1]
    assert last.knob is Knob.CLOCKS
    assert last.profiling_time_s > 0
    after = limits.ledger.history().state
    assert after.profile(last.batch_size, limits.gpu) == known.profile(last.batch_size, limits.gpu)
    assert after.profile(last.batch_size, clocks.gpu) is not None
    assert after.default_epochs.count >= known.default_epochs.count > 0
