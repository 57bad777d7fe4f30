"""Time and energy between two moments, on one or several GPUs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Protocol

from zeus_flows.errors import DeviceError, DeviceLost
from zeus_flows.gpu.device import Clock, Device

#: No GPU draws this many times its greatest power limit over a span (an A40 drew 1.2 times a low limit).
_INCREDIBLE = 1.5
#: Readings at the edges of a shorter span may be this far off, in seconds' worth of energy.
_SLACK_S = 1.0
#: A counter that stands still for longer than this does not count; the slowest known ones tick every 0.1 s.
_STILL_S = 0.25
#: Power held for longer than this without a sample says little about what was drawn.
_LONGEST_GAP_S = 5.0


class Mark(NamedTuple):
    """A moment from which spans are measured. Marks are values: spans may nest and overlap.

    Attributes:
        time_s: When, on the meter's clock.
        energy_j: The counter of each GPU; where a reading failed, the last one that did not; NaN where there is none.
        good: Whether every reading is of this moment.
        faults: How often a counter had gone backwards, or a sample had been missed, by then.
    """

    time_s: float
    energy_j: tuple[float, ...]
    good: bool
    faults: int


class Span(NamedTuple):
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


class Counter(Protocol):
    """A total of energy, counted by the GPU or by us.

    Attributes:
        faults: How often something was missed, so that no span across it is complete.
    """

    faults: int

    def energy_j(self) -> float:
        """Return the total. Only differences mean something."""


class DeviceCounter:
    """The GPU's own total-energy counter."""

    faults = 0

    def __init__(self, device: Device) -> None:
        self.energy_j = device.energy_j


class SampledCounter:
    """The integral of a GPU's power readings, for GPUs without a counter.

    Every sample counts, whether or not it differs from the one before; between samples the last value holds; the
    edges of a span take a sample of their own. Thread-safe.
    """

    def __init__(self, device: Device, clock: Clock) -> None:
        self.faults = 0
        self._device = device
        self._clock = clock
        self._lock = threading.Lock()
        self._lost: DeviceLost | None = None
        self._total_j = 0.0
        self._power_w: float | None = None
        self._sampled_s = clock()

    def energy_j(self) -> float:
        """Take a sample and return the integral up to now."""
        with self._lock:
            self._sample()
            return self._total_j

    def sample(self) -> None:
        """Take a sample; a failure is remembered rather than raised."""
        with self._lock:
            try:
                self._sample()
            except DeviceLost as error:
                self._lost = error
            except DeviceError:
                return

    def _sample(self) -> None:
        if self._lost is not None:
            raise self._lost
        try:
            power_w = self._device.power_w()
        except DeviceError:
            self.faults += 1
            raise
        now = self._clock()
        gap_s = now - self._sampled_s
        if self._power_w is not None:
            self._total_j += self._power_w * gap_s
            self.faults += gap_s > _LONGEST_GAP_S
        if not (math.isfinite(power_w) and power_w > 0):
            self.faults += 1  # some GPUs answer 0 W when asked too often: hold the last value
            power_w = self._power_w or 0.0
        self._power_w, self._sampled_s = power_w, now


class Sampler:
    """The thread that takes the samples.

    Args:
        counters: Whose samples to take.
        period_s: How often.
    """

    def __init__(self, counters: Sequence[SampledCounter], period_s: float) -> None:
        self._counters = counters
        self._period_s = period_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeus-flows-power-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. Safe to call twice."""
        self._done.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._done.wait(self._period_s):
            for counter in self._counters:
                counter.sample()


class Meter:
    """Measures spans on a job's GPUs. Not thread-safe.

    A failed reading makes spans incomplete; a lost GPU raises `DeviceLost`.

    Args:
        counters: One per GPU; none where energy means nothing and only time is measured.
        max_power_w: The greatest power limit of each GPU, by which incredible readings are told.
        clock: Monotonic seconds.
    """

    def __init__(self, counters: Sequence[Counter], max_power_w: Sequence[float], clock: Clock) -> None:
        self._reads = tuple(counter.energy_j for counter in counters)
        self._sampled = tuple(counter for counter in counters if not isinstance(counter, DeviceCounter))
        self._incredible_w = tuple(_INCREDIBLE * watts for watts in max_power_w)
        self._clock = clock
        self._last = [0.0] * len(self._reads)  # 0: nothing was read yet
        self._resets = 0

    def mark(self) -> Mark:
        """Read the clock and the counters. Synchronise the GPUs before."""
        time_s, last, good = self._clock(), self._last, True
        for i, read in enumerate(self._reads):
            try:
                energy_j = read()
            except DeviceLost:
                raise
            except DeviceError:
                good = False
                continue
            if last[i] <= energy_j < math.inf:
                last[i] = energy_j
            elif 0.0 <= energy_j < last[i]:
                self._resets += 1
                last[i] = energy_j
            else:
                good = False
        faults = self._faults() if self._sampled else self._resets
        return Mark(time_s, tuple(last) if good else self._known(), good, faults)

    def last(self) -> Mark:
        """Return now with the last readings that succeeded, asking no GPU. No span that ends here is complete."""
        return Mark(self._clock(), self._known(), not self._reads, self._faults())

    def between(self, start: Mark, end: Mark) -> Span:
        """Return the span between two marks."""
        start_s, start_j, start_good, start_faults = start
        end_s, end_j, end_good, end_faults = end
        time_s, total_j = end_s - start_s, 0.0
        complete = start_good and end_good and start_faults == end_faults
        joules: list[float | None] = []
        for i, incredible_w in enumerate(self._incredible_w):
            energy_j = end_j[i] - start_j[i]
            if 0.0 < energy_j <= incredible_w * (time_s + _SLACK_S):
                joules.append(energy_j)
                total_j += energy_j
            elif energy_j == 0.0:
                joules.append(0.0)
                complete = complete and time_s < _STILL_S
            else:
                joules.append(None)
                complete = False
        return Span(time_s, total_j, tuple(joules), complete)

    def _known(self) -> tuple[float, ...]:
        return tuple(energy_j or math.nan for energy_j in self._last)

    def _faults(self) -> int:
        return self._resets + sum(counter.faults for counter in self._sampled)


def update_period_s(
    read: Callable[[], float],
    clock: Clock,
    sleep: Callable[[float], None],
    *,
    patience_s: float = 0.5,
    updates: int = 5,
) -> float | None:
    """Return how often a sensor shows a new value; None where it never did within the patience.

    It waits for `updates` changes after the first, and takes their median distance.
    """
    begin = clock()
    last, changed_s = read(), list[float]()
    while len(changed_s) <= updates and clock() - begin < patience_s:
        sleep(0.001)
        value = read()
        if value != last:
            last = value
            changed_s.append(clock())
    if not changed_s:
        return None
    if len(changed_s) == 1:
        return changed_s[0] - begin
    return median(b - a for a, b in pairwise(changed_s))
