from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from tests.gpu.nvml_emulator import Emulator
from zeus_flows.errors import DeviceError, DeviceLost
from zeus_flows.gpu.guard import NO_PERMISSION, Obstacle, PowerGuard, WhyNot
from zeus_flows.gpu.journal import Entry, Journal, journal_folder
from zeus_flows.gpu.nvml import Nvml, NvmlDevice
from zeus_flows.gpu.putting_back import restore_power

SET = "nvmlDeviceSetPowerManagementLimit"


def guarded(state_dir: Path) -> tuple[PowerGuard, tuple[NvmlDevice, ...]]:
    devices = Nvml().devices()
    guard = PowerGuard(devices, journal_folder(state_dir))
    assert guard.acquire() is None
    return guard, devices


def journal(state_dir: Path) -> Journal:
    return Journal(journal_folder(state_dir))


def test_the_previous_limit_is_on_the_disk_before_the_first_change(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(NVMLEMU_GPUS="v100,v100")
    guard, devices = guarded(tmp_path)
    devices[1].set_power_limit_w(175.0)
    seen: list[float | None] = []

    def spy(self: NvmlDevice, watts: float) -> None:
        entries = [journal(tmp_path).read(device.uuid) for device in devices]
        seen.extend(entry.previous_w for entry in entries if entry)

    with monkeypatch.context() as patched:
        patched.setattr(NvmlDevice, "set_power_limit_w", spy)
        guard.set_power_limit_w(100.0)
    guard.release()
    assert seen == [250.0, 175.0, 250.0, 175.0]


def test_the_journal_is_gone_once_the_limit_is_back(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate()
    guard, _ = guarded(tmp_path)
    guard.set_power_limit_w(100.0)
    assert len(journal(tmp_path).uuids()) == 1
    guard.release()
    guard.release()
    assert emulator.limit_w() == 250.0
    assert journal(tmp_path).uuids() == ()


def test_where_one_gpu_refuses_all_are_put_back(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulate(NVMLEMU_GPUS="v100,v100")
    guard, devices = guarded(tmp_path)
    monkeypatch.setattr("zeus_flows.gpu.putting_back._BETWEEN_TRIES_S", 0.0)
    guard.set_power_limit_w(150.0)
    monkeypatch.setenv("NVMLEMU_FAIL", f"{SET}:{pynvml.NVML_ERROR_UNKNOWN}:0:1")
    with pytest.raises(DeviceError):
        guard.set_power_limit_w(100.0)
    assert emulator.limit_w(0) == 250.0
    assert emulator.limit_w(1) == 150.0
    assert journal(tmp_path).uuids() == (devices[1].uuid,)  # that one could not even be put back


def test_a_driver_that_is_busy_for_a_moment_is_asked_again(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulate()
    guard, _ = guarded(tmp_path)
    guard.set_power_limit_w(100.0)
    failures = [pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)] * 2
    real = pynvml.nvmlDeviceSetPowerManagementLimit

    def flaky(handle: object, milliwatts: int) -> None:
        if failures:
            raise failures.pop()
        real(handle, milliwatts)

    monkeypatch.setattr(pynvml, SET, flaky)
    guard.release()
    assert emulator.limit_w() == 250.0


def test_a_lost_gpu_keeps_its_journal(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulate()
    guard, devices = guarded(tmp_path)
    guard.set_power_limit_w(100.0)
    monkeypatch.setenv("NVMLEMU_FAIL", f"*:{pynvml.NVML_ERROR_GPU_IS_LOST}:0")
    guard.release()
    assert journal(tmp_path).uuids() == (devices[0].uuid,)
    monkeypatch.delenv("NVMLEMU_FAIL")
    restored = restore_power(tmp_path, {devices[0].uuid: devices[0]}.get)
    assert [item.done for item in restored] == [True]
    assert emulator.limit_w() == 250.0


def test_the_second_job_on_a_gpu_does_not_control_it(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate(NVMLEMU_GPUS="v100,v100")
    first, devices = guarded(tmp_path)
    second = PowerGuard(devices[1:], journal_folder(tmp_path))
    text = f"another job controls {devices[1].uuid} (process {os.getpid()})"
    assert second.acquire() == WhyNot(Obstacle.ANOTHER_JOB, text)
    first.release()
    assert second.acquire() is None


def test_permission_is_found_out_by_trying(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_PERMISSION="deny")
    guard = PowerGuard(Nvml().devices(), journal_folder(tmp_path))
    assert guard.acquire() == NO_PERMISSION
    assert emulator.calls(SET) == 1


def test_the_next_job_puts_back_what_a_killed_one_left(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate()
    device = Nvml().devices()[0]
    journal(tmp_path).write(Entry(device.uuid, 200.0, clocks_locked=True, pid=1))
    device.set_power_limit_w(100.0)
    device.lock_clocks_mhz(690, 690)
    guard, _ = guarded(tmp_path)
    assert emulator.limit_w() == 200.0
    guard.set_power_limit_w(125.0)
    guard.release()
    assert emulator.limit_w() == 200.0


def test_a_journal_that_cannot_be_read_is_named_and_nothing_is_changed(
    emulate: Callable[..., Emulator], tmp_path: Path
) -> None:
    emulate()
    device = Nvml().devices()[0]
    path = journal_folder(tmp_path) / f"{device.uuid}.json"
    path.parent.mkdir()
    path.write_text("{")
    why_not = PowerGuard([device], journal_folder(tmp_path)).acquire()
    assert why_not is not None
    assert str(path) in why_not.text
    restored = restore_power(tmp_path, {device.uuid: device}.get)
    assert not restored[0].done
    assert str(path) in restored[0].text


def test_where_no_journal_can_be_kept_nothing_is_changed(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate()
    state_dir = tmp_path / "file"
    state_dir.write_text("in the way")
    why_not = PowerGuard(Nvml().devices(), journal_folder(state_dir)).acquire()
    assert why_not is not None
    assert why_not.obstacle is Obstacle.JOURNAL
    assert "ZEUS_FLOWS_STATE_DIR" in why_not.text


def test_restoring_power_leaves_running_jobs_and_foreign_gpus_alone(
    emulate: Callable[..., Emulator], tmp_path: Path
) -> None:
    emulator = emulate()
    guard, devices = guarded(tmp_path)
    guard.set_power_limit_w(100.0)
    journal(tmp_path).write(Entry("GPU-elsewhere", 200.0, clocks_locked=False, pid=1))
    restored = restore_power(tmp_path, {devices[0].uuid: devices[0]}.get)
    assert [item.done for item in restored] == [False, False]
    assert "left alone" in restored[0].text
    assert "not on this machine" in restored[1].text
    assert emulator.limit_w() == 100.0
    guard.release()


def test_restoring_power_without_permission_says_what_to_type(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate(NVMLEMU_PERMISSION="deny")
    device = Nvml().devices()[0]
    journal(tmp_path).write(Entry(device.uuid, 200.0, clocks_locked=False, pid=1))
    assert "sudo zeus-flows restore-power" in restore_power(tmp_path, {device.uuid: device}.get)[0].text


def test_a_forked_child_neither_restores_nor_keeps_the_lock(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate()
    guard, devices = guarded(tmp_path)
    guard.set_power_limit_w(100.0)
    child = os.fork()
    if child == 0:  # as a data loader's worker that is told to stop
        guard.restore()
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert emulator.limit_w() == 100.0
    guard.release()
    assert PowerGuard(devices, journal_folder(tmp_path)).acquire() is None


def test_signal_handlers_are_as_before_once_the_limits_are_back(
    emulate: Callable[..., Emulator], tmp_path: Path
) -> None:
    emulate()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    guard, _ = guarded(tmp_path)
    guard.set_power_limit_w(100.0)
    assert signal.getsignal(signal.SIGTERM) != before[0]
    guard.release()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


def test_a_signal_amid_a_change_waits_and_is_not_lost(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulate(NVMLEMU_GPUS="v100,v100")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    guard, _ = guarded(tmp_path)
    guard.set_power_limit_w(150.0)
    real = NvmlDevice.set_power_limit_w

    def interrupted(self: NvmlDevice, watts: float) -> None:
        monkeypatch.setattr(NvmlDevice, "set_power_limit_w", real)
        signal.raise_signal(signal.SIGINT)
        real(self, watts)

    monkeypatch.setattr(NvmlDevice, "set_power_limit_w", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            guard.set_power_limit_w(100.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (emulator.limit_w(0), emulator.limit_w(1)) == (250.0, 250.0)
    assert journal(tmp_path).uuids() == ()


def test_a_gpu_that_is_lost_at_the_start_is_told(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate()
    devices = Nvml().devices()
    monkeypatch.setenv("NVMLEMU_FAIL", f"{SET}:{pynvml.NVML_ERROR_GPU_IS_LOST}:0")
    with pytest.raises(DeviceLost):
        PowerGuard(devices, journal_folder(tmp_path)).acquire()


def test_the_state_is_not_open_to_be_changed_by_everybody(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate()
    guard, devices = guarded(tmp_path)
    guard.set_power_limit_w(100.0)
    mode = (journal_folder(tmp_path) / f"{devices[0].uuid}.json").stat().st_mode
    assert not mode & stat.S_IWOTH
    guard.release()


def test_a_limit_that_could_not_be_put_back_is_still_the_previous_one_after_the_next_change(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulate()
    guard, devices = guarded(tmp_path)
    devices[0].set_power_limit_w(237.0)
    guard.set_power_limit_w(200.0)
    monkeypatch.setattr("zeus_flows.gpu.putting_back._BETWEEN_TRIES_S", 0.0)
    monkeypatch.setenv("NVMLEMU_FAIL", f"{SET}:{pynvml.NVML_ERROR_UNKNOWN}:0")
    guard.restore()
    assert emulator.limit_w() == 200.0
    monkeypatch.delenv("NVMLEMU_FAIL")
    guard.set_power_limit_w(150.0)
    guard.release()
    assert emulator.limit_w() == 237.0
