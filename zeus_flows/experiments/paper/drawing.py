"""A result drawn as its chart says; nothing is computed here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from zeus_flows.experiments.paper.result import ChartKind, Result
from zeus_flows.reporting.figures import COLOURS, GRID, INK, MUTED, SURFACE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PANELS_ACROSS = 3


def draw(result: Result, *, title: str) -> Figure:
    """Return the figure: a panel for each value of the panel's column, a colour for each of the series'."""
    from matplotlib.figure import Figure

    chart = result.chart
    names = list(dict.fromkeys(map(str, result.column(chart.panel)))) if chart.panel else [""]
    across = 1 if chart.kind is ChartKind.BARS else min(PANELS_ACROSS, len(names))
    down = math.ceil(len(names) / across)
    figure = Figure(figsize=(max(7.5, 4.2 * across), 0.9 + 3.1 * down), facecolor=SURFACE, layout="constrained")
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    series = list(dict.fromkeys(map(str, result.column(chart.series)))) if chart.series else [chart.y]
    for axis, name in zip(axes, names, strict=False):
        _panel(axis, result, name, series)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    if len(series) > 1 and chart.series != chart.panel:
        handles, labels = axes[0].get_legend_handles_labels()
        columns = min(len(series), 4)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _panel(axis: Axes, result: Result, name: str, series: Sequence[str]) -> None:
    chart = result.chart
    axis.set_facecolor(SURFACE)
    axis.grid(visible=True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=MUTED, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.set_title(name, loc="left", fontsize=10, color=INK)
    axis.set_ylabel(chart.y, color=MUTED)
    if chart.kind is not ChartKind.BARS:
        axis.set_xlabel(chart.x, color=MUTED)
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    rows = [row for row in rows if not chart.panel or str(row[chart.panel]) == name]
    groups = list(dict.fromkeys(str(row[chart.x]) for row in rows))
    for i, one in enumerate(series):
        ours = [row for row in rows if not chart.series or str(row[chart.series]) == one]
        if not ours:
            continue
        y = np.array([float(row[chart.y]) for row in ours])
        colour = COLOURS[i % len(COLOURS)] if chart.series != chart.panel else COLOURS[0]
        if chart.kind is ChartKind.BARS:
            width = 0.8 / len(series)
            x = np.array([groups.index(str(row[chart.x])) for row in ours]) + (i - (len(series) - 1) / 2) * width
            axis.bar(x, y, 0.92 * width, color=colour, label=one)
        else:
            x = np.array([float(row[chart.x]) for row in ours])
            line = "-" if chart.kind is ChartKind.LINES else "none"
            axis.plot(x, y, color=colour, linestyle=line, marker="o", markersize=3.5, linewidth=1.6, label=one)
        if chart.low:
            low, high = (np.array([float(row[c]) for row in ours]) for c in (chart.low, chart.high))
            if chart.kind is ChartKind.BARS:
                axis.errorbar(x, y, yerr=(np.maximum(y - low, 0), np.maximum(high - y, 0)), fmt="none", ecolor=INK)
            else:
                axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    if chart.kind is ChartKind.BARS:
        axis.set_xticks(range(len(groups)), groups)
    elif chart.x == "batch size":
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _at: f"{value:g}")
    else:
        _number_axis(chart.x, axis.xaxis)
    _number_axis(chart.y, axis.yaxis)
    if chart.level is not None:
        axis.axhline(chart.level, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)))


def _number_axis(name: str, which: Axis) -> None:
    """Give an axis few marks, and those of seconds and joules a prefix: 20 k, not 20000."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    which.set_major_locator(MaxNLocator(nbins=5))
    if name.endswith(("(s)", "(J)")):
        which.set_major_formatter(EngFormatter())
