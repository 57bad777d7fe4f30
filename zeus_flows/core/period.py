"""The period of a job's iterations, seen from outside: sampled power and utilisation, and no word from the job.

The way is GPOEO's: channels are added up to one composite trace, the spectrum proposes periods, and the one whose
consecutive windows agree best is taken. Two things are done otherwise, so that a trace which merely wanders is not
taken for a periodic one: a moving average of the period's own length is taken away before windows are compared,
and what is left is what their difference is held against.

A multiple of the period serves as well as the period, as long as it is the same multiple at every clock: `within` asks
for one that a slower clock can have made of it. Iterations shorter than two samples show up at a false period; readings
that come a little early or late, at random (`IRREGULAR`), smear that out where the sensor is quick. Where it is not, a
false period is unlikely to move with the clock as a true one must: that too is what `within` is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zeus_flows.errors import MeasurementError

Floats = npt.NDArray[np.float64]

#: Spectral peaks of at least this share of the greatest are candidates, up to so many of them.
PEAK, PEAKS = 0.6, 6
#: No iteration is looked for that takes longer, in seconds.
LONGEST_S = 15.0
#: A period needs so many updates of the sensor, and a trace so many periods.
LEAST_UPDATES, LEAST_PERIODS = 5, 6
#: How far around a candidate is searched, as a share of it, and in which steps; at last by windows up to so many apart.
AROUND, NEARER, APART = 0.07, 0.01, 8
#: Readings should come early or late by up to this share of a step.
IRREGULAR = 0.15
#: A shorter period is taken where its error is at most so many times the least, plus so much.
ALIKE, ALIKE_PLUS = 1.15, 0.02
#: Windows that differ by more than this share of their own deviation are no period.
APERIODIC = 0.5
#: A composite trace that deviates by less than this share of its mean is flat.
FLAT = 0.02
#: The trace and its ends must agree on the period, or so many of it, within this share.
STABLE, MULTIPLES = 0.05, 4
#: A period or power that moved by more than this share is other work: start over.
CHANGED = 0.12


@dataclass(frozen=True, slots=True, eq=False)
class GpuTrace:
    """What was seen of a GPU, sampled evenly.

    Attributes:
        step_s: Seconds between samples.
        power_w: Power in watts.
        others: Utilisation of multiprocessors and memory in per cent, and GPM metrics where the GPU has them; any of
            them may be missing.
        update_s: Seconds between updates of the slowest sensor; None: as often as it is sampled.
    """

    step_s: float
    power_w: Floats
    others: tuple[Floats, ...] = ()
    update_s: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.step_s) and self.step_s > 0):
            raise MeasurementError(f"step_s of a trace must be positive and finite, not {self.step_s!r}")
        for channel in (self.power_w, *self.others):
            if channel.shape != self.power_w.shape or not np.isfinite(channel).all():
                raise MeasurementError("the channels of a trace must be finite and of one length")

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.power_w) * self.step_s

    def last(self, share: float) -> GpuTrace:
        """Return the end of it: a suffix of so large a share."""
        begin = round(len(self.power_w) * (1 - share))
        return GpuTrace(self.step_s, self.power_w[begin:], tuple(c[begin:] for c in self.others), self.update_s)


@dataclass(frozen=True, slots=True)
class Period:
    """A period that was found.

    Attributes:
        period_s: Its length in seconds.
        error: By how much consecutive windows differ, as a share of their deviation: 0 is perfect, 1.1 unrelated.
        power_w: The trace's mean power, to tell whether the work is still the same later.
    """

    period_s: float
    error: float
    power_w: float


@dataclass(frozen=True, slots=True)
class Aperiodic:
    """No period was found, and why: the job can be measured, not tuned."""

    why: str


def detect_period(trace: GpuTrace, *, within: tuple[float, float] | None = None) -> Period | Aperiodic:
    """Return the period of a trace: one on which the whole and its last two thirds and half agree.

    Args:
        trace: At least six periods of it.
        within: The least and the greatest period that make sense, in seconds: after a change of clocks, what
            `stretched` says of the period before.

    >>> second = np.r_[np.full(6, 240.0), np.full(4, 90.0)]  # at 10 Hz
    >>> found = detect_period(GpuTrace(0.1, np.tile(second, 30)))
    >>> round(found.period_s, 2)
    1.0
    >>> detect_period(GpuTrace(0.1, np.full(300, 200.0)))
    Aperiodic(why='the trace is flat')
    """
    low_s, high_s = within or (0.0, LONGEST_S)
    low_s = max(low_s, LEAST_UPDATES * max(trace.step_s, trace.update_s or 0.0))
    high_s = min(high_s, LONGEST_S, trace.seconds / LEAST_PERIODS)
    if low_s > high_s:
        return Aperiodic(f"{trace.seconds:.3g} s are too few for {LEAST_PERIODS} periods of at least {low_s:.3g} s")
    signal = composite(trace)
    if signal.std() < FLAT * 100:
        return Aperiodic("the trace is flat")
    found = _best(signal, trace.step_s, low_s, high_s)
    if found is None:
        return Aperiodic("no period stands out")
    period_s, error = found
    if error > APERIODIC:
        return Aperiodic(f"windows of {period_s:.3g} s, which agree best, differ by {error:.2f} of their deviation")
    for share in (2 / 3, 1 / 2):
        part = trace.last(share)
        again = _best(composite(part), trace.step_s, low_s, min(high_s, part.seconds / 3))
        if again is None or again[1] > APERIODIC or not _multiple(again[0], period_s):
            return Aperiodic(f"not stable: {period_s:.3g} s does not hold in the last {share:.0%} of the trace")
    return Period(period_s, error, float(trace.power_w.mean()))


def stretched(period_s: float, *, clock: float, to: float) -> tuple[float, float]:
    """Return what a period can be at another clock, least and greatest: between unchanged and as the clocks are.

    >>> stretched(1.0, clock=1400.0, to=1000.0)
    (0.95, 1.47)
    """
    ratio = clock / to
    return round(period_s * min(1.0, ratio) * 0.95, 9), round(period_s * max(1.0, ratio) * 1.05, 9)


def changed(before: Period, now: Period | Aperiodic) -> bool:
    """Return whether the work is another one than it was at the same clock: then everything starts over.

    >>> changed(Period(1.0, 0.1, 200.0), Period(1.05, 0.1, 195.0)), changed(Period(1.0, 0.1, 200.0), Aperiodic(""))
    (False, True)
    """
    if isinstance(now, Aperiodic):
        return True
    moved = max(abs(math.log(now.period_s / before.period_s)), abs(math.log(now.power_w / before.power_w)))
    return moved > math.log1p(CHANGED)


def evenly(at_s: Sequence[float], channels: Iterable[Sequence[float]], *, step_s: float) -> list[Floats]:
    """Return channels that were sampled at about every `step_s` as if they had been sampled at exactly that.

    >>> [channel.tolist() for channel in evenly([0.0, 0.9, 2.0], [[0.0, 9.0, 20.0]], step_s=1.0)]
    [[0.0, 10.0, 20.0]]
    """
    grid = np.arange(at_s[0], at_s[-1] + 1e-9, step_s) if len(at_s) else np.empty(0)
    return [np.interp(grid, at_s, channel) if len(at_s) else np.empty(0) for channel in channels]


def composite(trace: GpuTrace) -> Floats:
    """Return one trace of all channels in per cent, each with the sign that makes the whole deviate most.

    Power counts in per cent of its greatest value. What moves slower than the longest period is taken away.
    """
    greatest = max(float(trace.power_w.max(initial=0.0)), 1e-9)
    whole = 100 * trace.power_w / greatest
    for channel in trace.others:
        plus, minus = whole + channel, whole - channel
        whole = plus if plus.std() >= minus.std() else minus
    return _without_drift(whole / (1 + len(trace.others)), LONGEST_S / trace.step_s)


def _best(signal: Floats, step_s: float, low_s: float, high_s: float) -> tuple[float, float] | None:
    """Return the shortest of the best periods in a range and its error; None where the spectrum has no peak there."""
    around, nearer = np.linspace(1 - AROUND, 1 + AROUND, 15), np.linspace(1 - NEARER, 1 + NEARER, 9)
    rough = [_least(signal, step_s, c * around, apart=1) for c in _candidates(signal, step_s, low_s, high_s)]
    promising = 1.5 * min(rough)[0] + 0.1 if rough else 0.0
    found = [_least(signal, step_s, period_s * nearer, apart=1) for error, period_s in rough if error <= promising]
    found = [(error, period_s) for error, period_s in found if low_s <= period_s <= high_s]
    if not found:
        return None
    least, _ = min(found)
    error, period_s = min((f for f in found if f[0] <= ALIKE * least + ALIKE_PLUS), key=lambda f: f[1])
    nearby = np.linspace(1 - 4 * NEARER, 1 + 4 * NEARER, 33)
    _, period_s = _least(signal, step_s, period_s * nearby, apart=APART)
    return period_s, error


def _least(signal: Floats, step_s: float, periods_s: Floats, *, apart: int) -> tuple[float, float]:
    """Return the least error of some periods, and the period."""
    return min((_disagreement(signal, period_s / step_s, apart), float(period_s)) for period_s in periods_s)


def _multiple(longer_s: float, period_s: float) -> bool:
    """Return whether a period is another one or a few of it, which agree as well."""
    times = round(longer_s / period_s)
    return 1 <= times <= MULTIPLES and abs(longer_s / period_s / times - 1) <= STABLE


def _candidates(signal: Floats, step_s: float, low_s: float, high_s: float) -> list[float]:
    """Return periods at the spectrum's great peaks, with their half and their multiples, within a range."""
    count = len(signal)
    padded = 2 ** math.ceil(math.log2(4 * count))
    size = np.abs(np.fft.rfft((signal - signal.mean()) * np.hanning(count), padded))
    frequency = np.fft.rfftfreq(padded, step_s)
    peaks = 1 + np.flatnonzero((size[1:-1] > size[:-2]) & (size[1:-1] >= size[2:]))
    peaks = peaks[frequency[peaks] >= 1 / high_s]
    if not len(peaks):
        return []
    peaks = peaks[np.argsort(-size[peaks])]
    peaks = peaks[size[peaks] >= PEAK * size[peaks[0]]][:PEAKS]
    periods = np.outer(1 / frequency[peaks], (0.5, 1, 2, 3, 4, 5, 6, 7, 8)).ravel()
    periods = np.sort(periods[(periods >= low_s * (1 - AROUND)) & (periods <= high_s * (1 + AROUND))])
    apart = np.flatnonzero(np.diff(np.log(periods), prepend=-np.inf) > NEARER)
    return [float(period) for period in periods[apart]]


def _disagreement(signal: Floats, samples: float, apart: int) -> float:
    """Return the mean difference of windows of so many samples, up to so many apart, as a share of their deviation."""
    windows = int(len(signal) / samples)
    if windows < 3:
        return math.inf
    points = max(8, min(64, round(samples)))
    at = (np.arange(windows * points) + 0.5) * (samples / points) - 0.5
    level = np.interp(at, np.arange(len(signal)), _without_drift(signal, samples)).reshape(windows, points)
    deviation = float(level.std())
    if deviation < 1e-9:
        return math.inf
    lags = range(1, 1 + min(apart, windows // 2))
    return sum(float(np.abs(level[lag:] - level[:-lag]).mean()) for lag in lags) / len(lags) / deviation


def _without_drift(signal: Floats, samples: float) -> Floats:
    """Return a signal less its moving average of so many samples; at the ends, the nearest whole window's."""
    count = len(signal)
    if samples >= count:
        return signal - float(signal.mean())
    total = np.r_[0.0, np.cumsum(signal)]
    middle = np.clip(np.arange(count) + 0.5, samples / 2, count - samples / 2)
    edges = np.arange(count + 1)
    upper, lower = np.interp(middle + samples / 2, edges, total), np.interp(middle - samples / 2, edges, total)
    drift: Floats = (upper - lower) / samples
    return signal - drift
