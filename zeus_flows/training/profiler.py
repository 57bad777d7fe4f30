"""Just-in-time power profiling (section 4.2): power limits are measured while the model trains.

The profiler is told of every step. For each limit it discards a warm-up, then measures a span of whole steps.
A span that an epoch ends too early goes on in the next epoch, so that epochs of one step finish a profile too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zeus_flows.core.records import EnergySource, LimitMeasurement, PowerProfile
from zeus_flows.errors import DeviceError, DeviceLost, MeasurementError
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.meter import Mark


@dataclass(slots=True)
class _Slice:
    """What has been measured of one power limit so far."""

    warmup_s: float = 0.0
    time_s: float = 0.0
    energy_j: float = 0.0
    samples: int = 0


class PowerProfiler:
    """Measures the limits of one attempt that are not known yet, one after the other.

    Args:
        gpus: What to measure.
        batch_size: The arm.
        limits_w: The limits a complete profile has.
        known: What earlier attempts measured; only what it lacks is measured.
        profile_s: Seconds a limit is measured for, at least.
        warmup_s: Seconds after a limit was set that are discarded, at least.
    """

    def __init__(
        self,
        gpus: Gpus,
        *,
        batch_size: int,
        limits_w: Iterable[float],
        known: PowerProfile | None,
        profile_s: float,
        warmup_s: float,
    ) -> None:
        self._gpus = gpus
        self._batch_size = batch_size
        self._wanted = tuple(limits_w)
        found = {m.power_limit_w: m for m in known.measurements} if known else {}
        self._found = {limit: found[limit] for limit in self._wanted if limit in found}
        self._todo = [limit for limit in self._wanted if limit not in self._found]
        self._profile_s, self._warmup_s = profile_s, warmup_s
        self._slice = _Slice()
        self._mark: Mark | None = None
        self._pending = 0
        self.broken = ""
        self.energy_j = 0.0
        self.time_s = 0.0

    @property
    def active(self) -> bool:
        """Whether there is something left to measure."""
        return bool(self._todo) and not self.broken

    @property
    def profile(self) -> PowerProfile | None:
        """What is known now, complete or not; None where nothing is."""
        if not self._found:
            return None
        measurements = tuple(self._found[limit] for limit in self._wanted if limit in self._found)
        return PowerProfile(self._batch_size, self._gpus.gpu, measurements, complete=not self._todo)

    def begin(self) -> None:
        """Go on with the limit that is under way: an epoch's steps begin."""
        self._open()

    def ran(self, samples: int) -> bool:
        """Count a step; close a warm-up or a span that is long enough. Return whether that ended the profiling."""
        if self._mark is None:
            return False
        self._pending += samples
        wanted_s = self._warmup_s - self._slice.warmup_s if self._warming else self._profile_s - self._slice.time_s
        if self._gpus.now_s() - self._mark.time_s >= wanted_s:
            self._close()
        return not self.active

    def end(self) -> bool:
        """Keep what was measured of the limit under way: the epoch's steps ended. Return as `ran` does."""
        if self._mark is None:
            return False
        if self._pending:
            self._close()
        self._mark = None
        return not self.active

    @property
    def _warming(self) -> bool:
        return self._slice.warmup_s < self._warmup_s

    def _open(self) -> None:
        """Begin a span at the limit that is next, if there is one."""
        self._mark = None
        if not self.active:
            return
        try:
            if self._gpus.power_limit_w() != self._todo[0]:
                self._gpus.set_power_limit_w(self._todo[0])
            self._mark = self._gpus.mark()
            self._pending = 0
        except DeviceLost:
            raise
        except DeviceError as error:
            self.broken = str(error)

    def _close(self) -> None:
        """Book the time since the mark; move on to the next limit when this one has enough."""
        assert self._mark is not None
        span = self._gpus.since(self._mark)
        self.energy_j += span.energy_j
        self.time_s += span.time_s
        if not span.complete:
            self.broken = "a power reading failed"
        elif self._warming:
            self._slice.warmup_s += span.time_s
        else:
            self._slice.time_s += span.time_s
            self._slice.energy_j += span.energy_j
            self._slice.samples += self._pending
        if self._slice.time_s >= self._profile_s:
            self._book(self._todo.pop(0))
        self._open()

    def _book(self, limit_w: float) -> None:
        """Turn what was measured of a limit into a measurement."""
        measured, self._slice = self._slice, _Slice()
        average_power_w = measured.energy_j / measured.time_s
        if self._gpus.energy_source is EnergySource.NONE:
            average_power_w = limit_w  # joules mean nothing here; the job's objective is time alone
        try:
            self._found[limit_w] = LimitMeasurement(limit_w, average_power_w, measured.samples / measured.time_s)
        except MeasurementError as error:
            self.broken = str(error)
