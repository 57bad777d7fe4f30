"""Which clock to measure next, and which to keep (GPOEO's local search).

A search is a fold: readings in, the next step out. It reads the default clock and 0.8 of it, and then the one that a
model makes of those. Where that one reads as predicted, it is the one. Otherwise the search goes downhill from there
until a bracket holds the least cost, and narrows it by golden section over the clocks that the GPU supports. Where a
greatest slowdown is asked for, the slowest clock that keeps it is told from the times that were measured, which
between two clocks go with 1/f; nothing slower is tried.

At most `MOST` readings are asked for. The clock that is kept was measured, keeps the bound, and is cheaper than the
default by `WORTH`; a small gain is read a second time, and the default with it. Otherwise the search gives up.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from zeus_flows.core.clock_model import Aim, ClockReading, Model, Objective, closed_form
from zeus_flows.core.cost import price
from zeus_flows.core.job import Job, Selector
from zeus_flows.core.power_profile import Gpu, SettingMeasurement
from zeus_flows.errors import ConfigError

#: The most readings a search asks for, the default's included.
MOST = 8
#: The second clock, and the slowest that is looked at, as shares of what the default ran at.
SECOND, SLOWEST = 0.8, 0.4
#: How far the bracket's first points are apart, and how wide it is when the search ends, as shares.
RADIUS, NARROW = 0.08, 0.03
#: A clock this near to one that was measured is taken for it.
NEAR = 0.005
#: A reading this near to its prediction confirms it: energy and time, as shares.
CONFIRMS_ENERGY, CONFIRMS_TIME = 0.02, 0.01
#: A clock must be cheaper than the default by this share to be kept; up to the second one, it is read twice.
WORTH, SURE = 0.02, 0.05
#: So many readings nearest to the allowed slowdown tell where it is; less slack than this is not worth a probe.
NEIGHBOURS, SLACK = 4, 0.005
#: How much of the allowed slowdown is left for the noise of measured times.
SPARE = 0.003

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Probe:
    """Measure this clock next."""

    tag: ClassVar[str] = "probe"
    clock_mhz: float


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep this clock."""

    tag: ClassVar[str] = "keep"
    clock_mhz: float
    why: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Keep the default: unlock the clocks."""

    tag: ClassVar[str] = "gave_up"
    why: str


Step = Probe | Keep | GaveUp


def next_clock(
    readings: Sequence[ClockReading],
    clocks_mhz: Sequence[float],
    objective: Objective,
    *,
    ran_at_mhz: float | None = None,
    model: Model | None = closed_form,
    twice: bool = True,
) -> Step:
    """Return the next step of a search: a clock to measure, or the end.

    The search is walked through again from its beginning, so it goes on wherever the readings come from: this run,
    an earlier recurrence, or a log. A clock that was read more than once counts with its mean.

    Args:
        readings: What was measured, in any order.
        clocks_mhz: The clocks that the GPU supports, ascending; the greatest is the default.
        objective: What is looked for.
        ran_at_mhz: What the GPU ran at on average at the default, where a power limit held it back; None: the greatest.
        model: What predicts other clocks from the first two; None: the better of the two is where the search begins.
        twice: Whether a small gain is read a second time, and the default with it.

    >>> clocks = [600.0 + 50 * i for i in range(17)]
    >>> def measured(mhz: float) -> ClockReading:  # half of the time goes with the clock
    ...     return ClockReading(mhz, 70 + 170 * (mhz / 1400) ** 3, 0.5 + 0.5 * 1400 / mhz)
    >>> readings = []
    >>> while isinstance(step := next_clock(readings, clocks, Objective(slowdown=1.1)), Probe):
    ...     readings.append(measured(step.clock_mhz))
    >>> step
    Keep(clock_mhz=1200.0, why='-20.1 % energy, +8.3 % time against the default; 3 clocks measured')

    Raises:
        ConfigError: the clocks are not ascending, or there is none.
    """
    if not clocks_mhz or list(clocks_mhz) != sorted(set(clocks_mhz)):
        raise ConfigError(f"clocks must be ascending and distinct, not {list(clocks_mhz)}")
    by_clock: dict[float, list[ClockReading]] = {}
    for reading in readings:
        by_clock.setdefault(reading.clock_mhz, []).append(reading)
    means = {mhz: _mean(of_one) for mhz, of_one in by_clock.items()}
    default_mhz = clocks_mhz[-1]
    if default_mhz not in means:
        return Probe(default_mhz)
    if len(readings) < MOST:
        wanted = _unread(_walk(_Ground(clocks_mhz, ran_at_mhz, objective, means[default_mhz]), model), means)
        if wanted is not None:
            return Probe(wanted)
    likely = _smoothed(means, min(ran_at_mhz or default_mhz, default_mhz))
    default = likely[default_mhz]
    allowed = [likely[mhz] for mhz, read in means.items() if not objective.too_slow(read, means[default_mhz])]
    best = objective.best(allowed, default)
    gain = 1 - objective.of(best) / objective.of(default)
    if twice and WORTH <= gain < SURE and len(readings) < MOST:
        for mhz in (best.clock_mhz, default_mhz):
            if len(by_clock[mhz]) == 1:
                return Probe(mhz)
    if gain < WORTH:
        return GaveUp(f"none of {len(means)} clocks measured beats the default by {WORTH:.0%}")
    energy, time = best.energy_j / default.energy_j - 1, best.time_s / default.time_s - 1
    return Keep(
        best.clock_mhz,
        f"{100 * energy:+.1f} % energy, {100 * time:+.1f} % time against the default; {len(means)} clocks measured",
    )


def clock_to_measure(
    job: Job, gpu: Gpu, clocks_mhz: Sequence[float], measured: Sequence[SettingMeasurement]
) -> float | None:
    """Return which clock to measure next for a job, by its own objective; None where the search is over.

    Args:
        job: Its selector, eta and slowdown say what is looked for.
        gpu: What is measured.
        clocks_mhz: Every clock that it supports, in any order.
        measured: What is known of some of them.
    """
    rates, host_w = price(job, gpu.max_power_w), job.host_power_w or 0.0
    bound = job.slowdown if job.selector is Selector.MAX_SLOWDOWN else None
    objective = Objective(Aim.COST, slowdown=bound, eta=rates.eta, max_power_w=rates.max_power_w)
    readings = [ClockReading(m.setting, m.average_power_w + host_w, 1 / m.samples_per_s) for m in measured]
    step = next_clock(readings, sorted(clocks_mhz), objective, twice=False)
    return step.clock_mhz if isinstance(step, Probe) else None


def _unread(walk: Generator[float, ClockReading, None], means: dict[float, ClockReading]) -> float | None:
    """Return the first clock that a walk asks for and that was not read; None where it ends without one."""
    try:
        wanted = next(walk)
        while wanted in means:
            wanted = walk.send(means[wanted])
    except StopIteration:
        return None
    return wanted


def _mean(readings: Sequence[ClockReading]) -> ClockReading:
    count, time_s = len(readings), sum(r.time_s for r in readings) / len(readings)
    return replace(readings[0], time_s=time_s, power_w=sum(r.energy_j for r in readings) / count / time_s)


def _smoothed(means: dict[float, ClockReading], top: float) -> dict[float, ClockReading]:
    """Return readings whose times are halfway to the line that they make over 1/f: noise at the bound counts less."""
    if len(means) < 3:
        return means
    x, t, slope = _line([(1 / min(mhz, top), reading.time_s) for mhz, reading in means.items()])
    likely = {}
    for mhz, reading in means.items():
        on_line_s = t + slope * (1 / min(mhz, top) - x)
        time_s = (reading.time_s + max(on_line_s, 0.0)) / 2
        likely[mhz] = replace(reading, time_s=time_s, power_w=reading.energy_j / time_s)
    return likely


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the means and the slope of the line through points, by least squares."""
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    width = sum((a - x) ** 2 for a, _ in points)
    return x, y, sum((a - x) * (b - y) for a, b in points) / width if width else 0.0


def _walk(ground: _Ground, model: Model | None) -> Generator[float, ClockReading, None]:
    """Yield the clocks of a search one by one, and take their readings."""
    second = ground.nearest(SECOND * ground.top)
    if second in ground.seen:
        return
    ground.seen[second] = yield second
    at, confirmed = ground.best(), False
    if model is not None:
        predicted = ground.predicted(model, second)
        at = ground.nearest(predicted.clock_mhz)
        if at not in ground.seen:
            ground.seen[at] = yield at
        confirmed = ground.confirms(at, predicted)
    while not math.isfinite(ground.cost(at)):
        faster = ground.nearest(at)
        at = faster if faster not in ground.seen else ground.nearest(at + NARROW * ground.top)
        if at in ground.seen:
            break
        ground.seen[at] = yield at
    for direction in () if confirmed else (-1, 1):
        while True:
            further = ground.nearest(at + direction * RADIUS * ground.top)
            if further in ground.seen or (further - at) * direction <= 0:
                break
            ground.seen[further] = yield further
            if ground.cost(further) >= ground.cost(at):
                break
            at = further
    while (inside := ground.edge() or (None if confirmed else ground.inside())) is not None:
        ground.seen[inside] = yield inside


class _Ground:
    """What one walk has seen so far, and where it may go."""

    def __init__(
        self, clocks_mhz: Sequence[float], ran_at_mhz: float | None, objective: Objective, default: ClockReading
    ) -> None:
        self._clocks, self._objective, self._default = clocks_mhz, objective, default
        self.top = min(ran_at_mhz or math.inf, clocks_mhz[-1])
        self.seen = {clocks_mhz[-1]: default}

    def cost(self, clock_mhz: float) -> float:
        """Return what a clock costs that was seen; infinite where it is too slow."""
        reading = self.seen[clock_mhz]
        return math.inf if self._objective.too_slow(reading, self._default) else self._objective.of(reading)

    def best(self) -> float:
        """Return the cheapest clock that was seen."""
        return min(self.seen, key=lambda mhz: (self.cost(mhz), -mhz))

    def predicted(self, model: Model, second: float) -> ClockReading:
        """Return what a model says of the clock that it thinks best."""
        usable = [mhz for mhz in self._clocks if SLOWEST * self.top <= mhz <= self.top] or self._clocks[-1:]
        return self._objective.best(model(self._default, self.seen[second], usable, self.top), self._default)

    def confirms(self, clock_mhz: float, predicted: ClockReading) -> bool:
        """Return whether a clock that may be kept reads as predicted."""
        read = self.seen[clock_mhz]
        near = abs(read.energy_j / predicted.energy_j - 1) <= CONFIRMS_ENERGY
        return near and abs(read.time_s / predicted.time_s - 1) <= CONFIRMS_TIME and math.isfinite(self.cost(clock_mhz))

    def nearest(self, clock_mhz: float) -> float:
        """Return the supported clock nearest to one, no slower than allowed; one that was seen where it is as near."""
        slowest = self._slowest()
        wanted = min(max(clock_mhz, slowest), self.top)
        seen = min(self.seen, key=lambda mhz: abs(min(mhz, self.top) - wanted))
        if abs(min(seen, self.top) - wanted) <= NEAR * self.top:
            return seen
        allowed = [mhz for mhz in self._clocks if mhz >= slowest] or self._clocks[-1:]
        return min(allowed, key=lambda mhz: abs(mhz - wanted))

    def inside(self) -> float | None:
        """Return where golden section looks next between the neighbours of the best; None where they are near."""
        best, slowest = self.best(), self._slowest()
        at = min(best, self.top)
        below = max([*(mhz for mhz in self.seen if mhz < best), min(at, slowest)])
        above = min((min(mhz, self.top) for mhz in self.seen if mhz > best), default=at)
        if max(at - below, above - at) <= NARROW * self.top:
            return None
        wanted = at + (1 - _GOLDEN) * (above - at if at - below <= above - at else below - at)
        clock = self.nearest(wanted)
        return None if clock in self.seen else clock

    def edge(self) -> float | None:
        """Return the slowest clock that the bound allows, where the best one is on the way there and leaves slack."""
        if self._objective.slowdown is None:
            return None
        best = self.best()
        slack = self._objective.slowdown - self.seen[best].time_s / self._default.time_s
        if slack < SLACK or any(math.isfinite(self.cost(mhz)) for mhz in self.seen if mhz < best):
            return None
        clock = self.nearest(0.0)
        return clock if clock < best and clock not in self.seen else None

    def _slowest(self) -> float:
        """Return the slowest clock that the bound allows, by the times measured so far: T goes with 1/f."""
        slowest = max(SLOWEST * self.top, self._clocks[0])
        if self._objective.slowdown is None:
            return slowest
        longest_s = self._objective.slowdown * (1 - SPARE) * self._default.time_s
        points = [(1 / min(mhz, self.top), reading.time_s) for mhz, reading in self.seen.items()]
        points = sorted(points, key=lambda point: abs(point[1] - longest_s))[:NEIGHBOURS]
        x, t, slope = _line(points)
        if slope <= 0:
            return slowest
        return min(self.top, max(slowest, 1 / max(1 / self.top, x + (longest_s - t) / slope)))
