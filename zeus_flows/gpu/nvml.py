"""Real GPUs, through NVIDIA's management library (pynvml). Milliwatts and millijoules end here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from ctypes import byref, c_ulonglong
from typing import Any, TypeVar

import pynvml

from zeus_flows.core.records import EnergySource
from zeus_flows.errors import (
    ConfigError,
    DeviceError,
    DeviceLost,
    LimitOutOfRange,
    NoDevice,
    NotSupported,
    PowerPermissionError,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

#: MAXPOWER of eq. 2 for GPUs (of laptops, mostly) that do not tell a power limit.
NOMINAL_W = 250.0

_KINDS: dict[int, type[DeviceError]] = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: NotSupported,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: NotSupported,
    pynvml.NVML_ERROR_NO_PERMISSION: PowerPermissionError,
    pynvml.NVML_ERROR_GPU_IS_LOST: DeviceLost,
    pynvml.NVML_ERROR_RESET_REQUIRED: DeviceLost,
}

_REASONS = {
    pynvml.nvmlClocksThrottleReasonGpuIdle: "idle",
    pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting: "clocks set by an application",
    pynvml.nvmlClocksThrottleReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "thermal slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hardware thermal slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksThrottleReasonDisplayClockSetting: "display clocks",
}


class NvmlDevice:
    """One NVIDIA GPU. Power, utilisation and throttle reasons may be read from any thread, as NVML allows."""

    energy_source = EnergySource.MEASURED

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.index: int = self._call("name itself", pynvml.nvmlDeviceGetIndex)
        self.uuid: str = self._call("name itself", pynvml.nvmlDeviceGetUUID)
        self.model: str = self._call("name itself", pynvml.nvmlDeviceGetName)
        self._instant_power: bool | None = None
        self._total = c_ulonglong()
        self._total_at = byref(self._total)
        self._read_total = getattr(pynvml.nvmlLib, "nvmlDeviceGetTotalEnergyConsumption", None)

    @property
    def has_power_limits(self) -> bool:
        """Whether it knows power limits at all."""
        try:
            self._call("tell its power limits", pynvml.nvmlDeviceGetPowerManagementLimitConstraints)
        except NotSupported:
            return False
        return True

    def power_limit_range_w(self) -> tuple[float, float]:
        """Return the least and the greatest power limit it accepts; one nominal limit where it cannot be limited."""
        try:
            low, high = self._call("tell its power limits", pynvml.nvmlDeviceGetPowerManagementLimitConstraints)
        except NotSupported:
            return NOMINAL_W, NOMINAL_W
        return low / 1e3, high / 1e3

    def power_limit_w(self) -> float:
        """Return the power limit that was set last."""
        try:
            return float(self._call("tell its power limit", pynvml.nvmlDeviceGetPowerManagementLimit)) / 1e3
        except NotSupported:
            return NOMINAL_W

    def enforced_power_limit_w(self) -> float:
        """Return the limit in force, which thermal or board limits may keep below the one set."""
        try:
            return float(self._call("tell its power limit", pynvml.nvmlDeviceGetEnforcedPowerLimit)) / 1e3
        except NotSupported:
            return self.power_limit_w()

    def set_power_limit_w(self, watts: float) -> None:
        """Set the power limit. It outlives the process: go through the power guard."""
        try:
            pynvml.nvmlDeviceSetPowerManagementLimit(self.handle, round(watts * 1e3))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                low, high = self.power_limit_range_w()
                raise LimitOutOfRange(
                    f"{self.model} accepts power limits from {low:g} to {high:g} W, not {watts:g} W"
                ) from error
            raise self._error("set a power limit", error) from error

    def energy_j(self) -> float:
        """Return the total-energy counter (Volta and later)."""
        # Past pynvml's wrapper, which takes as long as the driver: this call is at both edges of every span.
        if self._read_total is None:
            raise NotSupported(f"the driver of {self.model} ({self.uuid}) has no energy counter")
        status = self._read_total(self.handle, self._total_at)
        if status:
            raise self._error("read the energy counter", pynvml.NVMLError(status))
        return self._total.value / 1e3

    def power_w(self) -> float:
        """Return the power drawn now: instantaneous where the GPU offers it, else as its sensor averages."""
        if self._instant_power is None:
            self._instant_power = self._has_instant_power()
        if not self._instant_power:
            return float(self._call("read power", pynvml.nvmlDeviceGetPowerUsage)) / 1e3
        field = self._call("read power", pynvml.nvmlDeviceGetFieldValues, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
        if field.nvmlReturn != pynvml.NVML_SUCCESS:
            raise self._error("read power", pynvml.NVMLError(field.nvmlReturn))
        return float(field.value.uiVal) / 1e3

    def utilisation_percent(self) -> tuple[float, float]:
        """Return the share of the sensor's last period in which multiprocessors and memory were busy."""
        rates = self._call("tell its utilisation", pynvml.nvmlDeviceGetUtilizationRates)
        return float(rates.gpu), float(rates.memory)

    def graphics_clocks_mhz(self) -> tuple[int, ...]:
        """Return the graphics clocks that it can be locked to, greatest first, at the memory clock it trains at.

        Raises:
            NotSupported: it cannot be locked (GPUs before Volta), or does not tell its clocks.
        """
        if self._architecture() < pynvml.NVML_DEVICE_ARCH_VOLTA:
            raise NotSupported(f"{self.model} cannot lock its clocks: GPUs from Volta on can")
        told = "tell its clocks"
        memory = max(self._call(told, pynvml.nvmlDeviceGetSupportedMemoryClocks), default=0)  # the one under load
        clocks = self._call(told, pynvml.nvmlDeviceGetSupportedGraphicsClocks, memory)
        if not clocks:
            raise NotSupported(f"{self.model} ({self.uuid}) does not tell which clocks it has")
        return tuple(sorted({int(mhz) for mhz in clocks}, reverse=True))

    def clocks_mhz(self) -> tuple[int, int]:
        """Return its graphics and memory clocks now."""
        kinds = (pynvml.NVML_CLOCK_GRAPHICS, pynvml.NVML_CLOCK_MEM)
        graphics, memory = (self._call("tell its clocks", pynvml.nvmlDeviceGetClockInfo, kind) for kind in kinds)
        return int(graphics), int(memory)

    def lock_clocks_mhz(self, low: int, high: int) -> None:
        """Lock the graphics clocks to a range. It outlives the process: go through the power guard."""
        try:
            pynvml.nvmlDeviceSetGpuLockedClocks(self.handle, low, high)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                raise NotSupported(f"{self.model} does not lock its clocks to {low}-{high} MHz") from error
            raise self._error("lock its clocks", error) from error

    def reset_clocks(self) -> None:
        """Undo `lock_clocks_mhz`."""
        self._call("reset its clocks", pynvml.nvmlDeviceResetGpuLockedClocks)

    def throttle_reasons(self) -> tuple[str, ...]:
        """Return why the clocks are below what was asked for."""
        bits = self._call("tell throttle reasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return tuple(text for bit, text in _REASONS.items() if bits & bit)

    def synchronize(self) -> None:
        """Return at once: NVML queues nothing. `Gpus` synchronises CUDA."""

    def mig(self) -> bool:
        """Return whether the GPU is cut into MIG slices, which cannot be measured."""
        try:
            return bool(self._call("tell its MIG mode", pynvml.nvmlDeviceGetMigMode)[0])
        except NotSupported:
            return False

    def pci_address(self) -> str:
        """Return its address as `lspci -D` writes it, the same in every container; empty where the driver is silent."""
        try:
            told = self._call("tell its PCI address", pynvml.nvmlDeviceGetPciInfo).busId
        except NotSupported:
            return ""
        domain, _, rest = str(told.decode() if isinstance(told, bytes) else told).lower().partition(":")
        return f"{int(domain, 16):04x}:{rest}"

    def count(self) -> int:
        """Return how many GPUs this process sees."""
        return int(pynvml.nvmlDeviceGetCount())

    def process_ids(self) -> tuple[int, ...]:
        """Return the processes that compute on it, by the host's numbers: in a container they are not ours."""
        return tuple(p.pid for p in self._call("list processes", pynvml.nvmlDeviceGetComputeRunningProcesses))

    def _architecture(self) -> int:
        try:
            return int(self._call("tell its architecture", pynvml.nvmlDeviceGetArchitecture))
        except NotSupported:  # drivers that do not tell know newer GPUs only
            return int(pynvml.NVML_DEVICE_ARCH_VOLTA)

    def _has_instant_power(self) -> bool:
        try:
            field = self._call("read power", pynvml.nvmlDeviceGetFieldValues, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
        except NotSupported:
            return False
        return bool(field.nvmlReturn == pynvml.NVML_SUCCESS)

    def _call(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(self.handle, *arguments)
        except pynvml.NVMLError as error:
            raise self._error(what, error) from error

    def _error(self, what: str, error: pynvml.NVMLError) -> DeviceError:
        kind = _KINDS.get(error.value, DeviceError)
        name = getattr(self, "model", "a GPU")
        return kind(f"{name} ({getattr(self, 'uuid', 'unnamed')}) could not {what}: {error}")


class Nvml:
    """The library, from opening to `close`.

    Raises:
        NoDevice: there is no driver, or no GPU.
    """

    def __init__(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoDevice(f"NVIDIA's driver does not answer: {error}") from error
        self._open = True

    def close(self) -> None:
        """Let go of the library. Safe to call twice."""
        if self._open:
            self._open = False
            pynvml.nvmlShutdown()

    def driver(self) -> str:
        """Return the driver's version."""
        return str(pynvml.nvmlSystemGetDriverVersion())

    def devices(self) -> tuple[NvmlDevice, ...]:
        """Return the machine's GPUs in the driver's order, which is that of the PCI bus.

        A GPU that is lost, or that this process may not use, is left out, as CUDA does: it is not ours to fail on.

        Raises:
            DeviceError: none of them answers.
        """
        devices: list[NvmlDevice] = []
        failures: list[DeviceError] = []
        try:
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            raise DeviceError(f"NVIDIA's driver cannot count its GPUs: {error}") from error
        for i in range(count):
            try:
                devices.append(NvmlDevice(pynvml.nvmlDeviceGetHandleByIndex(i)))
            except pynvml.NVMLError as error:
                failures.append(_KINDS.get(error.value, DeviceError)(f"GPU {i} does not answer: {error}"))
            except DeviceError as error:
                failures.append(error)
        if failures and not devices:
            raise failures[0]
        for failure in failures:
            log.warning("left out: %s", failure)
        return tuple(devices)

    def parent_of_slice(self, mig: str) -> str:
        """Return the UUID of the GPU that a MIG slice (`MIG-...`, as CUDA_VISIBLE_DEVICES names it) is cut from."""
        if mig.startswith("MIG-GPU-"):  # drivers before 470: MIG-GPU-<uuid>/<gpu instance>/<compute instance>
            return mig.removeprefix("MIG-").split("/")[0]
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(mig)
            return NvmlDevice(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)).uuid
        except pynvml.NVMLError as error:
            raise ConfigError(f"{mig} of CUDA_VISIBLE_DEVICES is not a MIG slice of this machine: {error}") from error
