"""Figures of clocks: the trace with the period that was found in it, and energy over time, predicted and measured.

They take plain values, so that whoever has them can draw: a session for its run, a benchmark, a notebook. As in
`zeus_flows.reporting.figures`, only the functions that draw import matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zeus_flows.core.clock_model import ClockReading
from zeus_flows.core.period import Aperiodic, GpuTrace, Period
from zeus_flows.reporting.figures import COLOURS, GRID, INK, MUTED, RESET, SURFACE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: So many periods of a trace are drawn; more are a smear.
SHOWN = 14


def period_figure(trace: GpuTrace, found: Period | Aperiodic, *, title: str, simulated: bool = False) -> Figure:
    """Draw power and utilisation over time with every period marked, and the windows on top of one another.

    Args:
        trace: What was sampled.
        found: What `detect_period` says of it; where that is no period, the whole trace is drawn, and why.
        title: Above it.
        simulated: Whether the watts are.
    """
    figure = _figure(3.9)
    columns = 2 if isinstance(found, Period) else 1
    grid = figure.add_gridspec(
        2,
        columns,
        width_ratios=(2.6, 1)[:columns],
        height_ratios=(1.5, 1),
        left=0.08,
        right=0.97,
        bottom=0.14,
        top=0.80,
        wspace=0.2,
    )
    power, others = _axes(figure, grid[0, 0]), _axes(figure, grid[1, 0])
    shown = trace.seconds if isinstance(found, Aperiodic) else min(trace.seconds, SHOWN * found.period_s)
    count = max(2, round(shown / trace.step_s))
    at_s = np.arange(count) * trace.step_s
    power.plot(at_s, trace.power_w[:count], color=COLOURS[0], linewidth=1.3)
    power.set_ylabel("W, simulated" if simulated else "W", color=MUTED)
    power.tick_params(labelbottom=False)
    for i, channel in enumerate(trace.others):
        name = ("SM", "memory")[i] if i < 2 else "GPM"
        others.plot(at_s, channel[:count], color=COLOURS[1 + i], linewidth=1.1, label=name)
    if trace.others:
        others.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.95), ncols=3, frameon=False, fontsize=8)
    others.set_ylabel("utilisation (%)", color=MUTED)
    others.set_xlabel("seconds")
    for axis in (power, others):
        axis.set_xlim(0, shown)
    if isinstance(found, Period):
        for axis in (power, others):
            for i in range(int(shown / found.period_s) + 1):
                axis.axvline(i * found.period_s, color=RESET, linewidth=0.8, linestyle=(0, (4, 2)))
        _fold(_axes(figure, grid[:, 1]), trace, found.period_s)
        said = f"period {found.period_s:.3g} s; windows differ by {100 * found.error:.0f} % of their deviation"
    else:
        said = f"no period: {found.why}"
    power.set_title(f"{title}\n{said}", loc="left", fontsize=11, color=INK, pad=8)
    return figure


def clock_figure(
    measured: Sequence[ClockReading],
    predicted: Sequence[ClockReading] = (),
    *,
    default_mhz: float,
    chosen_mhz: float,
    title: str,
    slowdown: float | None = None,
    simulated: bool = False,
) -> Figure:
    """Draw energy over time against the default: clocks that were measured, and what was predicted of all.

    Args:
        measured: What was read, the default among it.
        predicted: What a model said, for the same amount of work.
        default_mhz: The clock that is not locked.
        chosen_mhz: The clock that was kept.
        title: Above it.
        slowdown: How many times slower than the default a clock may be; None: no bound.
        simulated: Whether the joules are.
    """
    default = next(r for r in measured if r.clock_mhz == default_mhz)

    def over(readings: Sequence[ClockReading]) -> tuple[list[float], list[float]]:
        ordered = sorted(readings, key=lambda r: r.clock_mhz)
        return (
            [100 * (r.time_s / default.time_s - 1) for r in ordered],
            [100 * (r.energy_j / default.energy_j - 1) for r in ordered],
        )

    figure = _figure(4.2)
    axis = _axes(figure, figure.add_gridspec(1, 1, left=0.10, right=0.97, bottom=0.13, top=0.83)[0, 0])
    if predicted:
        axis.plot(*over(predicted), color=COLOURS[3], linewidth=1.6, label="predicted from the first two")
    axis.plot(*over(measured), color=COLOURS[0], linestyle="none", marker="o", markersize=6, label="measured")
    chosen = [r for r in measured if r.clock_mhz == chosen_mhz]
    ring: dict[str, Any] = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.8}
    axis.plot(*over(chosen), linestyle="none", color=COLOURS[1], label="kept", **ring)
    times, energies = over(measured)
    ordered = sorted(measured, key=lambda r: r.clock_mhz)
    for i, (reading, time, energy) in enumerate(zip(ordered, times, energies, strict=True)):
        axis.annotate(
            f"{reading.clock_mhz:.0f}",
            (time, energy),
            xytext=(7, 6) if i % 2 else (-9, -15),  # neighbours are close
            textcoords="offset points",
            fontsize=8,
            color=MUTED,
        )
    if slowdown is not None:
        limit = 100 * (slowdown - 1)
        axis.axvline(limit, color=RESET, linewidth=1, linestyle=(0, (4, 2)), label=f"at most {limit:+.3g} % time")
    axis.set_xlim(min(0.0, *times) - 1, max(*times, 100 * ((slowdown or 1) - 1)) * 1.12 + 2)
    axis.set_ylim(min(energies) - 4, max(0.0, *energies) + 5)
    axis.set_xlabel("time against the default (%)")
    axis.set_ylabel("energy against the default (%)" + ("\nsimulated" if simulated else ""), color=MUTED)
    axis.set_title(title, loc="left", fontsize=11, color=INK, pad=26)
    axis.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.995), ncols=4, frameon=False, fontsize=8.5)
    return figure


def _fold(axis: Axes, trace: GpuTrace, period_s: float) -> None:
    """Draw the windows of a period on top of one another, and their mean."""
    windows, points = int(trace.seconds / period_s), 60
    at_s = (np.arange(windows)[:, None] + np.arange(points) / points) * period_s
    level = np.interp(at_s, np.arange(len(trace.power_w)) * trace.step_s, trace.power_w)
    x = np.arange(points) / points * period_s
    axis.plot(x, level.T, color=COLOURS[0], linewidth=0.7, alpha=max(0.06, 0.5 / windows**0.5))
    axis.plot(x, level.mean(axis=0), color=INK, linewidth=1.6)
    axis.set_xlabel("seconds into the period")
    axis.set_title(f"{windows} windows", loc="left", fontsize=9, color=MUTED)


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(8.6, height), facecolor=SURFACE)


def _axes(figure: Figure, place: object) -> Axes:
    axis: Axes = figure.add_subplot(place)  # type: ignore[call-overload]
    axis.set_facecolor(SURFACE)
    axis.grid(visible=True, color=GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(colors=MUTED, labelsize=8.5, length=0)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)
    return axis
