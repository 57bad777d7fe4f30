"""Time and energy between two moments, on one or several GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeus_flows.errors import DeviceError, DeviceLost
from zeus_flows.gpu.device import Clock, Device


@dataclass(frozen=True, slots=True)
class Reading:
    """A GPU's energy counter at a moment.

    Attributes:
        energy_j: The counter; where the reading failed, the last one that did not.
        good: Whether the reading is of this moment.
        resets: How often the counter had gone backwards by then; spans across a reset cannot be told.
    """

    energy_j: float
    good: bool
    resets: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment from which spans are measured. Marks are values: spans may nest and overlap."""

    time_s: float
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A measured interval.

    Attributes:
        time_s: Its length.
        energy_j: Its energy, summed over the GPUs; a part of it where `complete` is false.
        per_gpu_j: The same per GPU; None where nothing is known about one.
        complete: Whether every reading can be believed. If not, keep the span from anything that learns.
    """

    time_s: float
    energy_j: float
    per_gpu_j: tuple[float | None, ...]
    complete: bool

    @property
    def average_power_w(self) -> float:
        """Average power over the GPUs together; 0 for a span of no length."""
        return self.energy_j / self.time_s if self.time_s > 0 else 0.0


#: No GPU draws this many times its greatest power limit over a span (an A40 drew 1.2 times a low limit).
_INCREDIBLE = 1.5
#: A counter that stands still for this long is not counting.
_STILL_S = 1.0


class Meter:
    """Reads the energy counters of a job's GPUs.

    A failed reading makes spans incomplete; a lost GPU raises `DeviceLost`. Not thread-safe.
    """

    def __init__(self, devices: tuple[Device, ...], clock: Clock) -> None:
        self._devices = devices
        self._clock = clock
        self._last = [Reading(0.0, good=False, resets=0)] * len(devices)
        self._max_power_w = [device.power_limit_range_w()[1] for device in devices]

    def mark(self) -> Mark:
        """Read the clock and the counters. Synchronise the GPUs before."""
        return Mark(self._clock(), tuple(self._read(i) for i in range(len(self._devices))))

    def since(self, start: Mark) -> Span:
        """Return the span from a mark until now."""
        return self.between(start, self.mark())

    def between(self, start: Mark, end: Mark) -> Span:
        """Return the span between two marks."""
        time_s = end.time_s - start.time_s
        joules, complete = [], True
        for i, (a, b) in enumerate(zip(start.readings, end.readings, strict=True)):
            energy_j = b.energy_j - a.energy_j
            known = a.resets == b.resets and energy_j >= 0
            joules.append(energy_j if known else None)
            credible = energy_j <= _INCREDIBLE * self._max_power_w[i] * max(time_s, _STILL_S)
            counting = energy_j > 0 or time_s < _STILL_S
            complete = complete and known and a.good and b.good and credible and counting
        return Span(time_s, math.fsum(j for j in joules if j is not None), tuple(joules), complete)

    def _read(self, i: int) -> Reading:
        last = self._last[i]
        try:
            energy_j = self._devices[i].energy_j()
        except DeviceLost:
            raise
        except DeviceError:
            return Reading(last.energy_j, good=False, resets=last.resets)
        if not (math.isfinite(energy_j) and energy_j >= 0):
            return Reading(last.energy_j, good=False, resets=last.resets)
        resets = last.resets + (energy_j < last.energy_j)
        self._last[i] = Reading(energy_j, good=True, resets=resets)
        return self._last[i]
