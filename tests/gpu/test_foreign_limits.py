"""Somebody else changes the power limit while it is ours: another process, on the emulated driver."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.nvml_emulator import Emulator, set_limit_elsewhere
from zeus_flows.errors import DeviceError, PowerPermissionError
from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.doctor import diagnose
from zeus_flows.gpu.guard import PowerGuard
from zeus_flows.gpu.journal import Entry, Journal, journal_folder
from zeus_flows.gpu.nvml import Nvml, NvmlDevice
from zeus_flows.gpu.power_control import PowerControl
from zeus_flows.gpu.putting_back import restore_power

Emulate = Callable[..., Emulator]


def controlled(state_dir: Path) -> tuple[PowerControl, PowerGuard, tuple[NvmlDevice, ...]]:
    devices = Nvml().devices()
    guard = PowerGuard(devices, journal_folder(state_dir))
    assert guard.acquire() is None
    return PowerControl(devices, guard), guard, devices


def test_it_is_noticed_said_once_and_given_way_to(
    emulate: Emulate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    emulator = emulate()
    power, _, devices = controlled(tmp_path)
    power.set_limit_w(150.0)
    assert power.limit_w() == 150.0
    set_limit_elsewhere(emulator, 200.0)
    assert power.limit_w() == 200.0
    set_limit_elsewhere(emulator, 225.0)
    assert power.limit_w() == 225.0
    assert power.foreign_w == 200.0
    with pytest.raises(PowerPermissionError, match="somebody else set the power limit to 200 W"):
        power.set_limit_w(125.0)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert devices[0].uuid in warnings[0].getMessage()
    power.release()
    assert emulator.limit_w() == 225.0
    assert Journal(journal_folder(tmp_path)).uuids() == ()


def test_a_limit_that_nobody_set_is_no_change(emulate: Emulate, tmp_path: Path) -> None:
    emulator = emulate()
    power, guard, _ = controlled(tmp_path)
    assert power.limit_w() == 250.0
    power.set_limit_w(150.0)
    guard.restore()  # as a signal does
    assert power.limit_w() == 250.0
    assert power.foreign_w is None
    power.set_limit_w(150.0)
    power.release()
    assert emulator.limit_w() == 250.0


def test_where_limits_may_only_be_read_it_is_noticed_too(emulate: Emulate, tmp_path: Path) -> None:
    emulator = emulate()
    devices = Nvml().devices()
    power = PowerControl(devices, PowerGuard(devices, journal_folder(tmp_path)), "this process may not")
    assert power.limit_w() == 250.0
    set_limit_elsewhere(emulator, 175.0)
    power.limit_w()
    assert power.foreign_w == 175.0


def test_only_the_gpus_that_are_still_ours_are_put_back(emulate: Emulate, tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_GPUS="v100,v100")
    power, _, _ = controlled(tmp_path)
    power.set_limit_w(150.0)
    set_limit_elsewhere(emulator, 200.0, gpu=1)
    power.release()
    assert (emulator.limit_w(0), emulator.limit_w(1)) == (250.0, 200.0)


def test_a_driver_that_rounds_is_not_somebody_else(emulate: Emulate, tmp_path: Path) -> None:
    emulator = emulate()
    power, _, _ = controlled(tmp_path)
    power.set_limit_w(150.4)
    set_limit_elsewhere(emulator, 150.0)
    power.limit_w()
    assert power.foreign_w is None
    power.release()
    assert emulator.limit_w() == 250.0


def test_a_limit_that_cannot_be_written_down_is_not_set(
    emulate: Emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulate()
    power, _, _ = controlled(tmp_path)
    power.set_limit_w(150.0)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "write", full)
        with pytest.raises(DeviceError, match="journal of power limits and clocks cannot be written"):
            power.set_limit_w(125.0)
    assert emulator.limit_w() == 150.0
    power.release()
    assert emulator.limit_w() == 250.0


def killed(tmp_path: Path, ours_w: tuple[float, ...]) -> NvmlDevice:
    """Return a GPU that a killed process, whose journal says this, left."""
    device = Nvml().devices()[0]
    Journal(journal_folder(tmp_path)).write(Entry(device.uuid, 250.0, clocks_locked=False, pid=1, ours_w=ours_w))
    return device


@pytest.mark.parametrize("limit_w", [175.0, 150.0])
def test_a_process_killed_between_journal_and_change_is_undone(
    emulate: Emulate, tmp_path: Path, limit_w: float
) -> None:
    emulator = emulate()
    device = killed(tmp_path, (175.0, 150.0))
    device.set_power_limit_w(limit_w)
    restored = restore_power(tmp_path, {device.uuid: device}.get)
    assert [item.text for item in restored] == ["the power limit is 250 W again"]
    assert emulator.limit_w() == 250.0


def test_what_somebody_set_after_a_kill_stays(emulate: Emulate, tmp_path: Path) -> None:
    emulator = emulate()
    device = killed(tmp_path, (150.0,))
    set_limit_elsewhere(emulator, 200.0)
    found = {check.name: check for check in diagnose(state_dir=tmp_path, visible=None, zeusd=ZeusdAddress(tmp_path))}
    assert "somebody else" in found["power limit of GPU 0"].means
    restored = restore_power(tmp_path, {device.uuid: device}.get)
    assert [(item.done, item.text) for item in restored] == [
        (True, "somebody else has set the power limit to 200 W since; it stays so")
    ]
    assert emulator.limit_w() == 200.0
    assert Journal(journal_folder(tmp_path)).uuids() == ()


def test_a_journal_of_an_earlier_version_is_put_back_as_before(emulate: Emulate, tmp_path: Path) -> None:
    emulator = emulate()
    device = killed(tmp_path, ())
    set_limit_elsewhere(emulator, 200.0)
    restore_power(tmp_path, {device.uuid: device}.get)
    assert emulator.limit_w() == 250.0


def test_the_journal_says_which_limits_may_be_ours_before_each_change(
    emulate: Emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate()
    power, _, devices = controlled(tmp_path)
    seen: list[tuple[float, ...]] = []
    real = NvmlDevice.set_power_limit_w

    def spy(self: NvmlDevice, watts: float) -> None:
        entry = Journal(journal_folder(tmp_path)).read(devices[0].uuid)
        seen.append(entry.ours_w if entry is not None else ())
        real(self, watts)

    with monkeypatch.context() as patched:
        patched.setattr(NvmlDevice, "set_power_limit_w", spy)
        for watts in (250.0, 225.0, 200.0):
            power.set_limit_w(watts)
    power.release()
    assert seen == [(250.0,), (250.0, 225.0), (225.0, 200.0)]
