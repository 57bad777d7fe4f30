"""What measurements of regret are told with: geometric means, and goals that are met or not."""

from __future__ import annotations

import math
from collections.abc import Collection

LEAST = 1e-9  # a geometric mean takes nothing for less


def geometric(values: Collection[float]) -> float:
    """Return the geometric mean; not a number where there is nothing."""
    if not values:
        return math.nan
    return math.exp(math.fsum(math.log(max(v, LEAST)) for v in values) / len(values))


class Goals:
    """What was aimed at, what came of it, and whether it is met: one line each, in `lines`."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, bool]] = []

    def at_most(self, text: str, value: float, most: float) -> None:
        """Add a goal that a figure must not exceed; one that could not be measured is not met."""
        self.lines.append((f"{text}: at most {most:g}", f"{value:.4g}", value <= most))

    def at_least(self, text: str, value: float, least: float) -> None:
        """Add a goal that a figure must reach; one that could not be measured is not met."""
        self.lines.append((f"{text}: at least {least:g}", f"{value:.4g}", value >= least))

    def show(self) -> None:
        """Print them."""
        print("\ngoals")
        for text, value, met in self.lines:
            print(f"  {'met    ' if met else 'NOT MET'}  {text}: {value}")
