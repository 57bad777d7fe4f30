"""Somebody else sets the power limit while a job trains: on the simulated GPU, and on the emulated driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.builders import decision
from tests.gpu.nvml_emulator import Emulator, set_limit_elsewhere
from tests.training.emulated_job import EmulatedJob, Training
from tests.training.rig import SAMPLES, Loader, job_file, v100
from zeus_flows.core.power_profile import PowerProfile
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.group import Gpus
from zeus_flows.training.checkpoint import Checkpoints
from zeus_flows.training.session import Session

Emulate = Callable[..., Emulator]


def trained(
    gpus: Gpus, change: Callable[[int, int], None], *, epochs: int = 4, known: PowerProfile | None = None, **job: object
) -> Observation:
    """Train, with something happening before each step of each epoch."""
    file = job_file(**job)
    session = Session(file, file.core(), decision(1), gpus, known_profile=known)
    for epoch in session.epochs():
        for step, _batch in enumerate(session.steps(Loader(SAMPLES, 64))):
            change(epoch, step)
        session.report_metric(1.0 if epoch == epochs else 0.1)
    return session.observation()


def at(epoch: int, step: int, device: Device, watts: float) -> Callable[[int, int], None]:
    """Return what sets a limit before one step, past every guard."""

    def change(now: int, number: int) -> None:
        if (now, number) == (epoch, step):
            device.set_power_limit_w(watts)

    return change


def nothing(_epoch: int, _step: int) -> None:
    """Let nothing happen."""


@pytest.fixture
def known(tmp_path: Path) -> PowerProfile:
    """Return what an undisturbed attempt measures."""
    with v100(tmp_path) as gpus:
        profile = trained(gpus, nothing).profile
    assert profile is not None
    assert profile.complete
    return profile


def test_a_span_at_somebody_elses_limit_is_no_reading_of_ours(
    tmp_path: Path, known: PowerProfile, caplog: pytest.LogCaptureFixture
) -> None:
    with v100(tmp_path) as gpus:
        observed = trained(gpus, at(1, 15, gpus.devices[0], 101.0))
        assert gpus.power.limit_w() == 101.0  # we do not fight
    assert observed.profile is not None
    assert not observed.profile.complete
    said = {m.setting: m for m in known.measurements}
    for measured in observed.profile.measurements:
        assert measured.average_power_w == pytest.approx(said[measured.setting].average_power_w, rel=1e-6)
    assert observed.foreign_limit_w == 101.0
    assert observed.setting is None  # nothing was settled on
    assert observed.outcome is Outcome.CONVERGED
    assert observed.energy_complete
    assert "somebody else set the power limit to 101 W" in observed.detail
    noticed = [r for r in caplog.records if "somebody else changed it" in r.getMessage()]
    assert [r.levelno for r in noticed] == [logging.WARNING]


def test_it_is_noticed_after_profiling_too_and_its_energy_is_spent(tmp_path: Path, known: PowerProfile) -> None:
    with v100(tmp_path) as gpus:
        ours = trained(gpus, nothing, known=known)
    with v100(tmp_path) as gpus:
        theirs = trained(gpus, at(3, 5, gpus.devices[0], 101.0), known=known)
    assert ours.foreign_limit_w is None
    assert theirs.foreign_limit_w == 101.0
    assert theirs.setting == ours.setting
    assert theirs.time_s > ours.time_s  # a lower limit, from the third epoch on
    assert theirs.energy_j < ours.energy_j
    assert theirs.profile is not None
    assert {m.setting for m in theirs.profile.measurements} == {m.setting for m in known.measurements}


def test_the_last_step_is_not_too_late_to_notice(tmp_path: Path, known: PowerProfile) -> None:
    with v100(tmp_path) as gpus:
        observed = trained(gpus, at(4, SAMPLES // 64 - 1, gpus.devices[0], 101.0), known=known)
    assert observed.foreign_limit_w == 101.0


def test_an_observer_tells_no_savings_from_it(tmp_path: Path, known: PowerProfile) -> None:
    with v100(tmp_path) as gpus:
        observed = trained(gpus, at(3, 5, gpus.devices[0], 101.0), known=known, mode="observe")
    assert "cannot be told" in observed.detail


def test_a_try_that_goes_on_from_a_checkpoint_keeps_the_mark(tmp_path: Path, known: PowerProfile) -> None:
    file, checkpoints = job_file(), Checkpoints(tmp_path / "checkpoints")

    def session(gpus: Gpus) -> Session:
        return Session(file, file.core(), decision(1), gpus, known_profile=known, checkpoints=checkpoints)

    with v100(tmp_path) as gpus:
        first = session(gpus)
        for epoch in first.epochs():
            gpus.devices[0].set_power_limit_w(101.0 if epoch == 1 else 250.0)
            for _batch in first.steps(Loader(SAMPLES, 64)):
                pass
            first.report_metric(0.1)
            first.save({"epoch": epoch})
            break
    with v100(tmp_path) as gpus:
        second = session(gpus)
        assert second.load() == {"epoch": 1}
        for _ in second.epochs():
            for _batch in second.steps(Loader(SAMPLES, 64)):
                pass
            second.report_metric(1.0)
        assert second.observation().foreign_limit_w == 101.0
    checkpoints.close()


def test_once_limits_are_known_the_limit_is_read_once_in_five_seconds_at_most(emulate: Emulate, tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_CLOCK="virtual", NVMLEMU_UPDATE_MS="20")
    job = EmulatedJob(emulator, tmp_path, Training({64: 4, 128: 4}, evaluation=0.5, every_steps=4), mode="power")
    job.recur(2)
    calls, began_s = emulator.calls("nvmlDeviceGetPowerManagementLimit"), emulator.now()
    job.recur(1)
    passed_s = emulator.now() - began_s
    reads = emulator.calls("nvmlDeviceGetPowerManagementLimit") - calls
    edges = 4 * SAMPLES / 128  # steps and evaluations take turns: far more boundaries than reads
    assert reads <= passed_s / 5 + 15 < edges


class DisturbedJob(EmulatedJob):
    """A job of two epochs; in the second one another process sets the limit."""

    @contextmanager
    def _gpus(self, batch_size: int) -> Iterator[Gpus]:
        self.left_w: float | None = None
        with super()._gpus(batch_size) as gpus:
            yield gpus
        self.left_w = self.emulator.limit_w()

    def _train(self, session: Session) -> None:
        if session.recurrence == 2:
            set_limit_elsewhere(self.emulator, 230.0)
        super()._train(session)


def test_another_process_changes_the_limit_of_the_emulated_driver(emulate: Emulate, tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_CLOCK="virtual", NVMLEMU_UPDATE_MS="20")
    job = DisturbedJob(emulator, tmp_path, Training({64: 3, 128: 3}, evaluation=4.0), mode="power")
    first, second, third = (recurrence.attempts[-1][1] for recurrence in job.recur(3))
    assert (first.foreign_limit_w, second.foreign_limit_w, third.foreign_limit_w) == (None, 230.0, None)
    assert second.energy_complete
    assert first.setting == third.setting
    assert third.setting_before == 230.0
    assert job.left_w == 230.0
