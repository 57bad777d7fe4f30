"""What is measured of a GPU under a job: a profile of settings of one knob, and the parts of an attempt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from zeus_flows.errors import MeasurementError


class Knob(StrEnum):
    """What is tuned within an attempt; a setting is one value of it."""

    POWER_LIMIT = "power_limit"  # watts per GPU
    CLOCKS = "clocks"  # MHz that the graphics clocks of each GPU are locked to; the greatest: they are not locked

    @property
    def unit(self) -> str:
        """What its settings are counted in."""
        return "W" if self is Knob.POWER_LIMIT else "MHz"

    @property
    def words(self) -> str:
        """Its name for people."""
        return "power limit" if self is Knob.POWER_LIMIT else "clocks"


@dataclass(frozen=True, slots=True)
class Gpu:
    """What an attempt trains on: a GPU model, how many of it, and what of it is tuned.

    What is known of a GPU by one knob says nothing of another: its settings, and what evaluations take at them. So a
    GPU whose clocks are tuned counts as another than the same one under power limits. Epochs do not depend on either.

    Attributes:
        model: The model's name as the device reports it.
        count: GPUs of the data-parallel job (its world size).
        max_power_w: MAXPOWER of eq. 2: the greatest power limit, summed over the GPUs.
        knob: What is tuned.
    """

    model: str
    count: int
    max_power_w: float
    knob: Knob = Knob.POWER_LIMIT

    @property
    def name(self) -> str:
        """The model and the world size, for people."""
        return f"{self.model} x{self.count}"

    @property
    def key(self) -> str:
        """What makes two profiles comparable: the model, the world size, and the knob.

        >>> Gpu("A40", 2, 600.0).key, Gpu("A40", 2, 600.0, Knob.CLOCKS).key
        ('A40 x2', 'A40 x2, clocks')
        """
        return self.name if self.knob is Knob.POWER_LIMIT else f"{self.name}{_BY_CLOCKS}"


_BY_CLOCKS = ", clocks"


def knob_of(key: str) -> Knob:
    """Return the knob that a `Gpu.key` is of."""
    return Knob.CLOCKS if key.endswith(_BY_CLOCKS) else Knob.POWER_LIMIT


@dataclass(frozen=True, slots=True)
class SettingMeasurement:
    """AvgPower(b, p) and Throughput(b, p) of eq. 5, with throughput in samples per second.

    Attributes:
        setting: p, per GPU: watts or MHz, as the knob has it.
        begun_s: Seconds measured where training ended before there were enough; None where there were.
    """

    formerly: ClassVar[Mapping[str, str]] = {"setting": "power_limit_w"}

    setting: float
    average_power_w: float
    samples_per_s: float
    begun_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("setting", "average_power_w", "samples_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise MeasurementError(f"{name} of a power profile must be positive and finite, not {value!r}")


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """Setting of a knob -> average power and throughput, for one (batch size, micro-batch, GPU).

    Only a complete profile defines an arm's epoch cost; a partial one is kept to be completed. A complete one need
    not hold every setting: those that cannot win are not measured.

    Attributes:
        made_with: Major versions it depends on, such as `torch 2, driver 550`; empty where none matter.
        stale: Settings whose measurements still serve but are to be measured again.
        micro_batch_size: Samples that went through the GPUs at once; None: the whole batch.
    """

    formerly: ClassVar[Mapping[str, str]] = {"stale": "stale_w"}

    batch_size: int
    gpu: Gpu
    measurements: tuple[SettingMeasurement, ...]
    complete: bool = True
    made_with: str = ""
    stale: tuple[float, ...] = ()
    micro_batch_size: int | None = None

    @property
    def micro(self) -> int:
        """Samples that went through the GPUs at once. Profiles of different ones are never mixed."""
        return self.micro_batch_size or self.batch_size


@dataclass(frozen=True, slots=True)
class Part:
    """Energy in joules and time in seconds of something that happened `count` times.

    >>> Part(1, 10.0, 2.0) + Part(2, 5.0, 1.0)
    Part(count=3, energy_j=15.0, time_s=3.0)
    """

    count: float = 0
    energy_j: float = 0.0
    time_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.count < math.inf and 0 <= self.energy_j < math.inf and 0 <= self.time_s < math.inf):
            raise MeasurementError(f"a part of an attempt must be finite and not negative, not {self!r}")

    def __add__(self, other: Part) -> Part:
        return Part(self.count + other.count, self.energy_j + other.energy_j, self.time_s + other.time_s)

    def times(self, factor: float) -> Part:
        """Return this part multiplied by a number."""
        return Part(self.count * factor, self.energy_j * factor, self.time_s * factor)

    @property
    def each(self) -> Part:
        """The average of one; zero where there was none."""
        return self.times(1 / self.count) if self.count else NO_PART


NO_PART = Part()


@dataclass(frozen=True, slots=True)
class Parts:
    """What an attempt took beside its training steps; the steps took the rest of its energy and time.

    Attributes:
        once: Start-up and compilation: all before the first step, and what the first step took more than others.
        evaluation: Evaluations of the model, by the setting (per GPU) that was in force.
        rest: Checkpoints, logging, starting a loader: what is left of each epoch.
    """

    once: Part = NO_PART
    evaluation: tuple[tuple[float, Part], ...] = ()
    rest: Part = NO_PART

    @property
    def evaluations(self) -> Part:
        """All evaluations, at whichever setting."""
        return sum((part for _, part in self.evaluation), NO_PART)

    @property
    def together(self) -> Part:
        """All parts in one."""
        return self.once + self.evaluations + self.rest
