"""The GPUs of one job: what a training session measures and controls."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from zeus_flows.core.records import EnergySource, Gpu
from zeus_flows.errors import PowerPermissionError
from zeus_flows.gpu.device import Clock, Device
from zeus_flows.gpu.meter import Mark, Meter, Span

log = logging.getLogger(__name__)

#: The paper profiles every 25 W.
STEP_W = 25.0


class Work(Protocol):
    """What happens on the GPUs' clock when the training makes a step."""

    samples_per_epoch: int | None

    def ran(self, samples: int) -> None:
        """Let `samples` samples have been trained on."""


class Gpus(AbstractContextManager["Gpus"]):
    """All GPUs of one data-parallel job, held at one power limit.

    Leaving the context puts the previous power limits back. Not thread-safe.

    Attributes:
        gpu: The model, the number of GPUs and their greatest power together.
        energy_source: Measured, simulated, or none where joules would mean nothing.
        limits_w: Candidate power limits per GPU, greatest first.
        can_set_limits: Whether `set_power_limit_w` will work.
        why_not: What to tell the user where it will not.
    """

    def __init__(self, devices: tuple[Device, ...], clock: Clock, *, work: Work | None = None) -> None:
        self.devices = devices
        low = max(device.power_limit_range_w()[0] for device in devices)
        high = min(device.power_limit_range_w()[1] for device in devices)
        self.gpu = Gpu(
            model=devices[0].model,
            count=len(devices),
            max_power_w=sum(device.power_limit_range_w()[1] for device in devices),
        )
        self.energy_source: EnergySource = devices[0].energy_source
        self.limits_w = candidate_limits(low, high)
        self.can_set_limits = True
        self.why_not = ""
        self._clock = clock
        self._meter = Meter(devices, clock)
        self._work = work
        self._previous_w = tuple(device.power_limit_w() for device in devices)
        self._changed = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Put the previous power limits back. Safe to call twice."""
        if self._changed:
            for device, watts in zip(self.devices, self._previous_w, strict=True):
                device.set_power_limit_w(watts)
            self._changed = False

    def power_limit_w(self) -> float:
        """Return the power limit in force, per GPU (the least, where they differ)."""
        return min(device.power_limit_w() for device in self.devices)

    def set_power_limit_w(self, watts: float) -> None:
        """Set the power limit of every GPU.

        Raises:
            PowerPermissionError: `can_set_limits` is false; the text says why.
            LimitOutOfRange: a GPU does not accept it.
        """
        if not self.can_set_limits:
            raise PowerPermissionError(self.why_not)
        self._changed = True
        for device in self.devices:
            device.set_power_limit_w(watts)

    def now_s(self) -> float:
        """Return monotonic seconds on the GPUs' clock."""
        return self._clock()

    def synchronize(self) -> None:
        """Wait until the work queued on every GPU is done. `mark` and `since` do it themselves."""
        for device in self.devices:
            device.synchronize()

    def mark(self) -> Mark:
        """Begin a span. Marks are values: spans may nest and overlap."""
        self.synchronize()
        return self._meter.mark()

    def since(self, mark: Mark) -> Span:
        """Return time and energy since a mark.

        Raises:
            DeviceLost: a GPU left the bus; the attempt cannot go on.
        """
        self.synchronize()
        return self._meter.since(mark)

    def throttle_reasons(self) -> tuple[str, ...]:
        """Return why clocks are below what was asked for, over all GPUs, each reason once."""
        return tuple(dict.fromkeys(reason for device in self.devices for reason in device.throttle_reasons()))

    @property
    def samples_per_epoch(self) -> int | None:
        """Size of the training set, which a simulated GPU has to know before the first step."""
        return self._work.samples_per_epoch if self._work else None

    @samples_per_epoch.setter
    def samples_per_epoch(self, samples: int) -> None:
        if self._work:
            self._work.samples_per_epoch = samples

    def ran(self, samples: int) -> None:
        """Tell that a step trained on `samples` samples: time passes on simulated GPUs; real ones know."""
        if self._work:
            self._work.ran(samples)


def candidate_limits(low_w: float, high_w: float, step_w: float = STEP_W) -> tuple[float, ...]:
    """Return the power limits to profile: from the greatest down to the least in even steps.

    >>> candidate_limits(100.0, 250.0)
    (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0)
    """
    steps = int((high_w - low_w) / step_w + 1e-9)
    return tuple(high_w - i * step_w for i in range(steps + 1))
