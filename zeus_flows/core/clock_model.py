"""What a job takes at a clock: what was read, what is wanted of it, and what two readings say of the other clocks.

The prediction is a closed form with one number each for time and power, both from two readings. On simulated GPUs that
no model had seen, boosted trees, which GPOEO has, need more readings than it by the simulator's law (4.4 to 3.9) and
about as many by another one (5.6 to 5.7), at energies within 0.15 points (`benchmarks/clocks.py`): they were left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from zeus_flows.errors import ConfigError, MeasurementError

#: Power beyond its fixed part goes with f to this: f v^2, with a voltage that is flat at low clocks and rises at high.
POWER_LAW = 2.0
#: At least this share of power does not depend on the clock.
FIXED = 0.05


class Aim(StrEnum):
    """What the best clock minimises."""

    ENERGY = "energy"
    ED2P = "ed2p"  # E T^2, GPOEO's
    COST = "cost"  # eq. 2


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What a fixed amount of work (a period, a sample) took at one clock.

    Attributes:
        clock_mhz: What the graphics clocks were locked to; the greatest: they were not locked.
        power_w: Average power.
        time_s: How long it took.
    """

    clock_mhz: float
    power_w: float
    time_s: float

    def __post_init__(self) -> None:
        for name in ("clock_mhz", "power_w", "time_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise MeasurementError(f"{name} of a clock's reading must be positive and finite, not {value!r}")

    @property
    def energy_j(self) -> float:
        """Its energy."""
        return self.power_w * self.time_s


@dataclass(frozen=True, slots=True)
class Objective:
    """What the best clock minimises, and how slow it may be.

    Attributes:
        aim: What is minimised.
        slowdown: How many times slower than the default a clock may be; None: as slow as it likes.
        eta: The energy-time knob of `Aim.COST`.
        max_power_w: MAXPOWER of `Aim.COST`: what a second is priced at.
    """

    aim: Aim = Aim.ENERGY
    slowdown: float | None = None
    eta: float = 0.5
    max_power_w: float = 0.0

    def __post_init__(self) -> None:
        if self.slowdown is not None and not self.slowdown >= 1:
            raise ConfigError(f"a slowdown must be at least 1, not {self.slowdown}")

    def of(self, reading: ClockReading) -> float:
        """Return what the work of a reading costs."""
        match self.aim:
            case Aim.ENERGY:
                return reading.energy_j
            case Aim.ED2P:
                return reading.energy_j * reading.time_s**2
            case Aim.COST:
                return self.eta * reading.energy_j + (1 - self.eta) * self.max_power_w * reading.time_s

    def too_slow(self, reading: ClockReading, default: ClockReading) -> bool:
        """Return whether a clock is slower than allowed."""
        return self.slowdown is not None and reading.time_s > self.slowdown * default.time_s

    def best(self, readings: Sequence[ClockReading], default: ClockReading) -> ClockReading:
        """Return the cheapest that is not too slow, the default among them; of two alike, the faster clock."""
        allowed = [default, *(r for r in readings if not self.too_slow(r, default))]
        return min(allowed, key=lambda r: (self.of(r), -r.clock_mhz))


#: Readings at the default and at a lower clock, clocks to predict, and what the default ran at -> what they will read.
Model = Callable[[ClockReading, ClockReading, Sequence[float], float], list[ClockReading]]


def closed_form(
    default: ClockReading, second: ClockReading, clocks_mhz: Sequence[float], ran_at_mhz: float
) -> list[ClockReading]:
    """Return what clocks will read, by what two of them did.

    With f the clock over the one that the default ran at, T = T0 (1 - b + b/f) and P = P0 (1 - c + c f^2): b is the
    share of time that goes with the clock, c the share of power.

    Args:
        default: Read with clocks unlocked.
        second: Read at a lower clock.
        clocks_mhz: What to predict.
        ran_at_mhz: What the GPU ran at on average at the default.

    >>> (half,) = closed_form(ClockReading(1400, 200, 1.0), ClockReading(1120, 170, 1.1), [700], 1400)
    >>> round(half.time_s, 2), round(half.power_w)
    (1.4, 137)
    """
    f = second.clock_mhz / ran_at_mhz
    b = (second.time_s / default.time_s - 1) / (1 / f - 1)
    c = (1 - second.power_w / default.power_w) / (1 - f**POWER_LAW)
    b, c = min(max(b, 0.0), 1.0), min(max(c, 0.0), 1 - FIXED)
    shares = [(mhz, min(1.0, mhz / ran_at_mhz)) for mhz in clocks_mhz]
    return [
        ClockReading(mhz, default.power_w * (1 - c + c * f**POWER_LAW), default.time_s * (1 - b + b / f))
        for mhz, f in shares
    ]
