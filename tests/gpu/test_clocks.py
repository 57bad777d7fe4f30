"""The knob `clocks`: what can be locked, by whom, and what is done where it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.nvml_emulator import Emulator, set_limit_elsewhere
from zeus_flows.core.power_profile import Knob
from zeus_flows.errors import PowerPermissionError
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.open_gpus import open_gpus, untunable


def opened(tmp_path: Path, device: str = "nvml", locked_before_mhz: int | None = None, **changes: object) -> Gpus:
    fields: dict[str, object] = {"visible": None, "shared": False, "count": None} | changes
    return open_gpus(
        device,
        workload=None,
        batch_size=64,
        samples_per_epoch=None,
        state_dir=tmp_path,
        knob=Knob.CLOCKS,
        locked_before_mhz=locked_before_mhz,
        **fields,  # type: ignore[arg-type]
    )


def test_the_gpus_of_a_job_that_tunes_clocks_count_as_others(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate()
    with opened(tmp_path) as gpus:
        assert gpus.gpu.key == "Tesla V100-PCIE-32GB x1, clocks"
        assert (gpus.control.settings[0], gpus.control.can_set, untunable(gpus)) == (1380.0, True, "")


def test_several_gpus_are_locked_alike_and_reset(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_GPUS="v100,v100")
    with opened(tmp_path, count=2) as gpus:
        gpus.control.set(1005.0)
        assert [emulator.locked_mhz(gpu) for gpu in (0, 1)] == [1005, 1005]
    assert [emulator.locked_mhz(gpu) for gpu in (0, 1)] == [0, 0]


def test_where_one_gpu_refuses_none_stays_locked(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_GPUS="v100,v100", NVMLEMU_FAIL="nvmlDeviceSetGpuLockedClocks:4:0:1")
    with opened(tmp_path, count=2) as gpus, pytest.raises(PowerPermissionError):
        gpus.control.set(1005.0)
    assert [emulator.locked_mhz(gpu) for gpu in (0, 1)] == [0, 0]


def test_a_lock_that_the_job_file_names_is_the_greatest_setting_and_is_put_back(
    emulate: Callable[..., Emulator], tmp_path: Path
) -> None:
    emulator = emulate()
    with opened(tmp_path, locked_before_mhz=1200) as gpus:
        assert (gpus.control.read(), gpus.control.settings[:2]) == (1200.0, (1200.0, 1185.0))
        gpus.control.set(900.0)
        gpus.control.set(1200.0)
        assert emulator.locked_mhz() == 1200, "not reset: somebody wants it so"
        gpus.control.set(900.0)
    assert emulator.locked_mhz() == 1200


def test_a_job_that_never_locks_clocks_touches_nobody_s_lock(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate()
    with opened(tmp_path) as gpus:
        gpus.devices[0].lock_clocks_mhz(1110, 1110)
        gpus.control.set(gpus.control.settings[0])
    assert emulator.locked_mhz() == 1110


def test_a_gpu_before_volta_is_measured_only(
    emulate: Callable[..., Emulator], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    emulate(NVMLEMU_GPUS="p100")
    with caplog.at_level(logging.WARNING), opened(tmp_path) as gpus:
        assert not gpus.control.can_set
        assert gpus.control.settings == ()
        assert untunable(gpus) == "no clocks"
    assert "clocks stay as they are, measuring only: Tesla P100-PCIE-16GB cannot lock its clocks" in caplog.text


def test_no_permission_is_told_once_and_measured_only(
    emulate: Callable[..., Emulator], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    emulate(NVMLEMU_PERMISSION="deny")
    with caplog.at_level(logging.WARNING), opened(tmp_path) as gpus:
        assert (gpus.control.can_set, untunable(gpus)) == (False, "no permission")
        with pytest.raises(PowerPermissionError):
            gpus.control.set(900.0)
    assert "may not set power limits or clocks" in caplog.text


def test_clocks_are_tuned_on_a_gpu_that_has_no_power_limits(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    limits = "GetPowerManagementLimitConstraints,nvmlDeviceGetPowerManagementLimit,nvmlDeviceSetPowerManagementLimit"
    emulator = emulate(NVMLEMU_NOT_SUPPORTED=f"nvmlDevice{limits}")
    with opened(tmp_path) as gpus:
        gpus.control.set(900.0)
        assert emulator.locked_mhz() == 900
    assert emulator.locked_mhz() == 0


def test_a_shared_gpu_s_clocks_are_the_others_too(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate()
    with opened(tmp_path, shared=True) as gpus:
        assert (gpus.control.can_set, untunable(gpus)) == (False, "shared")


def test_a_power_limit_that_somebody_else_sets_is_noticed(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate()
    with opened(tmp_path) as gpus:
        gpus.control.read()
        gpus.control.set(900.0)
        set_limit_elsewhere(emulator, 180.0)
        gpus.control.read()
        assert (gpus.control.foreign_w, gpus.control.can_set) == (180.0, False)
    assert (emulator.locked_mhz(), emulator.limit_w()) == (0, 180.0)


def test_a_simulated_gpu_has_the_knob_too(tmp_path: Path) -> None:
    with opened(tmp_path, "simulated-a40") as gpus:
        assert gpus.gpu.key == "Simulated A40 x1, clocks"
        gpus.control.set(1005.0)
        assert gpus.devices[0].clocks_mhz() == (1005, 7251)
    with opened(tmp_path, "simulated-p100") as gpus:
        assert not gpus.control.can_set
