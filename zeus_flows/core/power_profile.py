"""What is measured of a GPU under a job: a profile of power limits, and the parts of an attempt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from zeus_flows.errors import MeasurementError


class Knob(StrEnum):
    """What is tuned within an attempt; a setting is one value of it."""

    POWER_LIMIT = "power_limit"  # watts per GPU


@dataclass(frozen=True, slots=True)
class Gpu:
    """What an attempt trains on: a GPU model and how many of it.

    Attributes:
        model: The model's name as the device reports it.
        count: GPUs of the data-parallel job (its world size).
        max_power_w: MAXPOWER of eq. 2: the greatest power limit, summed over the GPUs.
    """

    model: str
    count: int
    max_power_w: float

    @property
    def key(self) -> str:
        """What makes two profiles comparable: the model and the world size."""
        return f"{self.model} x{self.count}"


@dataclass(frozen=True, slots=True)
class LimitMeasurement:
    """AvgPower(b, p) and Throughput(b, p) of eq. 5, with throughput in samples per second.

    Attributes:
        begun_s: Seconds measured where training ended before there were enough; None where there were.
    """

    power_limit_w: float
    average_power_w: float
    samples_per_s: float
    begun_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("power_limit_w", "average_power_w", "samples_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise MeasurementError(f"{name} of a power profile must be positive and finite, not {value!r}")


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """Power limit -> average power and throughput, for one (batch size, micro-batch, GPU).

    Only a complete profile defines an arm's epoch cost; a partial one is kept to be completed. A complete one need
    not hold every limit: those that cannot win are not measured.

    Attributes:
        made_with: Major versions it depends on, such as `torch 2, driver 550`; empty where none matter.
        stale_w: Limits whose measurements still serve but are to be measured again.
        micro_batch_size: Samples that went through the GPUs at once; None: the whole batch.
    """

    batch_size: int
    gpu: Gpu
    measurements: tuple[LimitMeasurement, ...]
    complete: bool = True
    made_with: str = ""
    stale_w: tuple[float, ...] = ()
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
        evaluation: Evaluations of the model, by the power limit (per GPU) that was in force.
        rest: Checkpoints, logging, starting a loader: what is left of each epoch.
    """

    once: Part = NO_PART
    evaluation: tuple[tuple[float, Part], ...] = ()
    rest: Part = NO_PART

    @property
    def evaluations(self) -> Part:
        """All evaluations, at whichever limit."""
        return sum((part for _, part in self.evaluation), NO_PART)

    @property
    def together(self) -> Part:
        """All parts in one."""
        return self.once + self.evaluations + self.rest
