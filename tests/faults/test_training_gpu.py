"""Trainings on an emulated GPU that fails, and trainings that fail on a GPU that does not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from tests.builders import decision
from tests.gpu.nvml_emulator import Emulator
from tests.training.conftest import emulate, emulator_library
from tests.training.rig import job_file
from zeus_flows.core.attempt import AttemptFailed
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.gpu.simulated import Load
from zeus_flows.settings import read_settings
from zeus_flows.training.session import Session
from zeus_flows.training.trainer import LocalTrainer

__all__ = ["emulate", "emulator_library"]

BEFORE_W = 237.0
LIMITS_SEEN: list[float] = []


def quick(session: Session, *, epochs: int = 3, breaks: bool = False, fails: str = "") -> None:
    """Train; let an NVML function fail from the middle of the first epoch to the end of the second."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for epoch in session.epochs():
        for i, _ in enumerate(session.steps([0] * 60)):
            if fails and (epoch, i) == (1, 20):
                os.environ["NVMLEMU_FAIL"] = f"{fails}:{pynvml.NVML_ERROR_UNKNOWN}:0"
            if fails and (epoch, i) == (3, 0):
                del os.environ["NVMLEMU_FAIL"]
            time.sleep(0.005)
            LIMITS_SEEN.append(pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3)
        if breaks:
            raise KeyError("no such column")
        session.report_metric(1.0 if epoch == epochs else 0.0)


@pytest.fixture
def train(emulate: Callable[..., Emulator]) -> Callable[..., Observation]:
    def run(**parameters: Any) -> Observation:
        LIMITS_SEEN.clear()
        emulator = emulate()
        emulator.load(Load(0.3, 238.0, active=0.92, clock_bound=0.3))
        pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(0), int(BEFORE_W * 1e3))
        file = job_file(
            device="nvml",
            train={"function": "tests.faults.test_training_gpu:quick", "parameters": parameters},
            power_limit={"profile_seconds": 0.05, "warmup_seconds": 0.01, "profile_all_limits": True},
        )
        try:
            return LocalTrainer(file, read_settings()).train(file.core(), decision(1), None, lambda _: None)
        finally:
            assert emulator.limit_w() == BEFORE_W

    return run


def test_a_training_on_a_good_gpu_profiles_settles_and_puts_the_previous_limit_back(
    train: Callable[..., Observation],
) -> None:
    observed = train()
    assert observed.outcome is Outcome.CONVERGED
    assert observed.energy_complete
    assert observed.profile is not None
    assert len(observed.profile.measurements) == 8  # the limit that was there before is measured too
    assert observed.setting_before in [m.setting for m in observed.profile.measurements]
    assert LIMITS_SEEN[-1] == observed.setting
    assert observed.profile.made_with.startswith("torch 2, driver")


def test_readings_that_fail_end_the_profile_not_the_training(train: Callable[..., Observation]) -> None:
    observed = train(fails="nvmlDeviceGetTotalEnergyConsumption", epochs=4)
    assert (observed.outcome, observed.epochs) == (Outcome.CONVERGED, 4)
    assert observed.profile is None or not observed.profile.complete
    assert LIMITS_SEEN[-1] == BEFORE_W


def test_an_attempt_that_ends_while_readings_fail_is_marked_as_partial(train: Callable[..., Observation]) -> None:
    observed = train(fails="nvmlDeviceGetTotalEnergyConsumption", epochs=2)
    assert observed.outcome is Outcome.CONVERGED
    assert not observed.energy_complete
    del os.environ["NVMLEMU_FAIL"]


def test_a_limit_that_cannot_be_set_ends_the_profile_not_the_training(
    train: Callable[..., Observation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeus_flows.gpu.putting_back._BETWEEN_TRIES_S", 0.01)
    observed = train(fails="nvmlDeviceSetPowerManagementLimit", epochs=4)
    assert (observed.outcome, observed.epochs) == (Outcome.CONVERGED, 4)
    assert observed.profile is None or not observed.profile.complete


def test_a_crash_puts_the_previous_limit_back(train: Callable[..., Observation]) -> None:
    with pytest.raises(AttemptFailed) as caught:
        train(breaks=True)
    assert isinstance(caught.value.__cause__, KeyError)
    assert set(LIMITS_SEEN) != {BEFORE_W}
    assert caught.value.observation.energy_j > 0
