"""Figures on an attempt's page, as SVG: its power profile, what was believed of batch sizes, what was saved so far.

They are written as text, in milliseconds: a recurrence must not pay for a plotting library. `reporting.figures` draws
the larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from zeus_flows.core.cost import price
from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import PowerProfile
from zeus_flows.core.records import Decision, EnergySource, Observation, in_parts
from zeus_flows.core.savings import LEARNING, LUCK, Savings
from zeus_flows.core.text import cost_text, setting_text

_WIDTH, _ROW, _LEFT, _RIGHT, _TOP = 720, 26, 130, 210, 64
_INK, _MUTED, _GRID, _BAR, _CHOSEN, _LESS = "#0b0b0b", "#52514e", "#e4e3df", "#9dc2ee", "#2a78d6", "#eb6834"


@dataclass(frozen=True, slots=True)
class BarRow:
    """A row of a figure: a bar with its interval.

    Attributes:
        name: On its left.
        value: How long it is; None where that is not known.
        low: Where its interval begins.
        high: Where it ends.
        text: On its right.
        chosen: Whether it is what was chosen.
    """

    name: str
    value: float | None
    text: str
    low: float | None = None
    high: float | None = None
    chosen: bool = False


def profile_figure(job: Job, observation: Observation, profile: PowerProfile | None) -> str | None:
    """Return what a sample costs at each setting of the knob, the chosen one marked; None without measurements.

    Args:
        job: Whose cost.
        observation: The attempt.
        profile: What it was chosen by, where the attempt measured nothing itself.
    """
    known = observation.profile or profile
    if known is None or not known.measurements:
        return None
    rates = price(job, known.gpu.max_power_w)
    bars = []
    for m in sorted(known.measurements, key=lambda m: -m.setting):
        cost = rates.of(energy_j=1000 * m.average_power_w / m.samples_per_s, time_s=1000 / m.samples_per_s)
        text = f"{cost_text(job, cost)}, {m.average_power_w:.0f} W, {m.samples_per_s:.3g}/s"
        bars.append(
            BarRow(setting_text(m.setting, observation.knob), cost, text, chosen=m.setting == observation.setting)
        )
    partly = "" if known.complete else ", not complete yet"
    title = f"Cost of 1,000 samples by {observation.knob.words}, batch size {in_parts(observation)}"
    return _figure(title, f"with average power and samples per second{partly}{_mark(observation.energy_source)}", bars)


def belief_figure(job: Job, decision: Decision, source: EnergySource) -> str | None:
    """Return what was believed of each batch size when it was decided; None where nothing was."""
    bars = []
    for arm in decision.reason.arms:
        cost, spread = arm.expected_cost_j, arm.spread or 0.0
        text = str(arm.status) if cost is None else f"{cost_text(job, cost)}, {arm.status}, {arm.runs} runs"
        low, high = (None, None) if cost is None else (cost / (1 + spread), cost * (1 + spread))
        bars.append(BarRow(str(arm.batch_size), cost, text, low, high, chosen=arm.batch_size == decision.batch_size))
    if not any(bar.value is not None for bar in bars):
        return None
    title = f"Expected cost of a run by batch size, before recurrence {decision.recurrence}"
    return _figure(title, f"whiskers: one standard deviation around it{_mark(source)}", bars)


def savings_figure(job: Job, saved: Savings) -> str | None:
    """Return what was saved so far, by what; None where that is not known."""
    if saved.so_far is None:
        return None
    bars = []
    for line in (saved.so_far.total, *saved.so_far.lines):
        cost, is_total = line.amount.cost_j, line is saved.so_far.total
        name = line.name if is_total or line.name in (LEARNING, LUCK) else f"by {line.name}"
        bars.append(BarRow(name, cost, cost_text(job, cost), line.low.cost_j, line.high.cost_j, chosen=is_total))
    title = f"Cost saved against the default in {saved.so_far.recurrences} recurrences"
    return _figure(title, f"in all, and by what; whiskers hold nine times in ten{_mark(saved.energy_source)}", bars)


def _mark(source: EnergySource) -> str:
    return " · simulated energy" if source is EnergySource.SIMULATED else ""


def _figure(title: str, below: str, bars: Sequence[BarRow]) -> str:
    """Return horizontal bars from 0, negative ones to the left."""
    ends = [0.0, *(v for bar in bars for v in (bar.value, bar.low, bar.high) if v is not None)]
    least, most = min(ends), max(ends)
    scale = (_WIDTH - _LEFT - _RIGHT) / ((most - least) or 1.0)
    height = _TOP + _ROW * len(bars) + 16

    def x(value: float) -> float:
        return round(_LEFT + (value - least) * scale, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 26, title, size=15, weight=600),
        _text(16, 46, below, colour=_MUTED),
    ]
    for row, bar in enumerate(bars):
        y = _TOP + row * _ROW
        parts.append(_text(_LEFT - 10, y + 17, bar.name, anchor="end", weight=600 if bar.chosen else 400))
        if bar.value is not None:
            from_, to = sorted((x(0.0), x(bar.value)))
            colour = _LESS if bar.value < 0 else _CHOSEN if bar.chosen else _BAR
            width = max(round(to - from_, 1), 1.0)
            parts.append(f'<rect x="{from_}" y="{y + 4}" width="{width}" height="{_ROW - 8}" fill="{colour}"/>')
        if bar.low is not None and bar.high is not None and bar.high > bar.low:
            low, high, middle = x(bar.low), x(bar.high), y + _ROW / 2
            whiskers = f"M{low} {middle}H{high}M{low} {middle - 4}v8M{high} {middle - 4}v8"
            parts.append(f'<path d="{whiskers}" stroke="{_INK}" fill="none"/>')
        parts.append(_text(_WIDTH - _RIGHT + 12, y + 17, bar.text, colour=_INK if bar.chosen else _MUTED))
    parts.append(f'<path d="M{x(0.0)} {_TOP}V{height - 12}" stroke="{_GRID}"/>')
    return "".join([*parts, "</svg>\n"])


def _text(
    x: float, y: float, text: str, *, size: int = 13, weight: int = 400, colour: str = _INK, anchor: str = "start"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
