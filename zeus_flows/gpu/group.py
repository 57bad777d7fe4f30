"""The GPUs of one job: what a training session measures and controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Protocol

from zeus_flows.core.power_profile import Gpu
from zeus_flows.core.records import EnergySource
from zeus_flows.gpu.control import Control, LimitControl
from zeus_flows.gpu.device import Clock, Device
from zeus_flows.gpu.meter import Mark, Meter, Span
from zeus_flows.gpu.power_control import PowerControl
from zeus_flows.gpu.watch import Watch


class Work(Protocol):
    """What happens on the GPUs' clock when the training makes a step."""

    @property
    def samples_per_epoch(self) -> int | None:
        """Size of the training set; None while it is not known."""

    @samples_per_epoch.setter
    def samples_per_epoch(self, samples: int) -> None: ...

    def ran(self, samples: int) -> None:
        """Let `samples` samples have been trained on."""

    def evaluated(self) -> None:
        """Let the model have been evaluated once."""


class Gpus(AbstractContextManager["Gpus"]):
    """All GPUs of one data-parallel job, held at one setting of a knob.

    Leaving the context puts the previous power limits back. `open_gpus` makes one. Not thread-safe.

    Attributes:
        gpu: The model, the number of GPUs, their greatest power together and the knob.
        power: Their power limits and clocks.
        control: The knob that the job turns.
        energy_source: Measured, simulated, or none where joules would mean nothing (then spans have 0 J).
        sensor: Where the joules come from, for people: `counter`, `sampled power`, `model`, `none`.
        alone: Whether nobody else is known to use the GPUs; if not, spans are never complete.

    Args:
        devices: The GPUs, in CUDA's order.
        meter: Measures spans on them.
        power: Changes them and puts them back.
        control: The knob that the job turns; None: their power limits.
        clock: The clock of `meter`.
        work: What simulated GPUs do at a step.
        watch: Notices lost GPUs.
        synchronize: Waits for the work queued on the GPUs.
        on_close: What else to do at the end, last first.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        meter: Meter,
        power: PowerControl,
        control: Control | None = None,
        clock: Clock,
        energy_source: EnergySource,
        sensor: str,
        alone: bool = True,
        work: Work | None = None,
        watch: Watch | None = None,
        synchronize: Callable[[], None] | None = None,
        on_close: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.devices = tuple(devices)
        max_power_w = sum(device.power_limit_range_w()[1] for device in devices)
        self.power = power
        self.control = LimitControl(power) if control is None else control
        self.gpu = Gpu(devices[0].model, len(devices), max_power_w=max_power_w, knob=self.control.knob)
        self.energy_source = energy_source
        self.sensor = sensor
        self.alone = alone
        self._meter = meter
        self._clock = clock
        self._work = work
        self._watch = watch
        self._synchronize = synchronize
        self._cleanup = ExitStack()
        for callback in on_close:
            self._cleanup.callback(callback)
        if watch is not None:
            self._cleanup.callback(watch.close)
        self._cleanup.callback(power.release)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Put the previous power limits and clocks back and let go of the GPUs. Safe to call twice."""
        self._cleanup.close()

    def now_s(self) -> float:
        """Return monotonic seconds on the GPUs' clock."""
        return self._clock()

    def synchronize(self) -> None:
        """Wait until the work queued on every GPU is done. `mark` and `since` do it themselves."""
        if self._synchronize is not None:
            self._synchronize()

    def mark(self) -> Mark:
        """Begin a span. Marks are values: spans may nest and overlap.

        Raises:
            DeviceLost: a GPU left the bus; the attempt cannot go on.
        """
        if self._watch is not None and self._watch.lost is not None:
            raise self._watch.lost
        if self._synchronize is not None:
            self._synchronize()
        return self._meter.mark()

    def since(self, mark: Mark) -> Span:
        """Return time and energy since a mark; raises as `mark` does."""
        span = self._meter.between(mark, self.mark())
        return span if self.alone else span._replace(complete=False)

    def known_since(self, mark: Mark) -> Span:
        """Return the span since a mark from earlier readings. It asks no GPU, so it works after one has failed.

        It never raises; where energy is measured, the span is not complete.
        """
        return self.between(mark, self._meter.last())

    def between(self, start: Mark, end: Mark) -> Span:
        """Return time and energy between two marks, without reading anything."""
        span = self._meter.between(start, end)
        return span if self.alone else span._replace(complete=False)

    def throttle_reasons(self) -> tuple[str, ...]:
        """Return why clocks are below what was asked for, over all GPUs, each reason once."""
        return tuple(dict.fromkeys(reason for device in self.devices for reason in device.throttle_reasons()))

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are simulated: time passes only when the training makes a step."""
        return self._work is not None

    @property
    def samples_per_epoch(self) -> int | None:
        """Size of the training set, which a simulated GPU has to know before the first step."""
        return self._work.samples_per_epoch if self._work else None

    @samples_per_epoch.setter
    def samples_per_epoch(self, samples: int) -> None:
        if self._work:
            self._work.samples_per_epoch = samples

    def ran(self, samples: int) -> None:
        """Tell that a step trained on `samples` samples: time passes on simulated GPUs; real ones know.

        Raises:
            DeviceLost: a GPU left the bus within the last seconds. No GPU is asked: a thread watches them.
        """
        if self._work is not None:
            self._work.ran(samples)
        elif self._watch is not None and self._watch.lost is not None:
            raise self._watch.lost

    def evaluated(self) -> None:
        """Tell that the model was evaluated: time passes on simulated GPUs; real ones know."""
        if self._work is not None:
            self._work.evaluated()
