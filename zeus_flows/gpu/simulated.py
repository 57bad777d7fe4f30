"""GPUs that are not there: a model fitted on published power traces, on a virtual clock.

Real training steps decide how many epochs a job needs; the model decides what they cost. A chip has two clock
domains: up to the knee `fk` its voltage is flat, above it voltage rises with frequency, so that power grows with
f v^2 (section 2 of the paper has the measurements this reproduces). Energy is integrated exactly. Whatever
comes from here is `EnergySource.SIMULATED` and is never mixed with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeus_flows.core.records import EnergySource
from zeus_flows.errors import ConfigError, LimitOutOfRange, NotSupported


class VirtualClock:
    """Monotonic seconds that pass only when something on them takes time.

    >>> clock = VirtualClock()
    >>> clock.advance(1.5)
    >>> clock()
    1.5
    """

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


@dataclass(frozen=True, slots=True)
class Load:
    """A job at one batch size, as one GPU sees it.

    Attributes:
        seconds_per_epoch: T0: an epoch at full clock.
        full_power_w: Pd: power while the GPU is active at full clock.
        active: u: share of T0 in which the GPU is active; in the rest it waits for the host.
        clock_bound: b <= u: share of T0 that stretches when the clock falls; the rest is bound by memory or host.
    """

    seconds_per_epoch: float
    full_power_w: float
    active: float
    clock_bound: float


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU model's fitted constants.

    Attributes:
        name: How the device names itself.
        limits_w: The least and the greatest power limit.
        idle_w: Pi: power while it waits.
        active_w: Psa: power while active, apart from what the clock adds.
        knee: fk: relative clock above which voltage rises.
        voltage_rise: sv: voltage at full clock is 1 + sv times that at the knee.
        slowest: fmin: the relative clock below which it never falls, even where a limit asks for it.
        clocks_mhz: The least and the greatest graphics clock.
        memory_mhz: The memory clock.
        locks_clocks: Whether it can be locked to a clock, as GPUs from Volta on can.
    """

    name: str
    limits_w: tuple[float, float]
    idle_w: float
    active_w: float
    knee: float
    voltage_rise: float
    slowest: float
    clocks_mhz: tuple[int, int]
    memory_mhz: int
    locks_clocks: bool = True

    def dynamic(self, f: float) -> float:
        """Return g(f): dynamic power at relative clock `f`, as a share of that at full clock."""
        v = 1.0 if f <= self.knee else 1.0 + self.voltage_rise * (f - self.knee) / (1.0 - self.knee)
        return f * v * v / (1.0 + self.voltage_rise) ** 2

    def active_power_w(self, load: Load, f: float) -> float:
        """Return Pa(f): power while active at relative clock `f`."""
        return self.active_w + (load.full_power_w - self.active_w) * self.dynamic(f)

    def clock_at(self, load: Load, limit_w: float, ceiling: float = 1.0) -> float:
        """Return f(L): the greatest relative clock up to `ceiling` whose active power stays within the limit."""
        low, high = self.slowest, ceiling
        if high <= low or self.active_power_w(load, high) <= limit_w:
            return high
        if self.active_power_w(load, low) >= limit_w:
            return low
        for _ in range(50):
            middle = (low + high) / 2
            if self.active_power_w(load, middle) > limit_w:
                high = middle
            else:
                low = middle
        return low

    def epoch(self, load: Load, limit_w: float, ceiling: float = 1.0) -> tuple[float, float]:
        """Return seconds and average watts of an epoch under a power limit: T(L) and P(L).

        ResNet-50 with a batch of 128 on a V100: a 100 W limit takes 2.4 times less power and 92 % more time.

        >>> seconds, watts = CHIPS["v100"].epoch(Load(3554.0, 238.0, active=0.92, clock_bound=0.52), 100.0)
        >>> round(seconds / 3554.0, 2), round(watts)
        (1.92, 99)
        """
        f = self.clock_at(load, limit_w, ceiling)
        seconds = load.seconds_per_epoch * (1.0 - load.clock_bound + load.clock_bound / f)
        waiting = (1.0 - load.active) * load.seconds_per_epoch
        joules = (seconds - waiting) * self.active_power_w(load, f) + waiting * self.idle_w
        return seconds, joules / seconds


#: Mean errors against the traces in time and power, per cent: V100 1.6 and 1.6, A40 2.3 and 2.1, P100 1.4 and 1.5,
#: RTX 6000 1.9 and 1.0.
CHIPS = {
    "v100": Chip("Simulated V100", (100.0, 250.0), 34.16, 77.03, 0.4116, 0.5382, 0.3612, (135, 1380), 877),
    "a40": Chip("Simulated A40", (100.0, 300.0), 79.39, 88.79, 0.719, 0.7577, 0.1721, (210, 1740), 7251),
    "p100": Chip("Simulated P100", (125.0, 250.0), 32.79, 91.42, 0.4708, 0.9323, 0.3128, (544, 1328), 715, False),
    "rtx6000": Chip("Simulated RTX 6000", (100.0, 260.0), 52.38, 76.15, 0.7107, 0.487, 0.3265, (300, 2100), 7001),
}

#: Clocks that GPUs can be locked to are so far apart, or half as far.
CLOCK_STEP_MHZ = 15

#: An evaluation takes this share of an epoch's seconds with very large batches, unless the job says otherwise.
EVALUATION = 0.1

#: Power of a saturated job as a share of the greatest limit: 235-245 W on a V100.
_SATURATED = 0.96


@dataclass(frozen=True, slots=True)
class Workload:
    """A job that was never measured, at any batch size, by the laws the measured ones follow.

    The defaults are a small model such as ShuffleNet: starved at small batches, saturated at large ones.
    For a heavy one (ResNet-50, BERT) take `half_batch=6, utilisation=0.9, least_utilisation=0.9`.

    Attributes:
        seconds_per_epoch: A of T0(b) = A (1 + bh / b): an epoch at full clock with very large batches.
        half_batch: bh: the batch size at which an epoch takes twice that.
        utilisation: u for large batches: share of the time in which the GPU is active.
        least_utilisation: u for very small batches.
        saturated_power_w: Pd for large batches; None: as measured jobs, a little below the greatest limit.
        evaluation_seconds: One evaluation at full clock; it loads the GPU as training does. None: a tenth of
            `seconds_per_epoch`.
    """

    seconds_per_epoch: float = 60.0
    half_batch: float = 250.0
    utilisation: float = 0.75
    least_utilisation: float = 0.1
    saturated_power_w: float | None = None
    evaluation_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.evaluation_seconds is not None and not self.evaluation_seconds >= 0:
            raise ConfigError(f"evaluation_seconds must not be negative, not {self.evaluation_seconds}")
        if not self.seconds_per_epoch > 0:
            raise ConfigError(f"seconds_per_epoch of a simulated job must be positive, not {self.seconds_per_epoch}")
        if not self.half_batch >= 0:
            raise ConfigError(f"half_batch of a simulated job must not be negative, not {self.half_batch}")
        if not 0 < self.least_utilisation <= self.utilisation <= 1:
            raise ConfigError(
                "a simulated job needs 0 < least_utilisation <= utilisation <= 1, not "
                f"{self.least_utilisation} and {self.utilisation}"
            )
        if self.saturated_power_w is not None and not self.saturated_power_w > 0:
            raise ConfigError(f"saturated_power_w of a simulated job must be positive, not {self.saturated_power_w}")

    @property
    def evaluation_s(self) -> float:
        """Seconds of one evaluation at full clock."""
        return EVALUATION * self.seconds_per_epoch if self.evaluation_seconds is None else self.evaluation_seconds

    def at(self, batch_size: float, chip: Chip) -> Load:
        """Return the load that a batch size puts on a chip.

        >>> workload = Workload(seconds_per_epoch=60.0, half_batch=250.0)
        >>> workload.at(250, CHIPS["v100"]).seconds_per_epoch
        120.0
        """
        if not batch_size > 0:
            raise ConfigError(f"a batch size must be positive, not {batch_size}")
        b, half = float(batch_size), self.half_batch
        active = self.least_utilisation + (self.utilisation - self.least_utilisation) * b / (b + 40.0)
        saturated_w = _SATURATED * chip.limits_w[1] if self.saturated_power_w is None else self.saturated_power_w
        saturation = b * b / (b * b + half * half / 4.0)
        return Load(
            seconds_per_epoch=self.seconds_per_epoch * (1.0 + half / b),
            full_power_w=chip.active_w + max(0.0, saturated_w - chip.active_w) * saturation,
            active=active,
            clock_bound=active * (0.2 + 0.4 * b / (b + 5.0 * half)),
        )


class SimulatedDevice:
    """One simulated GPU. Its limit dies with the process; several share one clock. Not thread-safe."""

    energy_source = EnergySource.SIMULATED
    has_power_limits = True

    def __init__(self, kind: str, clock: VirtualClock, *, index: int = 0) -> None:
        if kind not in CHIPS:
            raise ConfigError(f"there is no simulated {kind!r}; there are {', '.join(sorted(CHIPS))}")
        self.chip = CHIPS[kind]
        self.index = index
        self.uuid = f"SIM-{kind}-{index}"
        self.model = self.chip.name
        self._clock = clock
        self._limit_w = self.chip.limits_w[1]
        self._ceiling = 1.0
        self._load: Load | None = None
        self._epoch: tuple[float, float] | None = None
        self._energy_j = 0.0
        self._settled_s = clock()
        self._power_w = self.chip.idle_w

    def power_limit_range_w(self) -> tuple[float, float]:
        """Return the least and the greatest power limit it accepts."""
        return self.chip.limits_w

    def power_limit_w(self) -> float:
        """Return the power limit in force."""
        return self._limit_w

    def set_power_limit_w(self, watts: float) -> None:
        """Set the power limit."""
        low, high = self.chip.limits_w
        if not low <= watts <= high:
            raise LimitOutOfRange(f"{self.model} accepts power limits from {low:g} to {high:g} W, not {watts:g} W")
        self._limit_w = float(watts)
        self._epoch = None

    def energy_j(self) -> float:
        """Return the energy drawn since it was made."""
        self._idle_until_now()
        return self._energy_j

    def power_w(self) -> float:
        """Return the power of the last step, or idle power where time passed since."""
        self._idle_until_now()
        return self._power_w

    def utilisation_percent(self) -> tuple[float, float]:
        """Return the job's share of active time; what it does within a step is not simulated."""
        busy = 0.0 if self._load is None else 100 * self._load.active
        return busy, busy / 2

    def graphics_clocks_mhz(self) -> tuple[int, ...]:
        """Return the graphics clocks that it can be locked to, greatest first."""
        if not self.chip.locks_clocks:
            raise NotSupported(f"{self.model} cannot lock its clocks: GPUs from Volta on can")
        least, greatest = self.chip.clocks_mhz
        return tuple(range(greatest, least - 1, -CLOCK_STEP_MHZ))

    def clocks_mhz(self) -> tuple[int, int]:
        """Return its graphics and memory clocks now."""
        f = self._ceiling if self._load is None else self.chip.clock_at(self._load, self._limit_w, self._ceiling)
        return round(f * self.chip.clocks_mhz[1]), self.chip.memory_mhz

    def lock_clocks_mhz(self, low: int, high: int) -> None:
        """Lock the graphics clocks to a range."""
        least, greatest = self.chip.clocks_mhz
        if not self.chip.locks_clocks or low > high or high < least:
            raise NotSupported(f"{self.model} has graphics clocks from {least} to {greatest} MHz, not {low} to {high}")
        self._ceiling = min(1.0, high / greatest)
        self._epoch = None

    def reset_clocks(self) -> None:
        """Undo `lock_clocks_mhz`."""
        self._ceiling = 1.0
        self._epoch = None

    def throttle_reasons(self) -> tuple[str, ...]:
        """Return why the clocks are below what was asked for."""
        if self._load is None:
            return ("idle",)
        throttled = self.chip.clock_at(self._load, self._limit_w, self._ceiling) < self._ceiling - 1e-3
        return ("power cap",) if throttled else ()

    def synchronize(self) -> None:
        """Return at once: nothing is queued."""

    def carry(self, load: Load | None) -> None:
        """Take on a job; None: none."""
        self._load = load
        self._epoch = None

    @property
    def full_seconds(self) -> float:
        """An epoch of the job at full clock, in seconds."""
        assert self._load is not None
        return self._load.seconds_per_epoch

    def seconds_for(self, share: float) -> float:
        """Return how long a share of an epoch of the job takes now."""
        return share * self._at_work()[0]

    def work(self, seconds: float) -> None:
        """Train for a while. The caller moves the clock on, once for all devices on it."""
        self._idle_until_now()
        self._power_w = self._at_work()[1]
        self._energy_j += self._power_w * seconds
        self._settled_s += seconds

    def _at_work(self) -> tuple[float, float]:
        if self._epoch is None:
            if self._load is None:
                raise ConfigError(f"{self.model} has no job to run")
            self._epoch = self.chip.epoch(self._load, self._limit_w, self._ceiling)
        return self._epoch

    def _idle_until_now(self) -> None:
        now = self._clock()
        if now > self._settled_s:
            self._power_w = self.chip.idle_w
            self._energy_j += self._power_w * (now - self._settled_s)
            self._settled_s = now


class SimulatedWork:
    """What simulated GPUs of one data-parallel job do when the real training makes a step.

    Args:
        devices: The GPUs; each takes an equal part of every batch.
        workload: The job.
        batch_size: The batch size over all GPUs.
        samples_per_epoch: Size of the training set; may be set later.
    """

    def __init__(
        self,
        devices: tuple[SimulatedDevice, ...],
        clock: VirtualClock,
        workload: Workload,
        *,
        batch_size: int,
        samples_per_epoch: int | None = None,
    ) -> None:
        self._devices = devices
        self._clock = clock
        self._samples_per_epoch = samples_per_epoch
        self._waiting = 0
        self._evaluation_s = workload.evaluation_s
        for device in devices:
            device.carry(workload.at(batch_size / len(devices), device.chip))

    @property
    def samples_per_epoch(self) -> int | None:
        """Size of the training set; None while it is not known."""
        return self._samples_per_epoch

    @samples_per_epoch.setter
    def samples_per_epoch(self, samples: int) -> None:
        self._samples_per_epoch = samples
        if samples and self._waiting:
            waiting, self._waiting = self._waiting, 0
            self.ran(waiting)

    def ran(self, samples: int) -> None:
        """Charge the GPUs for training on `samples` samples.

        While the size of the training set is not known, nobody can tell: they spend it once it is.
        """
        if not self._samples_per_epoch:
            self._waiting += samples
            return
        self._work(samples / self._samples_per_epoch)

    def evaluated(self) -> None:
        """Charge the GPUs for one evaluation."""
        self._work(self._evaluation_s / self._devices[0].full_seconds)

    def _work(self, epochs: float) -> None:
        share = epochs / len(self._devices)
        seconds = max(device.seconds_for(share) for device in self._devices)
        for device in self._devices:
            device.work(seconds)
        self._clock.advance(seconds)
