from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.gpu.nvml_emulator import Emulator
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import DeviceError, DeviceLost, NoDevice, NotSupported, PowerPermissionError
from zeus_flows.gpu import open_gpus as opening
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.nvml import Nvml, NvmlDevice
from zeus_flows.gpu.open_gpus import open_gpus
from zeus_flows.gpu.simulated import Load

RESNET = Load(3554.0, 238.0, active=0.92, clock_bound=0.52)


def opened(state_dir: Path, device: str = "nvml", **changes: Any) -> Gpus:
    arguments: dict[str, Any] = {
        "workload": None,
        "batch_size": 64,
        "samples_per_epoch": None,
        "state_dir": state_dir,
        "visible": None,
    }
    return open_gpus(device, **(arguments | changes))


def test_an_nvml_gpu_is_a_device(emulate: Callable[..., Emulator]) -> None:
    emulate()
    device: Device = Nvml().devices()[0]
    assert device.model == "Tesla V100-PCIE-32GB"
    assert device.uuid.startswith("GPU-")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, NotSupported),
        (pynvml.NVML_ERROR_NO_PERMISSION, PowerPermissionError),
        (pynvml.NVML_ERROR_GPU_IS_LOST, DeviceLost),
        (pynvml.NVML_ERROR_RESET_REQUIRED, DeviceLost),
        (pynvml.NVML_ERROR_UNKNOWN, DeviceError),
        (pynvml.NVML_ERROR_TIMEOUT, DeviceError),
    ],
)
@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("nvmlDeviceGetTotalEnergyConsumption", NvmlDevice.energy_j),
        ("nvmlDeviceSetPowerManagementLimit", lambda device: device.set_power_limit_w(200.0)),
        ("nvmlDeviceSetGpuLockedClocks", lambda device: device.lock_clocks_mhz(900, 900)),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", NvmlDevice.throttle_reasons),
    ],
)
def test_errors_of_the_driver_become_ours(
    emulate: Callable[..., Emulator],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    error: type[DeviceError],
    function: str,
    call: Callable[[NvmlDevice], object],
) -> None:
    emulate()
    device = Nvml().devices()[0]
    monkeypatch.setenv("NVMLEMU_FAIL", f"{function}:{code}:0")
    with pytest.raises(error) as caught:
        call(device)
    assert type(caught.value) is error
    assert device.uuid in str(caught.value)


def test_power_comes_from_the_instant_sensor_or_else_from_the_averaging_one(
    emulate: Callable[..., Emulator], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulate()
    device = Nvml().devices()[0]
    assert device.power_w() == pytest.approx(34.16)
    assert emulator.calls("nvmlDeviceGetPowerUsage") == 0
    monkeypatch.setenv("NVMLEMU_NOT_SUPPORTED", "nvmlDeviceGetFieldValues")
    older = Nvml().devices()[0]
    assert older.power_w() == pytest.approx(34.16)
    assert emulator.calls("nvmlDeviceGetPowerUsage") == 1


def test_throttle_reasons_are_words(emulate: Callable[..., Emulator]) -> None:
    emulator = emulate()
    device = Nvml().devices()[0]
    assert device.throttle_reasons() == ("idle",)
    emulator.load(RESNET)
    device.set_power_limit_w(100.0)
    assert device.throttle_reasons() == ("power cap",)
    device.set_power_limit_w(250.0)
    assert device.throttle_reasons() == ()


def test_a_job_measures_and_controls_a_gpu_and_puts_it_back(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate(NVMLEMU_GPUS="v100,v100")
    with opened(tmp_path, visible="1") as gpus:
        assert gpus.gpu.model == "Tesla V100-PCIE-32GB"
        assert gpus.energy_source is EnergySource.MEASURED
        assert gpus.sensor == "counter"
        start = gpus.mark()
        gpus.power.set_limit_w(100.0)
        assert (emulator.limit_w(0), emulator.limit_w(1)) == (250.0, 100.0)
        span = gpus.since(start)
        assert span.complete
        assert span.energy_j > 0
    assert emulator.limit_w(1) == 250.0


def test_a_step_asks_the_gpu_nothing(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate()
    with opened(tmp_path) as gpus:
        before = emulator.calls()
        for _ in range(1000):
            gpus.ran(64)
        assert emulator.calls() - before <= 1  # the watch may look once
        before = emulator.calls("nvmlDeviceGetTotalEnergyConsumption")
        gpus.since(gpus.mark())
        assert emulator.calls("nvmlDeviceGetTotalEnergyConsumption") - before == 2


@pytest.mark.parametrize(
    "switches",
    [
        {"NVMLEMU_GPUS": "p100"},
        {"NVMLEMU_FROZEN": "1"},
        {"NVMLEMU_NOT_SUPPORTED": "nvmlDeviceGetTotalEnergyConsumption"},
    ],
    ids=["no counter", "a counter that stands still", "a counter that is not supported"],
)
def test_without_a_counter_that_counts_power_is_sampled(
    emulate: Callable[..., Emulator], tmp_path: Path, switches: dict[str, str]
) -> None:
    emulator = emulate(**switches)
    emulator.load(RESNET)
    with opened(tmp_path) as gpus:
        assert gpus.sensor == "sampled power"
        start, exact = gpus.mark(), emulator.joules()
        while gpus.now_s() - start.time_s < 0.3:
            pass
        span = gpus.since(start)
        assert span.complete
        assert span.energy_j == pytest.approx(emulator.joules() - exact, rel=0.02)


def test_a_gpu_that_tells_neither_energy_nor_power_is_run_on_time_alone(
    emulate: Callable[..., Emulator], tmp_path: Path
) -> None:
    emulate(
        NVMLEMU_NOT_SUPPORTED="nvmlDeviceGetTotalEnergyConsumption,nvmlDeviceGetPowerUsage,nvmlDeviceGetFieldValues"
    )
    with opened(tmp_path) as gpus:
        assert gpus.energy_source is EnergySource.NONE
        assert gpus.power.can_set
        span = gpus.since(gpus.mark())
        assert span.complete
        assert span.energy_j == 0.0


def test_a_gpu_that_cannot_be_limited_is_measured_only(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    power = "nvmlDeviceGetPowerManagementLimit,nvmlDeviceGetPowerManagementLimitConstraints"
    emulate(NVMLEMU_NOT_SUPPORTED=f"{power},nvmlDeviceSetPowerManagementLimit")
    with opened(tmp_path) as gpus:
        assert not gpus.power.can_set
        assert gpus.gpu.max_power_w == 250.0
        assert gpus.since(gpus.mark()).time_s >= 0


def test_without_permission_it_measures_and_warns_once(
    emulate: Callable[..., Emulator], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    emulate(NVMLEMU_PERMISSION="deny")
    opening._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with opened(tmp_path) as gpus:
                assert not gpus.power.can_set
                assert "--cap-add=SYS_ADMIN" in gpus.power.why_not
                assert gpus.energy_source is EnergySource.MEASURED
                with pytest.raises(PowerPermissionError, match="may not set power limits"):
                    gpus.power.set_limit_w(100.0)
    assert len([record for record in caplog.records if "measuring only" in record.message]) == 1


@pytest.mark.parametrize(
    ("switches", "shared"),
    [({}, True), ({"NVMLEMU_GPUS": "a40", "NVMLEMU_MIG": "0"}, False)],
    ids=["declared", "MIG"],
)
def test_a_shared_gpu_keeps_its_limit_and_the_job_runs_on_time_alone(
    emulate: Callable[..., Emulator], tmp_path: Path, switches: dict[str, str], shared: bool
) -> None:
    emulate(**switches)
    with opened(tmp_path, shared=shared) as gpus:
        assert not gpus.power.can_set
        assert gpus.energy_source is EnergySource.NONE
        assert gpus.since(gpus.mark()).complete


def test_readings_that_fail_in_mid_run_make_the_span_partial(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate()
    with opened(tmp_path) as gpus:
        start = gpus.mark()
        monkeypatch.setenv("NVMLEMU_FAIL", f"nvmlDeviceGetTotalEnergyConsumption:{pynvml.NVML_ERROR_UNKNOWN}:0")
        assert not gpus.since(start).complete
        monkeypatch.delenv("NVMLEMU_FAIL")
        assert gpus.since(start).complete  # the counter went on


def test_a_gpu_that_is_lost_does_not_keep_a_job_from_the_others(
    emulate: Callable[..., Emulator], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    emulate(NVMLEMU_GPUS="v100,v100", NVMLEMU_FAIL=f"nvmlDeviceGetUUID:{pynvml.NVML_ERROR_GPU_IS_LOST}:0:0")
    with opened(tmp_path) as gpus:
        assert [device.index for device in gpus.devices] == [1]
    assert "left out" in caplog.text


def test_a_machine_whose_only_gpu_is_lost_says_so(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate(NVMLEMU_FAIL=f"*:{pynvml.NVML_ERROR_GPU_IS_LOST}:0")
    with pytest.raises(DeviceLost):
        opened(tmp_path)


def test_what_is_known_of_a_lost_gpu_can_still_be_had(
    emulate: Callable[..., Emulator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = emulate()
    with opened(tmp_path) as gpus:
        start = gpus.mark()
        while gpus.since(start).energy_j == 0:
            pass
        monkeypatch.setenv("NVMLEMU_FAIL", f"*:{pynvml.NVML_ERROR_GPU_IS_LOST}:0")
        with pytest.raises(DeviceLost):
            gpus.since(start)
        span = gpus.known_since(start)
        assert span.energy_j > 0
        assert not span.complete
    assert emulator.calls() > 0


def test_a_machine_without_a_driver_says_what_to_type(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulator = emulate()
    while emulator.handle.nvmlShutdown() == 0:
        pass
    emulator.state.unlink()
    emulator.state.mkdir()
    with pytest.raises(NoDevice, match="--simulate v100"):
        opened(tmp_path, device="auto")
