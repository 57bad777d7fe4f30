"""Just-in-time profiling (section 4.2): settings of the knob are measured while the model trains.

The profiler is told of every step. Going down from the greatest setting, it discards a warm-up at each, then measures a
span of whole steps. A span that an epoch ends too early goes on in the next epoch, and one that training ends too
early goes on in the next recurrence, so that epochs of one step finish a profile too. Last, a setting whose reading
does not fit the others is measured once more: the second reading takes the place of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from zeus_flows.core.job import Job, Selector
from zeus_flows.core.power import cost_per_sample
from zeus_flows.core.power_profile import PowerProfile, SettingMeasurement
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import DeviceError, DeviceLost, MeasurementError
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.meter import Mark
from zeus_flows.training.setting_readings import Search, SettingReadings

#: A span takes at most this share of an epoch, so that profiling a short training does not slow it down...
OF_AN_EPOCH = 0.1
#: ... but this many seconds at least, or what the sensor needs.
LEAST_S = 1.0
#: A warm-up takes at most this share of a span.
OF_A_SPAN = 0.2


@dataclass(slots=True)
class _Slice:
    """What has been measured of one setting so far."""

    settled: bool = False
    warmup_s: float = 0.0
    time_s: float = 0.0
    energy_j: float = 0.0
    samples: float = 0.0


class _Lengths(NamedTuple):
    """Seconds that spans and warm-ups take at most, and spans at least."""

    profile_s: float
    warmup_s: float
    least_s: float


class PowerProfiler:
    """Measures the settings of one attempt that are not known yet, one after the other.

    Args:
        gpus: What to measure.
        job: Its selector and eta say which settings cannot win any more.
        batch_size: The arm.
        settings: Those to choose among.
        micro_batch_size: Samples that go through the GPUs at once; None: the whole batch.
        known: What earlier attempts measured; only what it lacks is measured.
        profile_s: Seconds a setting is measured for; where epochs are short, a tenth of one, but `least_s` at least.
        warmup_s: Seconds after a setting was set that are discarded; where spans are shorter, a fifth of one.
        made_with: Versions the measurements depend on; what was made with others is measured again.
        least_s: What a span must have to be believed.
        always: Settings to measure whether or not they can win.
        skip_losers: Leave out settings that cannot win any more, and measure an odd one again.
        search: Says which to measure next, where there are too many to go down through all.

    Attributes:
        samples_per_epoch: How long an epoch is; 0 while that is not known.
        broken: Why profiling was given up; empty while it was not.
        energy_j: Energy spent while profiling in this attempt, warm-up included.
        time_s: Time spent likewise.
    """

    def __init__(
        self,
        gpus: Gpus,
        *,
        job: Job,
        batch_size: int,
        settings: Iterable[float],
        known: PowerProfile | None,
        profile_s: float,
        warmup_s: float,
        made_with: str = "",
        least_s: float = LEAST_S,
        always: Iterable[float] = (),
        skip_losers: bool = True,
        micro_batch_size: int | None = None,
        search: Search | None = None,
    ) -> None:
        self._gpus = gpus
        self._empty = empty = PowerProfile(batch_size, gpus.gpu, (), micro_batch_size=micro_batch_size)
        host_w = job.host_power_w or 0.0
        self._readings = SettingReadings(
            settings,
            known,
            cost_of=lambda measured: cost_per_sample(job, empty, measured, host_w=host_w),
            max_slowdown=job.slowdown if job.selector is Selector.MAX_SLOWDOWN else None,
            made_with=made_with,
            always=always,
            skip_losers=skip_losers,
            search=search,
        )
        self._lengths = _Lengths(profile_s, warmup_s, least_s)
        self._slice = _Slice()
        self._mark: Mark | None = None
        self._pending = 0
        self._rate = self._not_before_s = 0.0
        self._setting: float | None = None
        self.samples_per_epoch = 0
        self.broken = ""
        self.energy_j = 0.0
        self.time_s = 0.0
        self._move_on()

    @property
    def active(self) -> bool:
        """Whether there is something left to measure."""
        return self._setting is not None and not self.broken

    @property
    def profile(self) -> PowerProfile | None:
        """What is known now, complete or not; None where nothing is."""
        under_way = self._setting
        begun = None if under_way is None else self._measured(under_way, begun=True)
        return self._readings.profile(self._empty, done=under_way is None, begun=begun)

    def distrust(self, measured: SettingMeasurement) -> None:
        """Measure every setting again: one of them contradicted the profile."""
        self._readings.distrust(measured)
        self._move_on()

    def begin(self) -> None:
        """Go on with the setting that is under way: an epoch's steps begin."""
        if self.active and self._setting_is_ours():
            self._open()

    def ran(self, samples: int) -> bool:
        """Count a step; close a warm-up or a span that is long enough. Return whether that ended the profiling."""
        if self._mark is None:
            return not self.active
        self._pending += samples
        elapsed_s = self._gpus.now_s() - self._mark.time_s
        if elapsed_s < self._not_before_s:
            return False
        left_s = self._wanted_s(self._rate or self._pending / max(elapsed_s, 1e-9)) - self._so_far_s
        if elapsed_s < left_s:
            self._not_before_s = left_s
            return False
        self._close()
        self._open()
        return not self.active

    def drop(self) -> None:
        """Forget the span under way; what was measured of the setting before it stays."""
        self._mark, self._pending = None, 0

    def end(self) -> bool:
        """Keep the unfinished measurement when the steps of an epoch end. Return the same as `ran`."""
        if self._mark is not None and self._pending:
            self._close()
        self._mark = None
        return not self.active

    @property
    def _so_far_s(self) -> float:
        """Seconds of the warm-up, or of the span after it, that are over."""
        return self._slice.time_s if self._slice.settled else self._slice.warmup_s

    def _wanted_s(self, samples_per_s: float) -> float:
        """Return how long the warm-up, or the span after it, is to be at this speed."""
        epoch_s = self.samples_per_epoch / samples_per_s if self.samples_per_epoch else math.inf
        span_s = min(self._lengths.profile_s, max(self._lengths.least_s, OF_AN_EPOCH * epoch_s))
        return span_s if self._slice.settled else min(self._lengths.warmup_s, OF_A_SPAN * span_s)

    def _move_on(self) -> None:
        """Go to the next setting worth measuring, with its earlier measurements."""
        self._setting = self._readings.next()
        settled = self._lengths.warmup_s <= 0
        self._slice = _Slice(settled=settled)
        begun = None if self._setting is None else self._readings.take_begun(self._setting)
        if begun is not None:
            assert begun.begun_s is not None
            seconds = begun.begun_s
            self._slice = _Slice(settled, 0.0, seconds, begun.average_power_w * seconds, begun.samples_per_s * seconds)

    def _open(self) -> None:
        """Begin a span at the setting that is next, if there is one."""
        self._mark = None
        if self._setting is None or self.broken:
            return
        try:
            if self._gpus.control.last != self._setting:
                self._gpus.control.set(self._setting)
            self._mark = self._gpus.mark()
            self._pending, self._not_before_s = 0, 0.0
        except DeviceLost:
            raise
        except DeviceError as error:
            self.broken = str(error)

    def _setting_is_ours(self) -> bool:
        """Whether the setting is as we left it, and the span that ends here one of it; else profiling is over."""
        try:
            self._gpus.control.read()
        except DeviceLost:
            raise
        except DeviceError as error:
            self.broken = str(error)
            return False
        if self._gpus.control.foreign_w is not None:
            self.broken = self._gpus.control.why_not
        return not self.broken

    def _close(self) -> None:
        """Book the time since the mark; move on to the next setting when this one has enough."""
        assert self._mark is not None
        span = self._gpus.since(self._mark)
        self.energy_j += span.energy_j
        self.time_s += span.time_s
        if not span.complete:
            self.broken = "a power reading failed"
        if self.broken or not self._setting_is_ours():
            return
        if span.time_s > 0:
            self._rate = max(self._rate, self._pending / span.time_s)
        if self._slice.settled:
            self._slice.time_s += span.time_s
            self._slice.energy_j += span.energy_j
            self._slice.samples += self._pending
            if self._slice.time_s >= self._wanted_s(self._rate):
                self._book()
        else:
            self._slice.warmup_s += span.time_s
            self._slice.settled = self._slice.warmup_s >= self._wanted_s(self._rate)

    def _book(self) -> None:
        """Keep the measurement of the setting under way and go on to the next."""
        assert self._setting is not None
        measurement = self._measured(self._setting)
        if measurement is None:
            self.broken = f"the readings at {self._setting:g} {self._empty.gpu.knob.unit} cannot be believed"
            return
        self._readings.keep(measurement)
        self._move_on()

    def _measured(self, setting: float, *, begun: bool = False) -> SettingMeasurement | None:
        """Return what was measured of the setting under way; None where that is nothing."""
        part = self._slice
        if part.time_s <= 0:
            return None
        average_power_w = part.energy_j / part.time_s
        if self._gpus.energy_source is EnergySource.NONE:
            average_power_w = setting  # joules mean nothing here; the job's objective is time alone
        try:
            return SettingMeasurement(
                setting, average_power_w, part.samples / part.time_s, begun_s=part.time_s if begun else None
            )
        except MeasurementError:
            return None
