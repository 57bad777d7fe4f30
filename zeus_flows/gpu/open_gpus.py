"""From what a job file says about its device to the GPUs it trains on."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zeus_flows.core.power_profile import Knob
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import ConfigError, DeviceError, NoDevice, NotSupported
from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.control import control_of
from zeus_flows.gpu.device import Clock, Device
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.guard import NO_PERMISSION, Obstacle, PowerGuard, WhyNot
from zeus_flows.gpu.journal import journal_folder
from zeus_flows.gpu.meter import Counter, DeviceCounter, Meter, SampledCounter, Sampler, update_period_s
from zeus_flows.gpu.power_control import PowerControl
from zeus_flows.gpu.putting_back import restore_power
from zeus_flows.gpu.simulated import CHIPS, SimulatedDevice, SimulatedWork, VirtualClock, Workload
from zeus_flows.gpu.visible import visible_gpus
from zeus_flows.gpu.watch import Watch

if TYPE_CHECKING:
    from zeus_flows.gpu.nvml import Nvml, NvmlDevice

log = logging.getLogger(__name__)

#: What a job file may say, besides `auto`, `nvml` and `zeusd`.
SIMULATED = tuple(f"simulated-{kind}" for kind in sorted(CHIPS))

NO_GPU = (
    "no NVIDIA GPU can be used on this machine ({why}). To run on a simulated one type `--simulate v100`, "
    "or write `device: simulated-v100` in the job file; `zeus-flows doctor` says what was looked for."
)
SHARED = WhyNot(Obstacle.SHARED, "the GPU is shared with others (MPS or time slicing): its power limit is theirs too")
SLICED = WhyNot(Obstacle.SHARED, "the GPU is cut into slices (MIG): its power limit is the others' too")


def open_gpus(
    device: str,
    *,
    workload: Workload | None,
    batch_size: int,
    samples_per_epoch: int | None,
    state_dir: Path,
    visible: str | None,
    shared: bool = False,
    count: int | None = None,
    zeusd: ZeusdAddress | None = None,
    knob: Knob = Knob.POWER_LIMIT,
    locked_before_mhz: int | None = None,
) -> Gpus:
    """Return the GPUs of one job; use them in a `with` statement, which restores their power limits and clocks.

    What a killed process left on this machine is put back first.

    Args:
        device: `auto`, `nvml`, `zeusd`, or a simulated one such as `simulated-v100`.
        workload: What a simulated GPU runs; None: the defaults. Ignored on real GPUs.
        batch_size: The batch size over all GPUs; only simulated GPUs want it.
        samples_per_epoch: Size of the training set; may be None where `Gpus.samples_per_epoch` is set later.
        state_dir: Where the journal of power limits and the locks are.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        shared: The GPU is shared (MPS, time slicing): set no limits and trust no joules. MIG is noticed.
        count: The job's world size. None: every GPU that `visible` names; the first one where it is not set.
        zeusd: Where the Zeus daemon is, for `zeusd`, and for `auto` where this process may not set limits.
        knob: What the job turns.
        locked_before_mhz: What somebody has locked the graphics clocks to; None: they are not locked.

    Raises:
        NoDevice: there is no such GPU here; the text says what to type.
        ConfigError: `device` or `visible` names what does not exist.
    """
    if device in ("auto", "nvml", "zeusd"):
        opener = _Opener(state_dir, visible, count, knob, locked_before_mhz)
        return opener.open(device, shared=shared, zeusd=zeusd or ZeusdAddress())
    kind = device.removeprefix("simulated-")
    if device not in SIMULATED:
        raise ConfigError(f"there is no device {device!r}; there are auto, nvml, zeusd, {', '.join(SIMULATED)}")
    clock = VirtualClock()
    devices = tuple(SimulatedDevice(kind, clock, index=i) for i in range(count or 1))
    work = SimulatedWork(
        devices, clock, workload or Workload(), batch_size=batch_size, samples_per_epoch=samples_per_epoch
    )
    return group_of_simulated(devices, clock, work=work, shared=shared, knob=knob, locked_before_mhz=locked_before_mhz)


def group_of_simulated(
    devices: Sequence[SimulatedDevice],
    clock: VirtualClock,
    *,
    work: SimulatedWork | None = None,
    shared: bool = False,
    knob: Knob = Knob.POWER_LIMIT,
    locked_before_mhz: int | None = None,
) -> Gpus:
    """Return simulated GPUs as one group."""
    guard = PowerGuard(devices, folder=None, locked_before_mhz=locked_before_mhz)
    power = PowerControl(devices, guard, SHARED.text if shared else "")
    return Gpus(
        devices,
        meter=Meter(
            [] if shared else [DeviceCounter(device) for device in devices],
            [] if shared else [device.power_limit_range_w()[1] for device in devices],
            clock,
        ),
        power=power,
        control=control_of(knob, power, devices, locked_before_mhz=locked_before_mhz),
        clock=clock,
        energy_source=EnergySource.NONE if shared else EnergySource.SIMULATED,
        sensor="none" if shared else "model",
        work=work,
    )


def untunable(gpus: Gpus) -> str:
    """Return why no setting can be tuned, or none be judged, in a word or two; empty where it can."""
    why_not = gpus.control.why_not
    for known, word in ((SLICED, "MIG"), (SHARED, "shared"), (NO_PERMISSION, "no permission")):
        if why_not.startswith(known.text):
            return word
    if gpus.control.knob is Knob.CLOCKS and not gpus.control.has_settings:
        return "no clocks"
    if not gpus.control.can_set:
        return "other"
    return "no sensor" if gpus.sensor == "none" else ""


def synchronize_cuda() -> None:
    """Wait for the work queued on CUDA devices, where this process has used any."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            torch.cuda.synchronize(i)


def group_of_real(
    devices: Sequence[Device],
    *,
    guard: PowerGuard,
    why_not: WhyNot | None,
    shared: bool,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    watch_s: float | None = 2.0,
    synchronize: Callable[[], None] | None = synchronize_cuda,
    on_close: Sequence[Callable[[], None]] = (),
    knob: Knob = Knob.POWER_LIMIT,
    locked_before_mhz: int | None = None,
) -> Gpus:
    """Return real GPUs as one group, measured by their counters or, where those do not count, by sampling."""
    counters: list[Counter] = []
    sensor, cleanup = "none", list(on_close)
    if not shared:
        counters, sampler, sensor = _counters(devices, clock, sleep)
        if sampler is not None:
            cleanup.append(sampler.close)
    power = PowerControl(devices, guard, why_not.text if why_not is not None else "")
    return Gpus(
        devices,
        meter=Meter(counters, [device.power_limit_range_w()[1] for device in devices[: len(counters)]], clock),
        power=power,
        control=control_of(knob, power, devices, locked_before_mhz=locked_before_mhz),
        clock=clock,
        energy_source=devices[0].energy_source if counters else EnergySource.NONE,
        sensor=sensor,
        alone=why_not is None or why_not.obstacle is not Obstacle.ANOTHER_JOB,
        watch=Watch(devices, watch_s) if watch_s else None,
        synchronize=synchronize,
        on_close=cleanup,
    )


def pick_gpus(nvml: Nvml, visible: str | None, count: int | None) -> tuple[tuple[NvmlDevice, ...], bool]:
    """Return the GPUs that a job has, in CUDA's order, and whether they are slices of MIG.

    Raises:
        NoDevice: there is none.
        ConfigError: `visible` names what does not exist, or fewer GPUs than the job needs.
    """
    devices = nvml.devices()
    if not devices:
        raise NoDevice("the driver has no GPU")
    sliced = visible is not None and visible.startswith("MIG-")
    if sliced and visible is not None:
        visible = ",".join(dict.fromkeys(nvml.parent_of_slice(token.strip()) for token in visible.split(",")))
    order = visible_gpus(visible, [device.uuid for device in devices])
    by_number = visible is None or visible[:1].isdigit()
    if by_number and len({device.model for device in devices}) > 1:
        order = _cuda_order([device.uuid for device in devices]) or order
    wanted = count or (1 if visible is None else len(order))
    if wanted > len(order):
        raise ConfigError(f"the job wants {wanted} GPUs and has {len(order)} (CUDA_VISIBLE_DEVICES={visible})")
    picked = tuple(devices[i] for i in order[:wanted])
    return picked, sliced or any(device.mig() for device in picked)


@dataclass(frozen=True, slots=True)
class _Opener:
    """How real GPUs are opened: which, and to turn which knob."""

    state_dir: Path
    visible: str | None
    count: int | None
    knob: Knob
    locked_before_mhz: int | None

    def open(self, device: str, *, shared: bool, zeusd: ZeusdAddress) -> Gpus:
        """Return the GPUs as one group."""
        from zeus_flows.gpu.nvml import Nvml

        try:
            nvml = Nvml()
        except NoDevice as error:
            raise NoDevice(NO_GPU.format(why=error)) from error
        with ExitStack() as opened:
            opened.callback(nvml.close)
            try:
                devices, sliced = pick_gpus(nvml, self.visible, self.count)
            except NoDevice as error:
                raise NoDevice(NO_GPU.format(why=error)) from error
            shared = shared or sliced
            if device == "zeusd":
                devices = _through_zeusd(devices, zeusd)
            guard = self._guard(devices, opened)
            why_not = SLICED if sliced else SHARED if shared else self._acquire(guard)
            denied = why_not is not None and why_not.obstacle is Obstacle.PERMISSION
            if denied and device == "auto" and zeusd.likely():
                try:
                    devices = _through_zeusd(devices, zeusd)
                    guard = self._guard(devices, opened)
                    why_not = self._acquire(guard)
                except DeviceError as error:
                    why_not = replace(NO_PERMISSION, text=f"{NO_PERMISSION.text} ({error})")
            _restore_others(self.state_dir, nvml, devices)
            gpus = group_of_real(
                devices,
                guard=guard,
                why_not=why_not,
                shared=shared,
                on_close=[nvml.close],
                knob=self.knob,
                locked_before_mhz=self.locked_before_mhz,
            )
            if not gpus.control.can_set:
                held = "power limits stay" if self.knob is Knob.POWER_LIMIT else "clocks stay"
                _warn_once(f"{held} as they are, measuring only: {gpus.control.why_not}")
            opened.pop_all()
            return gpus

    def _guard(self, devices: Sequence[NvmlDevice], opened: ExitStack) -> PowerGuard:
        guard = PowerGuard(devices, journal_folder(self.state_dir), locked_before_mhz=self.locked_before_mhz)
        opened.callback(guard.release)
        return guard

    def _acquire(self, guard: PowerGuard) -> WhyNot | None:
        return guard.acquire(limits=self.knob is Knob.POWER_LIMIT)


def _through_zeusd(devices: Sequence[NvmlDevice], address: ZeusdAddress) -> tuple[NvmlDevice, ...]:
    from zeus_flows.gpu.zeusd import Zeusd, ZeusdDevice

    zeusd = Zeusd(address)
    return tuple(ZeusdDevice(device, zeusd) for device in devices)


def _restore_others(state_dir: Path, nvml: Nvml, mine: Sequence[NvmlDevice]) -> None:
    """Put back what killed jobs left on other GPUs of this machine."""
    others = {device.uuid: device for device in nvml.devices()} | {device.uuid: device for device in mine}
    for restored in restore_power(state_dir, others.get):
        log.debug("%s: %s", restored.uuid, restored.text)


def _counters(
    devices: Sequence[Device], clock: Clock, sleep: Callable[[float], None]
) -> tuple[list[Counter], Sampler | None, str]:
    """Return a counter per GPU, the thread that feeds them (None where none is needed), and the kind of counter."""
    if all(_counts(device, clock, sleep) for device in devices):
        return [DeviceCounter(device) for device in devices], None, "counter"
    try:
        periods = [update_period_s(device.power_w, clock, sleep, patience_s=0.3) for device in devices]
    except NotSupported as error:
        _warn_once(f"energy cannot be measured, going by time alone: {error}")
        return [], None, "none"
    sampled = [SampledCounter(device, clock) for device in devices]
    for counter in sampled:
        counter.sample()
    fastest = min((period for period in periods if period), default=0.1)
    return list(sampled), Sampler(sampled, min(0.1, max(0.02, fastest / 2))), "sampled power"


def _counts(device: Device, clock: Clock, sleep: Callable[[float], None]) -> bool:
    """Return whether the energy counter exists and advances: some stand still."""
    try:
        return update_period_s(device.energy_j, clock, sleep, updates=0) is not None
    except NotSupported:
        return False


def _cuda_order(uuids: Sequence[str]) -> tuple[int, ...] | None:
    """Return the GPUs as CUDA numbers them (fastest first, by default), or None where CUDA cannot be asked."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        _warn_once(
            "the GPUs of this machine differ and CUDA may number them in another order than the driver: "
            "name them by UUID in CUDA_VISIBLE_DEVICES, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
        return None
    asked = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]
    return tuple(uuids.index(uuid) for uuid in asked if uuid in uuids) or None


@functools.cache
def _warn_once(text: str) -> None:
    log.warning(text)
