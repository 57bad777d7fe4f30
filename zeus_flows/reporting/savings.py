"""What was saved, as people read it: a table, and below it what it is measured against and what is not in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rich.table import Table

from zeus_flows.core.job import Mode
from zeus_flows.core.power_profile import Knob
from zeus_flows.core.records import EnergySource
from zeus_flows.core.savings import LEARNING, Amount, Baseline, Compared, Line, Savings, Tally
from zeus_flows.reporting.text import joules, seconds, setting_text

_JOULES = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"))
_SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
_LONG_ENOUGH = 2.0  # of a unit of time, for it to be used
_TOO_LITTLE = 1e-6  # a share of the baseline that nobody would print
NOTHING = Amount()

_Column = tuple[str, Callable[[Amount], float], tuple[tuple[float, str], ...]]
_TIME: _Column = ("time", lambda a: a.time_s, _SECONDS)
_COLUMNS: tuple[_Column, ...] = (
    ("energy", lambda a: a.energy_j, _JOULES),
    _TIME,
    ("cost", lambda a: a.cost_j, _JOULES),
)


def savings_table(saved: Savings) -> Table | None:
    """Return what was saved, or spent where nothing may be changed; None where nothing can be said."""
    if saved.so_far is None:
        return None
    table = Table(title=_title(saved), title_justify="left")
    columns = (_TIME,) if saved.in_seconds else _COLUMNS
    table.add_column("", justify="left")
    for name, _, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    if saved.mode is Mode.OFF:
        _spent(table, columns, saved.so_far)
        return table
    if saved.mode is Mode.OBSERVE:
        _spent(table, columns, saved.so_far)
        _looking(table, columns, saved.so_far)
    else:
        _lines(table, columns, saved.so_far, f"{count(saved.so_far.recurrences, 'recurrence')} so far")
    as_ever = saved.default.unchanged == saved.so_far.recurrences and saved.mode is not Mode.OBSERVE
    if saved.from_now_on is not None and not (as_ever and saved.from_now_on.total.amount == NOTHING):
        table.add_section()
        label = "each could save" if saved.mode is Mode.OBSERVE else "each from now on"
        _lines(table, columns, saved.from_now_on, label)
    return table


def savings_sentences(saved: Savings) -> Iterator[str]:
    """Yield what must be said below the table."""
    default, apart, so_far = saved.default, saved.apart, saved.so_far
    b0, looks = f"batch size {default.batch_size}", saved.mode in (Mode.OFF, Mode.OBSERVE)
    if saved.why:
        since = f"Since recurrence {saved.unknown_since} what" if saved.unknown_since and so_far else "What"
        yield f"{since} was saved is not known: {saved.why}."
    if so_far is not None and saved.mode is not Mode.OFF:
        yield f"The default is {_name(default)}. {_source(default)} Intervals hold nine times in ten."
        if saved.from_now_on is not None:
            yield f"The best that is known is {_best(default)}."
    others = default.unchanged - default.controls
    if so_far is not None and others and not looks:
        yield f"Nothing was to be changed in {count(others, 'recurrence')}: counted as the default."
    if apart.unknown.count:
        yield f"Not in the table, since {b0} did not run in their drift window: {_tally(apart.unknown, saved)}."
    if apart.not_compared.count:
        yield (
            f"Not in the table, since {b0} was not measured on their GPU or they were not measured completely: "
            f"{_tally(apart.not_compared, saved)}."
        )
    if apart.lost.count:
        yield f"Lost to failures, kills or a target that was not reached: {_tally(apart.lost, saved)}."
    if apart.failed.count:
        yield f"Lost in recurrences that then reached the target: {_tally(apart.failed, saved, 'failed attempt')}."
    if apart.skipped.count:
        skipped = count(apart.skipped.count, "recurrence")
        yield f"Skipped by the drift gate: {skipped}; its evaluations took {_took(apart.skipped, saved)}."
    if so_far is not None and so_far.spent.host_j:
        yield f"Energy includes {joules(so_far.spent.host_j)} of the machine beside its GPUs, in what ran."


def count(number: int, what: str) -> str:
    """Return a number of things.

    >>> count(1, "recurrence"), count(3, "recurrence")
    ('1 recurrence', '3 recurrences')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def with_doubt(value: float, half: float, units: tuple[tuple[float, str], ...] = _JOULES) -> str:
    """Return a quantity and half its interval, in one unit.

    >>> with_doubt(1.234e6, 3.1e5), with_doubt(-0.0, 0.0), with_doubt(7260.0, 55.0, _SECONDS)
    ('1.23 MJ ± 0.31', '0 J', '2.02 h ± 0.02')
    """
    greatest = max(abs(value), half)
    enough = _LONG_ENOUGH if units is _SECONDS else 1.0
    scale, unit = next((u for u in units if greatest >= enough * u[0]), units[-1])
    if not half:
        return f"{_plain(float(f'{value / scale:.3g}'))} {unit}"
    decimals = min(max(1 - math.floor(math.log10(half / scale)), 0), 2)
    if greatest >= 100 * scale:
        decimals = 0
    error = round(half / scale, decimals)
    doubt = f" ± {_plain(error, decimals)}" if error else ""
    return f"{_plain(value / scale, decimals)} {unit}{doubt}"


def percent(value: float, low: float, high: float) -> str:
    """Return a share with its interval.

    >>> percent(48.7, 41.2, 55.1), percent(-0.2, -0.2, -0.2), percent(-3.0, -5.0, 1.0)
    ('49 % (41 to 55)', '0 %', '-3 % (-5 to 1)')
    """
    shown, least, most = (_plain(v, 0) for v in (value, low, high))
    return f"{shown} %" if least == most else f"{shown} % ({least} to {most})"


def _plain(value: float, decimals: int | None = None) -> str:
    """Return a number that is never -0."""
    text = f"{value:g}" if decimals is None else f"{value:.{decimals}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def _title(saved: Savings) -> str:
    mark = " · SIMULATED" if saved.energy_source is EnergySource.SIMULATED and not saved.in_seconds else ""
    match saved.mode:
        case Mode.OFF:
            return f"Spent: mode off changes nothing{mark}"
        case Mode.OBSERVE:
            return f"Spent, and what could be saved: mode observe changes nothing{mark}"
        case _:
            return f"Saved against the default ({_short(saved.default)}){mark}"


def _short(default: Baseline) -> str:
    at = "" if default.setting is None else f" at {setting_text(default.setting, default.knob)}"
    return f"batch size {default.batch_size}{at}"


def _name(default: Baseline) -> str:
    at = "" if default.setting is None else f"{setting_text(default.setting, default.knob)}, "
    return f"batch size {default.batch_size} at {at}the {_BEFORE[default.knob]} before"


def _best(default: Baseline) -> str:
    limit = "" if default.best_setting is None else f" at {setting_text(default.best_setting, default.knob)}"
    return f"batch size {default.best_batch_size}{limit}"


def _source(default: Baseline) -> str:
    others = default.runs - default.controls
    if not default.controls:
        return f"What it would have taken is estimated from {count(others, 'run')} of that batch size."
    more = f" and {count(others, 'other run')} of that batch size" if others else ""
    return f"What it would have taken is measured by {count(default.controls, 'control run')} of the same weeks{more}."


def _tally(tally: Tally, saved: Savings, what: str = "recurrence") -> str:
    return f"{count(tally.count, what)} ({_took(tally, saved)})"


def _took(tally: Tally, saved: Savings) -> str:
    energy = "" if saved.in_seconds or not tally.took.energy_j else f", {joules(tally.took.energy_j)}"
    return f"{seconds(tally.took.time_s)}{energy}"


def _spent(table: Table, columns: tuple[_Column, ...], so_far: Compared) -> None:
    """Add what recurrences took in which nothing was changed."""
    label = f"{count(so_far.recurrences, 'recurrence')} took"
    table.add_row(label, *(with_doubt(of(so_far.spent), 0.0, units) for _, of, units in columns), style="bold")


def _looking(table: Table, columns: tuple[_Column, ...], so_far: Compared) -> None:
    """Add what looking cost: profiling, in runs that changed nothing."""
    line = so_far.line(LEARNING)
    if line is not None:
        cost = Line("", NOTHING - line.amount, NOTHING - line.high, NOTHING - line.low)
        table.add_row("  of it looking", *_cells(columns, cost, so_far.baseline))


def _lines(table: Table, columns: tuple[_Column, ...], compared: Compared, label: str) -> None:
    """Add what was saved: the total, its share of the default, and the lines."""
    shares = []
    for _, of, _ in columns:
        whole = of(compared.baseline) or math.inf
        total = compared.total
        shares.append(percent(*(100 * of(a) / whole for a in (total.amount, total.low, total.high))))
    table.add_row(label, *_cells(columns, compared.total, compared.baseline), style="bold")
    table.add_row("  of the default's", *shares)
    for line in compared.lines:
        table.add_row(f"  {_BY[line.name]}", *_cells(columns, line, compared.baseline))


_BEFORE = {Knob.POWER_LIMIT: "limit that was set", Knob.CLOCKS: "clocks that were there"}

_BY = {
    "power limit": "by power limit",
    "clocks": "by clocks",
    "batch size": "by batch size",
    "learning": "learning",
    "luck": "luck",
}


def _cells(columns: tuple[_Column, ...], line: Line, baseline: Amount) -> list[str]:
    cells = []
    for _, of, units in columns:
        least = _TOO_LITTLE * of(baseline)
        value, half = of(line.amount), (of(line.high) - of(line.low)) / 2
        cells.append(with_doubt(value if abs(value) > least else 0.0, half if half > least else 0.0, units))
    return cells
