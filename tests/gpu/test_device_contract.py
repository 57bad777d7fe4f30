"""One suite for every implementation of the device Protocol: simulated, and NVML on the emulated library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.nvml_emulator import Emulator
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import LimitOutOfRange, NotSupported
from zeus_flows.gpu.control import ClockControl
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.guard import PowerGuard
from zeus_flows.gpu.journal import journal_folder
from zeus_flows.gpu.nvml import Nvml
from zeus_flows.gpu.open_gpus import group_of_real, group_of_simulated
from zeus_flows.gpu.power_control import candidate_limits
from zeus_flows.gpu.simulated import CHIPS, Load, SimulatedDevice, VirtualClock

LOADS = {
    "resnet50": Load(3554.0, 238.0, active=0.92, clock_bound=0.52),
    "deepspeech2": Load(5331.0, 273.0, active=0.76, clock_bound=0.29),
    "starved": Load(124.0, 92.0, active=0.1, clock_bound=0.05),
}


class Simulated:
    """Two simulated GPUs and how to make them work."""

    def __init__(self, kind: str) -> None:
        self.clock = VirtualClock()
        self.devices = [SimulatedDevice(kind, self.clock, index=i) for i in range(2)]
        self.gpus = group_of_simulated(self.devices, self.clock)

    def epoch(self, load: Load) -> None:
        for device in self.devices:
            device.carry(load)
        seconds = self.devices[0].seconds_for(1.0)
        for device in self.devices:
            device.work(seconds)
        self.clock.advance(seconds)


class Emulated:
    """Two emulated GPUs, read through the real pynvml, and how to make them work."""

    def __init__(self, emulator: Emulator, state_dir: Path) -> None:
        self.emulator = emulator
        self.devices = Nvml().devices()
        guard = PowerGuard(self.devices, journal_folder(state_dir))
        assert guard.acquire() is None
        self.gpus = group_of_real(
            self.devices,
            guard=guard,
            why_not=None,
            shared=False,
            clock=emulator.now,
            sleep=emulator.advance,
            watch_s=None,
        )

    def epoch(self, load: Load) -> None:
        for gpu in range(2):
            self.emulator.load(load, gpu)
        self.emulator.advance(self.emulator.epoch_seconds())
        for gpu in range(2):
            self.emulator.load(None, gpu)


Rig = Simulated | Emulated


@pytest.fixture(params=["simulated", "nvml"])
def rig(request: pytest.FixtureRequest, emulate: Callable[..., Emulator], tmp_path: Path) -> Rig:
    if request.param == "simulated":
        return Simulated("v100")
    return Emulated(emulate(NVMLEMU_GPUS="v100,v100", NVMLEMU_CLOCK="virtual"), tmp_path)


def test_it_names_itself(rig: Rig) -> None:
    first, second = rig.devices
    assert (first.index, second.index) == (0, 1)
    assert first.uuid != second.uuid
    assert "V100" in first.model


def test_simulated_energy_says_so(rig: Rig) -> None:
    expected = EnergySource.SIMULATED if isinstance(rig, Simulated) else EnergySource.MEASURED
    assert rig.gpus.energy_source is expected
    assert ("Simulated" in rig.gpus.gpu.model) is isinstance(rig, Simulated)


def test_limits_are_in_watts(rig: Rig) -> None:
    device: Device = rig.devices[0]
    assert device.power_limit_range_w() == (100.0, 250.0)
    assert device.power_limit_w() == 250.0
    device.set_power_limit_w(150.0)
    assert device.power_limit_w() == 150.0
    assert rig.gpus.power.limits_w == (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0)


@pytest.mark.parametrize("watts", [99.0, 251.0])
def test_a_limit_out_of_range_is_refused_and_changes_nothing(rig: Rig, watts: float) -> None:
    with pytest.raises(LimitOutOfRange, match="100 to 250 W"):
        rig.gpus.power.set_limit_w(watts)
    assert rig.gpus.power.limit_w() == 250.0


def test_all_gpus_of_a_job_get_the_same_limit_and_their_own_back(rig: Rig) -> None:
    rig.devices[0].set_power_limit_w(200.0)
    with rig.gpus as gpus:
        gpus.power.set_limit_w(125.0)
        assert [device.power_limit_w() for device in rig.devices] == [125.0, 125.0]
        gpus.power.set_limit_w(100.0)
    assert [device.power_limit_w() for device in rig.devices] == [200.0, 250.0]


def test_idle_gpus_draw_idle_power(rig: Rig) -> None:
    assert rig.devices[0].power_w() == pytest.approx(34.16, abs=0.01)


def test_an_epoch_is_measured_over_all_gpus(rig: Rig) -> None:
    start = rig.gpus.mark()
    rig.epoch(LOADS["resnet50"])
    span = rig.gpus.since(start)
    seconds, watts = CHIPS["v100"].epoch(LOADS["resnet50"], 250.0)
    assert span.complete
    assert span.time_s == pytest.approx(seconds, rel=1e-6)
    assert span.energy_j == pytest.approx(2 * seconds * watts, rel=1e-6)
    assert span.per_gpu_j == pytest.approx((span.energy_j / 2, span.energy_j / 2))


def test_locked_clocks_slow_the_job_down_and_are_reset_on_leaving(rig: Rig) -> None:
    def epoch_s() -> float:
        start = rig.gpus.mark()
        rig.epoch(LOADS["resnet50"])
        return rig.gpus.since(start).time_s

    full = epoch_s()
    rig.gpus.power.lock_clocks_mhz(690, 690)
    assert full < epoch_s() < 2 * full, "what does not wait for the clock goes on as before"
    rig.gpus.power.reset_clocks()
    assert epoch_s() == pytest.approx(full)
    rig.gpus.power.lock_clocks_mhz(690, 690)
    rig.gpus.power.restore()
    assert epoch_s() == pytest.approx(full)


def test_the_greatest_clock_means_that_they_are_not_locked(rig: Rig) -> None:
    control = ClockControl(rig.gpus.power, rig.devices)
    assert (len(control.settings), control.settings[0], control.settings[-1]) == (84, 1380.0, 135.0)
    assert (control.read(), control.can_set) == (1380.0, True)
    for device in rig.devices:
        assert device.clocks_mhz() == (1380, 877)
    control.set(900.0)
    assert control.read() == 900.0
    assert [device.clocks_mhz()[0] for device in rig.devices] == [900, 900]
    control.set(1380.0)
    assert [device.clocks_mhz()[0] for device in rig.devices] == [1380, 1380]
    assert rig.gpus.power.limit_w() == 250.0


def test_clocks_that_do_not_exist_are_refused(rig: Rig) -> None:
    with pytest.raises(NotSupported):
        rig.gpus.power.lock_clocks_mhz(10, 20)


@pytest.mark.parametrize("kind", sorted(CHIPS))
@pytest.mark.parametrize("load", sorted(LOADS))
def test_simulated_and_emulated_agree_within_a_hundredth_on_every_limit(
    kind: str, load: str, emulate: Callable[..., Emulator]
) -> None:
    emulator = emulate(NVMLEMU_GPUS=kind, NVMLEMU_CLOCK="virtual")
    real, simulated = Nvml().devices()[0], SimulatedDevice(kind, VirtualClock())
    assert real.power_limit_range_w() == simulated.power_limit_range_w()
    emulator.load(LOADS[load])
    simulated.carry(LOADS[load])
    for limit_w in candidate_limits(*real.power_limit_range_w()):
        for device in (real, simulated):
            device.set_power_limit_w(limit_w)
        before = emulator.joules()
        emulator.advance(emulator.epoch_seconds())
        start = simulated.energy_j()
        simulated.work(simulated.seconds_for(1.0))
        assert simulated.seconds_for(1.0) == pytest.approx(emulator.epoch_seconds(), rel=0.01)
        assert simulated.power_w() == pytest.approx(real.power_w(), rel=0.01)
        assert simulated.energy_j() - start == pytest.approx(emulator.joules() - before, rel=0.01)


@pytest.mark.parametrize("kind", sorted(CHIPS))
@pytest.mark.parametrize("load", sorted(LOADS))
def test_simulated_and_emulated_agree_within_a_hundredth_on_every_clock(
    kind: str, load: str, emulate: Callable[..., Emulator]
) -> None:
    emulator = emulate(NVMLEMU_GPUS=kind, NVMLEMU_CLOCK="virtual")
    real, simulated = Nvml().devices()[0], SimulatedDevice(kind, VirtualClock())
    if kind == "p100":  # before Volta
        for device in (real, simulated):
            with pytest.raises(NotSupported, match="from Volta on"):
                device.graphics_clocks_mhz()
            with pytest.raises(NotSupported):
                device.lock_clocks_mhz(900, 900)
        return
    assert real.graphics_clocks_mhz() == simulated.graphics_clocks_mhz()
    emulator.load(LOADS[load])
    simulated.carry(LOADS[load])
    for mhz in real.graphics_clocks_mhz()[::9]:
        for device in (real, simulated):
            device.lock_clocks_mhz(mhz, mhz)
        start = emulator.joules()
        emulator.advance(emulator.epoch_seconds())
        simulated.work(simulated.seconds_for(1.0))
        assert simulated.seconds_for(1.0) == pytest.approx(emulator.epoch_seconds(), rel=0.01)
        assert simulated.power_w() == pytest.approx((emulator.joules() - start) / emulator.epoch_seconds(), rel=0.01)
        assert simulated.clocks_mhz() == real.clocks_mhz()
