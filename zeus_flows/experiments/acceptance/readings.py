"""What readings say: is the counter right, how long must a span be, do limits limit? No GPU is asked here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import NamedTuple

from zeus_flows.experiments.acceptance.findings import REPORT_IT, AtLimit, Finding, SpanScatter, Verdict

#: A counter may differ by this much from the power sensor. Sensors themselves are good to about 5 W or 5 %.
AGREES = 0.03
#: Where the comparison itself is not sure to this, nothing can be told.
SURE = 0.015
#: What a span's average power may scatter by.
STEADY = 0.01
#: The lengths of spans that are looked at, in seconds.
LENGTHS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
_BLOCKS = 8
_FEWEST_SPANS = 5


class SensorReading(NamedTuple):
    """A moment under a steady load; NaN where a sensor does not exist."""

    time_s: float
    energy_j: float
    power_w: float


def energy_by_power(readings: Sequence[SensorReading]) -> float:
    """Return the integral of power.

    >>> energy_by_power([SensorReading(0.0, 0.0, 100.0), SensorReading(2.0, 0.0, 200.0)])
    300.0
    """
    return math.fsum((b.time_s - a.time_s) * (a.power_w + b.power_w) / 2 for a, b in pairwise(readings))


def judge_counter(readings: Sequence[SensorReading], *, loaded: bool) -> Finding:
    """Return whether the energy counter and the sampled power agree."""
    name = "counter against sampled power"
    if len(readings) < 2 * _BLOCKS:
        return Finding(name, Verdict.CANNOT_TELL, "too few readings", "", "give it more minutes: `--measure 10`")
    if math.isnan(readings[0].energy_j):
        means = "jobs integrate sampled power"
        return Finding(name, Verdict.CANNOT_TELL, "the GPU has no energy counter that counts", means)
    if math.isnan(readings[0].power_w):
        return Finding(name, Verdict.CANNOT_TELL, "the GPU has no power sensor", "the counter cannot be checked")
    if any(reading.power_w <= 0 for reading in readings):
        means = "the sensor does not answer that often, or not at all: the counter cannot be checked"
        return Finding(name, Verdict.CANNOT_TELL, "the power sensor says 0 W under load", means, REPORT_IT)
    size = (len(readings) - 1) // _BLOCKS
    blocks = [readings[i * size : (i + 1) * size + 1] for i in range(_BLOCKS)]
    ratios = [(block[-1].energy_j - block[0].energy_j) / energy_by_power(block) for block in blocks]
    ratio = (readings[-1].energy_j - readings[0].energy_j) / energy_by_power(readings)
    unsure = 2 * stdev(ratios) / math.sqrt(_BLOCKS)
    off = ratio - 1
    found = (
        f"the energy counter shows {abs(off):.1%} {'more' if off > 0 else 'less'} than the power sensor "
        f"(± {unsure:.1%}), over {_length(readings):.0f} s at {energy_by_power(readings) / _length(readings):.0f} W"
    )
    if unsure > SURE:
        return Finding(name, Verdict.CANNOT_TELL, found, "readings scatter too much", "give it more minutes")
    if abs(off) > AGREES:
        means = "joules of this GPU are off by that much, or its watts are; comparisons on this GPU still hold"
        return Finding(name, Verdict.FAIL, found, means, f"compare with a wall meter if there is one; {REPORT_IT}")
    if not loaded:
        return Finding(name, Verdict.CANNOT_TELL, found, "the GPU was idle, where sensors are at their worst")
    return Finding(name, Verdict.PASS, found, "energy comes from the counter")


def scatter_of_spans(readings: Sequence[SensorReading]) -> tuple[SpanScatter, ...]:
    """Return how far spans are apart, for each length of which there are enough."""
    counts = bool(readings) and not math.isnan(readings[0].energy_j)
    found = []
    for seconds in LENGTHS_S:
        powers, start = list[float](), 0
        for i, reading in enumerate(readings):
            span_s = reading.time_s - readings[start].time_s
            if span_s >= seconds:
                span = readings[start : i + 1]
                joules = reading.energy_j - readings[start].energy_j if counts else energy_by_power(span)
                powers.append(joules / span_s)
                start = i
        if len(powers) >= _FEWEST_SPANS and fmean(powers) > 0:
            found.append(SpanScatter(seconds, len(powers), stdev(powers) / fmean(powers)))
    return tuple(found)


def judge_spans(spans: Sequence[SpanScatter], *, default_s: float) -> Finding:
    """Return how long a span must be, against what jobs take by default."""
    name = "how long a span must be"
    if not spans:
        return Finding(name, Verdict.CANNOT_TELL, "too few readings", "", "give it more minutes: `--measure 10`")
    steady = [span.seconds for span in spans if all(s.scatter <= STEADY for s in spans if s.seconds >= span.seconds)]
    longest = spans[-1]
    if steady:
        found = f"spans of {min(steady):g} s scatter by {_at(spans, min(steady)):.1%}, longer ones by no more"
        if min(steady) <= default_s:
            means = f"the default, {default_s:g} s a limit, is enough"
            return Finding(name, Verdict.PASS, found, means)
        todo = f"write `power_limit: {{profile_seconds: {min(steady):g}}}` in job files for this GPU"
        return Finding(name, Verdict.FAIL, found, f"the default, {default_s:g} s a limit, is too short", todo)
    found = f"spans of {longest.seconds:g} s scatter by {longest.scatter:.1%}"
    if longest.seconds < default_s:
        return Finding(name, Verdict.CANNOT_TELL, found, "longer ones were not measured", "give it more minutes")
    means = "power limits are told apart only where they differ by more"
    return Finding(name, Verdict.FAIL, found, means, f"is something else running on the GPU? If not, {REPORT_IT}")


def judge_limits(rows: Sequence[AtLimit]) -> Finding:
    """Return whether power limits do what they say, given what a load did at each, greatest limit first."""
    name = "what limits do"
    wrong = [row for row in rows if abs(row.read_w - row.limit_w) > 1.0]
    if wrong:
        found = ", ".join(f"{row.limit_w:g} W was set and {row.read_w:g} W is read" for row in wrong)
        return Finding(name, Verdict.FAIL, found, "the driver does not take limits", REPORT_IT)
    top, low = rows[0], rows[-1]
    binding = [row for row in rows if row.limit_w < 0.95 * top.power_w]
    if not binding:
        found = f"the load draws {top.power_w:.0f} W, and the least limit is {low.limit_w:g} W"
        todo = "give a heavier load: `--load module:function`"
        return Finding(name, Verdict.CANNOT_TELL, found, "no limit could bind", todo)
    if all(row.power_w > 0.95 * top.power_w for row in binding):
        found = f"at {low.limit_w:g} W it drew {low.power_w:.0f} W, at {top.limit_w:g} W {top.power_w:.0f} W"
        means = "limits are accepted and ignored: nothing can be saved by them"
        return Finding(name, Verdict.FAIL, found, means, f"write `mode: observe` in job files; {REPORT_IT}")
    found = (
        f"from {top.limit_w:g} to {low.limit_w:g} W power went from {top.power_w:.0f} to {low.power_w:.0f} W, "
        f"and speed to {low.steps_per_s / top.steps_per_s:.0%}"
    )
    over = [row for row in binding if row.power_w > 1.1 * row.limit_w]
    if over:
        found += f"; {over[0].limit_w:g} W and below do not bind ({_worst(over):.2f} times the limit was drawn)"
    return Finding(name, Verdict.PASS, found, "power limits work; jobs measure what each does to them")


def judge_step(outside_s: float, inside_s: float, steps: int, typical_s: float) -> Finding:
    """Return what we cost, given the seconds outside and inside of steps, and what a typical step had outside."""
    name = "what we cost per step"
    share = outside_s / (outside_s + inside_s) if steps else math.nan
    found = (
        f"{1e6 * typical_s:.0f} µs a step, {typical_s / 0.010:.2%} of one of 10 ms; with readings at the edges of "
        f"spans {share:.2%} of {outside_s + inside_s:.0f} s ({steps} steps)"
    )
    if not steps:
        return Finding(name, Verdict.CANNOT_TELL, "no step was made", "", REPORT_IT)
    if typical_s <= 0.01 * 0.010 and share <= 0.01:
        return Finding(name, Verdict.PASS, found, "at most 1 %, as promised")
    return Finding(name, Verdict.FAIL, found, "more than the 1 % that is promised", REPORT_IT)


def median_of(call: Callable[[], object], clock: Callable[[], float], times: int = 10) -> float:
    """Return how long a call takes, in seconds: the middle one of several."""
    took = []
    for _ in range(times):
        began = clock()
        call()
        took.append(clock() - began)
    return sorted(took)[times // 2]


def _length(readings: Sequence[SensorReading]) -> float:
    return readings[-1].time_s - readings[0].time_s


def _at(spans: Sequence[SpanScatter], seconds: float) -> float:
    return next(span.scatter for span in spans if span.seconds == seconds)


def _worst(rows: Sequence[AtLimit]) -> float:
    return max(row.power_w / row.limit_w for row in rows)
