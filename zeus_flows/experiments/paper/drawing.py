"""A result drawn as its chart says; nothing is computed here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from zeus_flows.experiments.paper.result import Cell, Chart, ChartKind, GuideLine, Result
from zeus_flows.reporting.figures import COLOURS, GRID, INK, MUTED, SURFACE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PANELS_ACROSS = 3
BATCH_SIZE = "batch size"  # an axis of it doubles from mark to mark


def draw(result: Result, *, title: str) -> Figure:
    """Return the figure: a panel for each value of the panel's column, a colour for each of the series'."""
    from matplotlib.figure import Figure

    chart = result.chart
    names = list(dict.fromkeys(map(str, result.column(chart.panel)))) if chart.panel else [""]
    across = 1 if chart.kind is ChartKind.BARS else min(PANELS_ACROSS, len(names))
    down = math.ceil(len(names) / across)
    groups = len(set(map(str, result.column(chart.x)))) if chart.kind is ChartKind.BARS else 0
    size = (max(7.5, 4.2 * across, 1.35 * groups), 0.9 + 3.1 * down)
    figure = Figure(figsize=size, facecolor=SURFACE, layout="constrained")
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    series = list(dict.fromkeys(map(str, result.column(chart.series)))) if chart.series else [chart.y]
    for axis, name in zip(axes, names, strict=False):
        _panel(axis, result, name, series)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    if chart.kind is ChartKind.PATH:
        figure.supxlabel("darker: less regret; ring: first recurrence, dot: last", fontsize=9, color=MUTED)
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
    if chart.kind is ChartKind.PATH:
        _walk(axis, rows, chart)
        return
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
    elif chart.x == BATCH_SIZE:
        axis.set_xscale("log", base=2)
    if chart.y == BATCH_SIZE:
        axis.set_yscale("log", base=2)
    if chart.kind is not ChartKind.BARS:
        _number_axis(chart.x, axis.xaxis)
    _number_axis(chart.y, axis.yaxis)
    _lines(axis, [line for line in result.lines if line.panel == name])
    if chart.level is not None:
        axis.axhline(chart.level, color=MUTED, linewidth=1.0, linestyle=(0, (4, 2)))


def _lines(axis: Axes, lines: Sequence[GuideLine]) -> None:
    """Draw dotted lines without letting them stretch the axes; a label that several share is written once."""
    limits = axis.get_xlim(), axis.get_ylim()
    for line in lines:
        (x0, y0), (x1, y1) = line.begin, line.end
        axis.plot((x0, x1), (y0, y1), color=MUTED, linewidth=1.0, linestyle=(0, (1, 2)), zorder=1.5)
    axis.set_xlim(limits[0])
    axis.set_ylim(limits[1])
    if lines:
        text = "dotted: " + ", ".join(dict.fromkeys(line.label for line in lines))
        axis.set_title(text, loc="right", fontsize=8, color=MUTED)


def _walk(axis: Axes, rows: Sequence[Mapping[str, Cell]], chart: Chart) -> None:
    """Draw a walk over a map: dark is little regret, the walk goes from light to dark."""
    across = sorted({float(row[chart.x]) for row in rows})
    down = sorted({float(row[chart.y]) for row in rows})
    regrets = np.full((len(down), len(across)), np.nan)
    steps = []
    for row in rows:
        at = down.index(float(row[chart.y])), across.index(float(row[chart.x]))
        if row["recurrence"]:
            steps.append((at[1], at[0]))
        else:
            regrets[at] = float(row["regret"])
    axis.grid(visible=False)
    axis.imshow(np.log1p(regrets), origin="lower", aspect="auto", cmap="Greys_r", alpha=0.75)
    line, last = np.array(steps, float), max(len(steps) - 1, 1)
    for number, (a, b) in enumerate(pairwise(line)):
        axis.plot((a[0], b[0]), (a[1], b[1]), color=COLOURS[1], alpha=0.25 + 0.75 * number / last, linewidth=1.6)
    axis.scatter(line[:, 0], line[:, 1], s=14, color=COLOURS[1], zorder=3)
    axis.scatter(line[0, 0], line[0, 1], s=42, facecolor=SURFACE, edgecolor=COLOURS[0], linewidth=1.6, zorder=4)
    axis.scatter(line[-1, 0], line[-1, 1], s=48, color=COLOURS[0], zorder=4)
    axis.set_xticks(range(len(across)), [f"{value:g}" for value in across], rotation=45 if len(across) > 8 else 0)
    axis.set_yticks(range(len(down)), [f"{value:g}" for value in down])


def _number_axis(name: str, which: Axis) -> None:
    """Give an axis few marks, and those of seconds and joules a prefix: 20 k, not 20000. Batch sizes double."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    if name == BATCH_SIZE:
        which.set_major_formatter(lambda value, _at: f"{value:g}")
        return
    which.set_major_locator(MaxNLocator(nbins=5))
    if name.endswith(("(s)", "(J)")):
        which.set_major_formatter(EngFormatter())
