"""Figures: the paper's figure 10 for any job, and what an experiment with known optima can show beside it.

`matplotlib` comes with MLflow and takes a second to import: only the functions that draw import it. Figures are made
without `pyplot`, so that nothing is shared between threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zeus_flows.core.drift_windows import Cause, DriftWindow
from zeus_flows.core.records import Observation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE = "#0b0b0b", "#52514e", "#e4e3df", "#ffffff"
COLOURS = ("#2a78d6", "#eb6834", "#1baf7a", "#7a7974", "#4a3aa7", "#d64b8a", "#b58900", "#0f7c8c")
RESET, SKIPPED = "#c22f2f", "#b58900"


@dataclass(frozen=True, slots=True)
class Point:
    """One recurrence, as figure 10 shows it."""

    recurrence: int
    energy_j: float
    time_s: float
    batch_sizes: tuple[int, ...]
    converged: bool
    explored: bool


def points(observations: Sequence[Observation]) -> list[Point]:
    """Return a history's recurrences; energy and time are those of all attempts."""
    ordered = sorted(observations, key=lambda o: o.order)
    found = []
    for number, group in groupby(ordered, key=lambda o: o.recurrence):
        attempts = list(group)
        found.append(
            Point(
                number,
                sum(o.energy_j for o in attempts),
                sum(o.time_s for o in attempts),
                tuple(o.batch_size for o in attempts),
                attempts[-1].converged,
                any(o.explores for o in attempts),
            )
        )
    return found


def figure_10(
    series: Sequence[Point],
    windows: Sequence[DriftWindow] = (),
    *,
    title: str,
    unit: str = "recurrence",
    simulated: bool = False,
    skipped: Sequence[int] = (),
) -> Figure:
    """Draw energy to accuracy, time to accuracy and batch size per recurrence, with windows and resets marked.

    Args:
        series: Recurrences that trained.
        windows: Their drift windows.
        title: Above it.
        unit: What a recurrence is called.
        simulated: Whether the joules are.
        skipped: Recurrences that the drift gate skipped.
    """
    figure, axes = _panels(3, height=6.6, heights=(1, 1, 1.15))
    x = [p.recurrence for p in series]
    mark = " (simulated)" if simulated else ""
    _fit_scale(axes[0], x, [p.energy_j for p in series], "ETA", mark, (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0)))
    _fit_scale(axes[1], x, [p.time_s for p in series], "TTA", mark, (("h", 3600.0), ("min", 60.0), ("s", 1.0)))
    _batch_sizes(axes[2], series)
    _mark_skipped(axes, skipped)
    for axis in axes:
        _mark_windows(axis, windows)
    axes[2].set_xlabel(unit)
    axes[2].set_xlim(min((*x, *skipped)) - 0.7, max((*x, *skipped)) + 0.7)
    axes[0].set_title(title, loc="left", fontsize=11, color=INK, pad=26)
    _legend_10(axes[0], series, windows, skipped)
    return figure


def regret_figure(regret: Mapping[str, npt.NDArray[np.float64]], *, title: str) -> Figure:
    """Draw cumulative dynamic regret per slice: the mean of the replays, and the middle 90 % of them.

    Args:
        regret: Of each contender: replays x slices, in units of the slice's best expected cost.
        title: Above it.
    """
    figure, (axis,) = _panels(1, height=4.2, heights=(1,), right=0.8)
    ends = []
    for i, ((name, values), colour) in enumerate(zip(regret.items(), COLOURS * 2, strict=False)):
        total = values.cumsum(axis=1)
        x = np.arange(1, total.shape[1] + 1)
        mean = total.mean(axis=0)
        low, high = np.percentile(total, [5, 95], axis=0)
        axis.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
        dashes: Any = (0, (3, 1.5)) if i % 2 else "-"  # so that one line shows through another that equals it
        axis.plot(x, mean, color=colour, linewidth=2, linestyle=dashes)
        ends.append((float(mean[-1]), name, colour))
    axis.set_xlim(0.5, total.shape[1] + 0.5)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    _end_labels(axis, ends)
    axis.set_xlabel("slice")
    axis.set_ylabel("cumulative regret\n(runs of the slice's best arm)", color=MUTED)
    axis.set_title(title, loc="left", fontsize=11, color=INK, pad=12)
    return figure


def arms_figure(
    costs: npt.NDArray[np.float64],
    batch_sizes: Sequence[int],
    paths: Mapping[str, Sequence[int]],
    *,
    title: str,
) -> Figure:
    """Draw what every arm costs on every slice, relative to the slice's best, and where contenders went.

    Args:
        costs: Slices x arms, in joules; infinite where the target is not always reached.
        batch_sizes: The arms.
        paths: Of each contender, the batch size of each slice.
        title: Above it.
    """
    figure, (axis,) = _panels(1, height=4.4, heights=(1,), right=0.97)
    with np.errstate(invalid="ignore"):
        over = 100.0 * (costs / costs.min(axis=1, keepdims=True) - 1.0).T
        over[~np.isfinite(over)] = np.nan
    most = float(np.nanpercentile(over, 98))
    masked = np.ma.masked_invalid(over)
    from matplotlib.colors import LinearSegmentedColormap

    steps = LinearSegmentedColormap.from_list("dearer", ["#ffffff", "#86b6ef", "#256abf", "#0d366b"])
    ramp = steps.with_extremes(bad="#d9d8d4")
    n = costs.shape[0]
    extent = (0.5, n + 0.5, -0.5, len(batch_sizes) - 0.5)
    shown = axis.imshow(masked, origin="lower", aspect="auto", cmap=ramp, vmin=0, vmax=max(most, 1.0), extent=extent)
    best = costs.argmin(axis=1)
    axis.scatter(np.arange(1, n + 1), best, s=26, marker="s", facecolor="none", edgecolor=INK, linewidth=1.2)
    handles = [_proxy(marker="s", markerfacecolor="none", markeredgecolor=INK, linestyle="none", label="best arm")]
    for offset, ((name, path), colour) in enumerate(
        zip(paths.items(), ("#eb6834", "#1baf7a", "#d64b8a"), strict=False)
    ):
        y = [batch_sizes.index(b) + (0.12 if offset else -0.12) * (1 if offset < 2 else 0) for b in path]
        axis.plot(np.arange(1, n + 1), y, color=colour, linewidth=1.6, marker="o", markersize=2.6)
        handles.append(_proxy(color=colour, marker="o", markersize=3, label=name))
    axis.set_yticks(range(len(batch_sizes)), [str(b) for b in batch_sizes])
    axis.grid(visible=False)
    axis.set_xlabel("slice")
    axis.set_ylabel("batch size", color=MUTED)
    bar = figure.colorbar(shown, ax=axis, pad=0.015, fraction=0.05)
    bar.set_label("expected cost above the best arm (%)", color=MUTED)
    bar.outline.set_visible(False)
    axis.set_title(title, loc="left", fontsize=11, color=INK, pad=24)
    axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize=8.5)
    return figure


def data_figure(
    positive: Sequence[float],
    overlap: Sequence[float],
    epochs: npt.NDArray[np.float64],
    placebo: npt.NDArray[np.float64] | None,
    *,
    title: str,
    arm: int,
) -> Figure:
    """Draw what drifts: label balance, overlap of neighbouring slices, and one arm's epochs beside the placebo's.

    Args:
        positive: Share of positive labels of each slice.
        overlap: Share of rows that each slice has in common with the one before.
        epochs: Slices x seeds: epochs to the target of one arm.
        placebo: The same with time shuffled.
        title: Above it.
        arm: That arm.
    """
    figure, axes = _panels(2, height=5.0, heights=(1, 1.1))
    x = np.arange(1, len(positive) + 1)
    axes[0].plot(x, 100 * np.array(positive), color=COLOURS[0], linewidth=2, label="positive labels")
    majority = 100 * np.maximum(positive, 1 - np.array(positive))
    axes[0].plot(x, majority, color=COLOURS[3], linewidth=1.5, linestyle=(0, (4, 2)), label="accuracy of the majority")
    axes[0].plot(x[1:], 100 * np.array(overlap[1:]), color=COLOURS[2], linewidth=1.5, label="rows shared with the last")
    axes[0].set_ylim(0, 104)
    axes[0].set_ylabel("% of the slice", color=MUTED)
    axes[0].legend(loc="lower left", bbox_to_anchor=(0, 0.98), ncols=3, frameon=False, fontsize=8.5)
    for values, colour, name in ((epochs, COLOURS[1], "as it was"), (placebo, COLOURS[3], "time shuffled")):
        if values is None:
            continue
        with np.errstate(all="ignore"):
            axes[1].plot(x, np.nanmean(values, axis=1), color=colour, linewidth=2, label=name)
        for seed in values.T:
            axes[1].plot(x, seed, color=colour, linestyle="none", marker="o", markersize=2.5, alpha=0.45)
    axes[1].set_ylim(bottom=0)
    axes[1].set_xlim(0.5, len(x) + 0.5)
    axes[1].set_ylabel(f"epochs to the target\nat batch size {arm}", color=MUTED)
    axes[1].legend(loc="lower left", frameon=False, fontsize=8.5, ncols=2)
    axes[1].set_xlabel("slice")
    axes[0].set_title(title, loc="left", fontsize=11, color=INK, pad=26)
    return figure


def write(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Write a figure as SVG and PNG; return both paths. The same figure gives the same bytes."""
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    with mpl.rc_context({"svg.hashsalt": "zeus_flows", "svg.fonttype": "none"}):
        figure.savefig(svg, metadata={"Date": None})
    figure.savefig(png, dpi=150)
    return svg, png


def _panels(count: int, *, height: float, heights: Sequence[float], right: float = 0.97) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, height), facecolor=SURFACE)
    top = 1 - 0.62 / height
    grid = figure.add_gridspec(
        count, 1, height_ratios=list(heights), left=0.11, right=right, bottom=0.5 / height, top=top, hspace=0.16
    )
    axes: list[Axes] = []
    for row in range(count):
        axis = figure.add_subplot(grid[row, 0], sharex=axes[0] if axes else None)
        axis.set_facecolor(SURFACE)
        axis.grid(visible=True, color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors=MUTED, labelsize=9, length=0, labelbottom=row == count - 1)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.spines["bottom"].set_color("#c3c2b7")
        axes.append(axis)
    from matplotlib.ticker import MaxNLocator

    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes[-1].xaxis.label.set_color(MUTED)
    return figure, axes


def _fit_scale(
    axis: Axes, x: Sequence[int], values: Sequence[float], name: str, mark: str, units: Sequence[tuple[str, float]]
) -> None:
    """Draw a series in the unit that fits it."""
    typical = float(np.median(values))
    unit, scale = next(((u, s) for u, s in units if typical >= s), units[-1])
    scaled = [v / scale for v in values]
    axis.plot(x, scaled, color=COLOURS[0], linewidth=1.6, marker="o", markersize=3.2)
    axis.set_ylabel(f"{name} ({unit})\n{mark.strip()}".rstrip(), color=MUTED)
    axis.set_ylim(0, 1.12 * max(scaled))


def _batch_sizes(axis: Axes, series: Sequence[Point]) -> None:
    arms = sorted({b for p in series for b in p.batch_sizes})
    level = {b: i for i, b in enumerate(arms)}
    x = [p.recurrence for p in series]
    axis.plot(x, [level[p.batch_sizes[-1]] for p in series], color=COLOURS[0], linewidth=1.2, alpha=0.6)
    for p in series:
        for b in p.batch_sizes[:-1]:
            axis.plot(p.recurrence, level[b], marker="x", color=COLOURS[1], markersize=6, markeredgewidth=1.6)
        fill = SURFACE if p.explored else COLOURS[0]
        edge = COLOURS[0] if p.converged else COLOURS[1]
        axis.plot(p.recurrence, level[p.batch_sizes[-1]], marker="o", color=fill, markeredgecolor=edge, markersize=5)
    axis.set_yticks(range(len(arms)), [str(b) for b in arms])
    axis.set_ylim(-0.5, len(arms) - 0.5)
    axis.set_ylabel("batch size", color=MUTED)


def _mark_windows(axis: Axes, windows: Sequence[DriftWindow]) -> None:
    for window in windows:
        if window.number % 2 == 0:
            axis.axvspan(window.first - 0.5, window.last + 0.5, color="#f1f0ec", zorder=0, linewidth=0)
        if window.ended_by is not None and window.ended_by.kind is Cause.DRIFT:
            axis.axvline(window.last + 0.5, color=RESET, linewidth=1.4, linestyle=(0, (4, 2)))


def _mark_skipped(axes: Sequence[Axes], skipped: Sequence[int]) -> None:
    style: dict[str, Any] = {"marker": "|", "linestyle": "none", "color": SKIPPED, "markersize": 7}
    for axis in axes:
        axis.plot(skipped, [0.06] * len(skipped), transform=axis.get_xaxis_transform(), markeredgewidth=2, **style)


def _legend_10(top: Axes, series: Sequence[Point], windows: Sequence[DriftWindow], skipped: Sequence[int]) -> None:
    handles = [_proxy(marker="o", color=COLOURS[0], linestyle="none", label="best known")]
    if any(p.explored for p in series):
        handles.append(
            _proxy(marker="o", color=SURFACE, markeredgecolor=COLOURS[0], linestyle="none", label="exploring")
        )
    if any(len(p.batch_sizes) > 1 for p in series):
        handles.append(_proxy(marker="x", color=COLOURS[1], linestyle="none", label="stopped, then retried"))
    if any(w.ended_by is not None and w.ended_by.kind is Cause.DRIFT for w in windows):
        handles.append(_proxy(color=RESET, linestyle=(0, (4, 2)), label="drift: epochs forgotten"))
    if len(windows) > 1:
        from matplotlib.patches import Patch

        handles.append(Patch(color="#f1f0ec", label="every other drift window"))
    if skipped:
        handles.append(_proxy(marker="|", color=SKIPPED, linestyle="none", label="skipped by the gate"))
    top.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=6, frameon=False, fontsize=8.5)


def _end_labels(axis: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Name lines at their right ends, moved apart where they would overlap."""
    low, high = axis.get_ylim()
    gap, last = 0.055 * (high - low), -np.inf
    for y, name, colour in sorted(ends):
        at = max(y, last + gap)
        axis.annotate(
            f"{name}  {y:.1f}",
            xy=(1.0, at),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
            annotation_clip=False,
        )
        axis.plot(
            [1.003], [at], marker="s", color=colour, markersize=5, clip_on=False, transform=axis.get_yaxis_transform()
        )
        last = at


def _proxy(**style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **{"linewidth": 1.6, "markersize": 5} | style)
