"""Quantities as people read them."""

from __future__ import annotations

import reprlib

from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import Knob

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120


def joules(value: float) -> str:
    """Return an energy.

    >>> joules(950.0), joules(1_234.0), joules(5.6e6)
    ('950 J', '1.23 kJ', '5.6 MJ')
    """
    for scale, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} J"


def seconds(value: float) -> str:
    """Return a duration.

    >>> seconds(42.4), seconds(754.0), seconds(7290.0)
    ('42.4 s', '12.6 min', '2.02 h')
    """
    if abs(value) >= 7200:
        return f"{value / 3600:.3g} h"
    return f"{value:.3g} s" if abs(value) < 120 else f"{value / 60:.3g} min"


def setting_text(setting: float | None, knob: Knob = Knob.POWER_LIMIT) -> str:
    """Return a setting of a knob, per GPU. Empty where none was applied.

    >>> setting_text(150.0), setting_text(1380.0, Knob.CLOCKS), setting_text(None)
    ('150 W', '1380 MHz', '')
    """
    return "" if setting is None else f"{setting:.4g} {knob.unit}"


def cost_text(job: Job, cost: float) -> str:
    """Return a cost by a job's objective: an energy, or a duration where joules mean nothing.

    >>> cost_text(Job("t", (8,), 8, 1), 1_234.0), cost_text(Job("t", (8,), 8, 1, in_seconds=True), 90.0)
    ('1.23 kJ', '90 s')
    """
    return seconds(cost) if job.in_seconds else joules(cost)


def times(count: float) -> str:
    """Return a number of runs.

    >>> times(1), times(3), times(2.41)
    ('1 run', '3 runs', '2.4 runs')
    """
    return f"{round(count, 1):g} run{'' if count == 1 else 's'}"


def one_line(text: str, most: int = 400) -> str:
    r"""Return a text of any origin for a message: one line of bounded length that a terminal shows as it is.

    >>> one_line("red \x1b[31m"), one_line("x" * 50, most=12)
    ('red \\x1b[31m', 'xxxxxxxxx...')
    """
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def shown(value: object) -> str:
    """Return a value of any origin for a message, however large it is.

    >>> shown("x"), shown(list(range(100)))
    ("'x'", '[0, 1, 2, 3, 4, 5, ...]')
    """
    return one_line(_SHORT.repr(value))
