"""What a figure comes to: a table, how it is drawn, and lines against what was published."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

Cell = str | float | int


class ChartKind(StrEnum):
    """How rows become marks."""

    BARS = "bars"
    LINES = "lines"
    POINTS = "points"
    PATH = "path"  # a walk over a map of regret: rows of recurrence 0 are the map, the others the walk


@dataclass(frozen=True, slots=True)
class Chart:
    """Which columns are drawn.

    Attributes:
        kind: As bars, lines or points.
        x: Column along the horizontal axis.
        y: Column along the vertical one.
        series: Column whose values get a colour each.
        panel: Column whose values get a panel each; empty: one panel.
        low: Column with the lower end of the interval over seeds or runs; empty: none.
        high: Column with its upper end.
        level: A line across, such as 1 for the baseline; None: none.
    """

    kind: ChartKind
    x: str
    y: str
    series: str
    panel: str = ""
    low: str = ""
    high: str = ""
    level: float | None = None


@dataclass(frozen=True, slots=True)
class GuideLine:
    """A straight dotted line through two points, in one panel."""

    label: str
    panel: str
    begin: tuple[float, float]
    end: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Claim:
    """A published statement, what came out here, how far off it may be, and whether it holds."""

    what: str
    published: str
    ours: str
    tolerance: str
    met: bool


@dataclass(frozen=True, slots=True)
class Result:
    """A figure's table, chart, claims and the lines drawn for comparison."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    chart: Chart
    claims: tuple[Claim, ...]
    lines: tuple[GuideLine, ...] = ()

    def column(self, name: str) -> list[Cell]:
        """Return a column's cells."""
        at = self.columns.index(name)
        return [row[at] for row in self.rows]


def range_claim(
    what: str, published: tuple[float, float], values: Sequence[float], *, tolerance: float, unit: str = "%"
) -> Claim:
    """Return whether the least and the greatest of some values are as published, each within a tolerance.

    >>> range_claim("saved", (10.0, 20.0), [11.0, 15.0, 18.0], tolerance=3.0).met
    True
    """
    low, high = min(values), max(values)
    return Claim(
        what,
        f"{published[0]:g} to {published[1]:g} {unit}",
        f"{low:.1f} to {high:.1f} {unit}",
        f"{tolerance:g} at either end",
        abs(low - published[0]) <= tolerance and abs(high - published[1]) <= tolerance,
    )


def write_csv(result: Result, file: Path) -> Path:
    """Write the table; return the file."""
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(result.columns)
        writer.writerows(result.rows)
    return file
