"""Charts as SVG text, drawn by hand: they need nothing, and take the colours of the page they stand in, light or dark.

A chart is plain values in, text out. Colours of what is not data are CSS classes that `page.ReportPage` defines.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 760
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 16, 44
#: From few to many, such as batch sizes; readable on white and on black.
_RAMP: Final = ("#6a5acd", "#2a78d6", "#0f9bb5", "#1baf7a", "#8aa90c", "#d99a00", "#eb6834", "#d64b8a")


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of a scatter: where, of which series, what is said of it, and how it stands out."""

    x: float
    y: float
    series: str
    told: str
    mark: str = ""  # "default" or "best"
    on_front: bool = False


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """A bar of a timeline: its number, height and series; `note` is why it stands out, such as `missed`."""

    number: int
    value: float
    series: str
    told: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class WaterfallStep:
    """A step of a waterfall: an amount with its interval; a `whole` one stands on the ground."""

    name: str
    amount: float
    low: float
    high: float
    told: str
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    """A line of a chart of intervals, in any unit; `told` is said at its end."""

    name: str
    value: float
    low: float
    high: float
    told: str
    strong: bool = False


def colours(series: Sequence[str]) -> dict[str, str]:
    """Return a colour for each series, in their order along the ramp.

    >>> colours(["8", "16"])
    {'8': '#6a5acd', '16': '#d64b8a'}
    """
    last = max(len(series) - 1, 1)
    return {name: _RAMP[round(i * (len(_RAMP) - 1) / last) % len(_RAMP)] for i, name in enumerate(series)}


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers across a range.

    >>> nice_ticks(0.0, 97.0)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    raw = span / most
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def scatter(dots: Sequence[Dot], series: Sequence[str], *, x_name: str, y_name: str, height: int = 400) -> str:
    """Return a scatter of energy against time, with the front that nothing beats and what is marked named."""
    plot = _Plot(height, right=112)
    most_x, most_y = (1.08 * max(values) for values in ([d.x for d in dots], [d.y for d in dots]))
    least_x, least_y = (0.9 * min(values) for values in ([d.x for d in dots], [d.y for d in dots]))
    plot.scale((least_x, most_x), (least_y, most_y))
    colour, parts = colours(series), list(plot.axes(x_name, y_name))
    front = sorted((d for d in dots if d.on_front), key=lambda d: d.x)
    if len(front) > 1:
        points = " ".join(f"{plot.x(d.x):.1f},{plot.y(d.y):.1f}" for d in front)
        parts.append(f'<polyline class="front" points="{points}"/>')
    for name in series:
        mine = sorted((d for d in dots if d.series == name), key=lambda d: d.x)
        points = " ".join(f"{plot.x(d.x):.1f},{plot.y(d.y):.1f}" for d in mine)
        parts.append(f'<polyline fill="none" stroke="{colour[name]}" stroke-opacity=".35" points="{points}"/>')
        parts += [
            f'<circle cx="{plot.x(d.x):.1f}" cy="{plot.y(d.y):.1f}" r="4" fill="{colour[name]}">'
            f"<title>{html.escape(d.told)}</title></circle>"
            for d in mine
        ]
    for dot in dots:
        if dot.mark:
            parts += _marked(plot, dot)
    parts += _legend([(name, colour[name]) for name in series], plot.right + 16, "batch size")
    return _svg(height, parts, f"{y_name} against {x_name}")


def bars(
    found: Sequence[TimelineBar],
    series: Sequence[str],
    *,
    y_name: str,
    line: float | None = None,
    line_name: str = "",
    boundaries: Sequence[float] = (),
    height: int = 260,
) -> str:
    """Return a timeline of bars; `line` is what they are compared with, `boundaries` lie between numbers."""
    plot = _Plot(height, right=112)
    first, last = found[0].number, found[-1].number
    plot.scale((first - 0.5, last + 0.5), (0.0, 1.1 * max([*(b.value for b in found), line or 0.0])))
    wide = max(plot.x(first + 0.9) - plot.x(first + 0.1), 0.8)
    colour, parts = colours(series), list(plot.axes("recurrence", y_name, whole=True))
    for bar in found:
        x, y = plot.x(bar.number) - wide / 2, plot.y(bar.value)
        missed = ' fill-opacity=".25"' if bar.note else ""
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{plot.bottom - y:.1f}" rx="1" '
            f'fill="{colour[bar.series]}"{missed}><title>{html.escape(bar.told)}</title></rect>'
        )
        if bar.note:
            parts.append(f'<text class="bad" x="{plot.x(bar.number):.1f}" y="{y - 3:.1f}">×</text>')
    for at in boundaries:
        parts.append(
            f'<line class="drift" x1="{plot.x(at):.1f}" x2="{plot.x(at):.1f}" y1="{_TOP}" y2="{plot.bottom}"/>'
        )
    if line is not None:
        y = plot.y(line)
        parts.append(f'<line class="compare" x1="{plot.left}" x2="{plot.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="ink end" x="{plot.right - 4}" y="{y - 5:.1f}">{html.escape(line_name)}</text>')
    parts += _legend([(name, colour[name]) for name in series], plot.right + 16, "batch size")
    return _svg(height, parts, f"{y_name} by recurrence")


def waterfall(steps: Sequence[WaterfallStep], *, y_name: str, height: int = 280) -> str:
    """Return how one whole becomes another, step by step; whiskers are intervals."""
    plot, tops = _Plot(height), list[tuple[float, float]]()
    level = 0.0
    for step in steps:
        low, high = (0.0, step.amount) if step.whole else (level, level - step.amount)
        tops.append((low, high))
        level = high
    most = max(max(pair) for pair in tops) * 1.14
    least = min(0.0, *(min(pair) for pair in tops)) * 1.1
    plot.scale((0.0, float(len(steps))), (least, most))
    parts = list(plot.axes("", y_name, ticks_below=False))
    for i, (step, (low, high)) in enumerate(zip(steps, tops, strict=True)):
        middle, y0, y1 = plot.x(i + 0.5), plot.y(max(low, high)), plot.y(min(low, high))
        kind = "whole" if step.whole else "good" if step.amount >= 0 else "worse"
        wide = (plot.x(1) - plot.x(0)) * 0.62
        parts.append(
            f'<rect class="{kind}" x="{middle - wide / 2:.1f}" y="{y0:.1f}" width="{wide:.1f}" '
            f'height="{max(y1 - y0, 1.5):.1f}" rx="2">'
            f"<title>{html.escape(step.name)}: {html.escape(step.told)}</title></rect>"
        )
        above = y0
        if not step.whole and step.high > step.low:
            ends = [plot.y(low - value) for value in (step.low, step.high)]
            parts.append(f'<path class="whisker" d="M{middle:.1f} {ends[0]:.1f}V{ends[1]:.1f}"/>')
            above = min(y0, *ends)
        parts.append(f'<text class="ink mid" x="{middle:.1f}" y="{above - 6:.1f}">{html.escape(step.told)}</text>')
        parts.append(f'<text class="muted mid" x="{middle:.1f}" y="{plot.bottom + 18}">{html.escape(step.name)}</text>')
    return _svg(height, parts, y_name)


def ranges(lines: Sequence[Range], *, x_name: str) -> str:
    """Return intervals below one another, on a logarithmic scale."""
    height = 26 * len(lines) + 62
    plot = _Plot(height, left=92, right=190)
    low, high = min(one.low for one in lines), max(one.high for one in lines)
    plot.scale((math.log(low / 1.05), math.log(high * 1.05)), (0.0, float(len(lines))))
    parts = list[str]()
    for tick in _log_ticks(low / 1.05, high * 1.05):
        x = plot.x(math.log(tick))
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{plot.bottom}"/>')
        parts.append(f'<text class="muted mid" x="{x:.1f}" y="{plot.bottom + 16}">{_number(tick)}</text>')
    for i, one in enumerate(lines):
        y, kind = plot.y(len(lines) - i - 0.5), "strong" if one.strong else "plain"
        x0, x1, x = (plot.x(math.log(value)) for value in (one.low, one.high, one.value))
        parts.append(f'<text class="ink end" x="{plot.left - 12}" y="{y + 4:.1f}">{html.escape(one.name)}</text>')
        parts.append(f'<line class="range {kind}" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
        parts.append(f'<text class="muted" x="{plot.right + 12}" y="{y + 4:.1f}">{html.escape(one.told)}</text>')
    parts.append(
        f'<text class="muted mid" x="{(plot.left + plot.right) / 2}" y="{height - 6}">{html.escape(x_name)}</text>'
    )
    return _svg(height, parts, x_name)


class _Plot:
    """Where values lie on a chart."""

    def __init__(self, height: int, *, left: int = _LEFT, right: int = _RIGHT) -> None:
        self.left, self.right, self.bottom = left, WIDTH - right, height - _BOTTOM
        self._x = self._y = (0.0, 1.0)

    def scale(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        """Let values from low to high fill the plot."""
        self._x, self._y = x, y

    def x(self, value: float) -> float:
        """Return where a value lies from the left."""
        low, high = self._x
        return self.left + (self.right - self.left) * (value - low) / ((high - low) or 1.0)

    def y(self, value: float) -> float:
        """Return where a value lies from the top."""
        low, high = self._y
        return self.bottom - (self.bottom - _TOP) * (value - low) / ((high - low) or 1.0)

    def axes(self, x_name: str, y_name: str, *, whole: bool = False, ticks_below: bool = True) -> Iterator[str]:
        """Yield the grid, its numbers and names."""
        for tick in nice_ticks(*self._y):
            y = self.y(tick)
            yield f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text class="muted end" x="{self.left - 8}" y="{y + 4:.1f}">{_number(tick)}</text>'
        for tick in nice_ticks(*self._x, most=8) if ticks_below else ():
            if not whole or tick == int(tick):
                yield f'<text class="muted mid" x="{self.x(tick):.1f}" y="{self.bottom + 18}">{_number(tick)}</text>'
        middle = (_TOP + self.bottom) / 2
        yield f'<text class="muted mid" transform="translate(14 {middle:.0f}) rotate(-90)">{html.escape(y_name)}</text>'
        at = (self.left + self.right) / 2
        yield f'<text class="muted mid" x="{at:.0f}" y="{self.bottom + 36}">{html.escape(x_name)}</text>'


def _marked(plot: _Plot, dot: Dot) -> Iterator[str]:
    x, y = plot.x(dot.x), plot.y(dot.y)
    yield f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="8"/>'
    side, dx = ("end", -11) if x > (plot.left + plot.right) / 2 else ("start", 11)
    dy = 20 if dot.on_front else -9  # below the front nothing is in the way
    yield f'<text class="ink {side}" x="{x + dx:.1f}" y="{y + dy:.1f}">{html.escape(dot.mark)}</text>'


def _legend(entries: Sequence[tuple[str, str]], x: float, title: str) -> Iterator[str]:
    yield f'<text class="muted" x="{x}" y="{_TOP + 8}">{title}</text>'
    for i, (name, colour) in enumerate(entries):
        y = _TOP + 28 + 19 * i
        yield f'<circle cx="{x + 5}" cy="{y - 4}" r="4.5" fill="{colour}"/>'
        yield f'<text class="ink" x="{x + 16}" y="{y}">{html.escape(name)}</text>'


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers across a range of logarithms, few of them.

    >>> _log_ticks(8.0, 300.0)
    [10.0, 20.0, 50.0, 100.0, 200.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]
    return found if len(found) <= 7 else [tick for tick in found if str(tick).lstrip("0.")[0] == "1"]


def _number(value: float) -> str:
    return f"{value:,.10g}"


def _svg(height: int, parts: Sequence[str], name: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(name)}">'
    return head + "".join(parts) + "</svg>"
