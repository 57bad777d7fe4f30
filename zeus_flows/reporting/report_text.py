"""A job's report for a terminal of 80 columns, and the words and rows that its HTML page shares with it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zeus_flows.core.job_report import SavedAgainst, TimelineEntry
from zeus_flows.core.prices import KWH_J
from zeus_flows.core.records import EnergySource
from zeus_flows.core.text import setting_text
from zeus_flows.reporting.drift_report import opened_by, span_text
from zeus_flows.reporting.job_report import JobReport
from zeus_flows.reporting.savings import count, savings_sentences
from zeus_flows.reporting.text import cost_text, describe_arm, seconds
from zeus_flows.reporting.units import carbon_text, hour_text, hours_text, kwh_text, money_text, rate_text, share_text

_SHOWN: Final = 10  # recurrences in a terminal
_MISSING: Final = 5  # hours without a price that are named


def show_report(console: Console, report: JobReport) -> None:
    """Print the report: at most 80 columns."""
    console.print(Text(title(report), style="bold"))
    for sentence in preamble(report):
        console.print(sentence, highlight=False, markup=False)
    if (table := _saved_table(report)) is not None:
        console.print()
        console.print(table)
    console.print()
    for sentence in sentences(report):
        console.print(sentence, highlight=False, markup=False)
    for table in _tables(report):
        console.print()
        console.print(table)
    if report.models is not None:
        console.print()
        console.print(f"{report.models.why}.", highlight=False, markup=False)


def sentences(report: JobReport) -> Iterator[str]:
    """Yield what must be said below the table of what was saved."""
    if (spent := spent_sentence(report)) is not None:
        yield spent
    yield from savings_sentences(report.saved)
    yield from price_sentences(report)


def title(report: JobReport) -> str:
    """Return what stands above it."""
    energy = "" if report.source is EnergySource.NONE else "energy "
    return f"{report.job.name}: {count(report.recurrences, 'recurrence')}, {energy}{report.mark}"


def preamble(report: JobReport) -> Iterator[str]:
    """Yield where and when it was read, and what ran on what."""
    on = f" on {report.gpu}" if report.gpu else ""
    yield f"Read {report.at:%Y-%m-%d %H:%M} UTC from {report.where}; trained{on}; mode {report.saved.mode}."
    if report.source is EnergySource.SIMULATED:
        yield "The training was real; joules, and all that follows from them, come from a model of the GPU."


def spent_sentence(report: JobReport) -> str | None:
    """Return what the recurrences took that are compared, as a sentence; None where none is."""
    so_far = report.so_far
    if so_far is None:
        return None
    spent, parts = so_far.spent, list[str]()
    if not report.job.in_seconds:
        kwh, rate = spent.energy_j / KWH_J, report.rate
        parts.append(kwh_text(kwh))
        parts += [] if rate.per_kwh is None else [money_text(kwh * rate.per_kwh, report.tariff.currency)]
        if rate.carbon_g_per_kwh is not None:
            parts.append(f"{carbon_text(kwh * rate.carbon_g_per_kwh / 1000)} of CO2")
    parts.append(f"{seconds(spent.time_s)} of training")
    return f"{count(so_far.recurrences, 'recurrence')} took {', '.join(parts)}."


def price_sentences(report: JobReport) -> Iterator[str]:
    """Yield what `each` means, by what money and carbon are told, and which hours are missing."""
    if report.from_now_on is not None:
        yield "Each: what one more recurrence of the best that is known is expected to save."
    tariff, rate, charged = report.tariff, report.rate, report.charged
    if not tariff.prices and not tariff.carbon:
        yield "No prices: say `prices: {per_kwh: 0.28, currency: EUR, carbon_g_per_kwh: 380}` in the job file."
        return
    if report.job.in_seconds:
        yield "Prices mean nothing here: there are no joules."
        return
    per = rate_text(rate, tariff.currency)
    if not tariff.by_hour:
        yield f"A kilowatt hour is counted as {per}, by the job file."
    else:
        which = "all" if report.complete else f"the newest {len(report.entries)}"
        yield f"A kilowatt hour is counted as {per}: the mean of the hours in which {which} recurrences ran."
    for name, known, hours, joules in (
        ("price", tariff.prices, charged.unpriced, charged.energy_j - charged.priced_j),
        ("carbon intensity", tariff.carbon, charged.uncharted, charged.energy_j - charged.carbon_j),
    ):
        if known and hours:
            named = ", ".join(hour_text(hour) for hour in sorted(hours)[:_MISSING])
            more = ", ..." if len(hours) > _MISSING else ""
            amount = kwh_text(joules / KWH_J)
            yield f"{count(len(hours), 'hour')} without a {name} ({named}{more} UTC): {amount} left out of the mean."


def rows_saved(report: JobReport) -> Iterator[tuple[str, SavedAgainst]]:
    """Yield what was saved against what; `each` is what one recurrence more is expected to save."""
    so_far, ahead = report.so_far, report.from_now_on
    if so_far is not None and report.acts:
        yield "the default", so_far.default
        if so_far.power_only is not None:
            yield "power-only", so_far.power_only
    if ahead is not None:
        yield "the default, each", ahead.default
        if ahead.power_only is not None:
            yield "power-only, each", ahead.power_only


def cells(report: JobReport, saved: SavedAgainst) -> list[str]:
    """Return a row's cells: energy (or time), its share, money and carbon where they are known."""
    amount = hours_text(saved.time_h) if saved.energy_kwh is None else kwh_text(saved.energy_kwh)
    found = [amount, share_text(saved.percent)]
    if _priced(report):
        found.append("" if saved.money is None else money_text(saved.money, ""))
    if _charted(report):
        found.append("" if saved.carbon_kg is None else carbon_text(saved.carbon_kg))
    return found


def columns(report: JobReport) -> list[str]:
    """Return the names of those cells."""
    prices = [report.tariff.currency] if _priced(report) else []
    return ["time" if report.job.in_seconds else "energy", "share", *prices, *(["CO2"] if _charted(report) else [])]


def _priced(report: JobReport) -> bool:
    return report.tariff.prices and not report.job.in_seconds


def _charted(report: JobReport) -> bool:
    return report.tariff.carbon and not report.job.in_seconds


def _saved_table(report: JobReport) -> Table | None:
    rows = list(rows_saved(report))
    if not rows:
        return None
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("Saved against" if report.acts else "Could save against", no_wrap=True)
    for name in columns(report):
        table.add_column(name, justify="right", no_wrap=True)
    for label, saved in rows:
        table.add_row(label, *cells(report, saved), style="bold" if label == "the default" else "")
    return table


def _tables(report: JobReport) -> Iterator[Table]:
    """Yield the batch sizes, the drift windows and the newest recurrences."""
    if report.arms:
        table = _plain_table("Batch sizes", "batch size", "limit", "cost of a run", "", "")
        for row in arm_rows(report):
            table.add_row(*row)
        yield table
    if len(report.drift.runs) > 1:
        table = _plain_table("Drift windows", "window", "recurrences", "opened by", "best")
        for row in window_rows(report):
            table.add_row(*row)
        yield table
    if report.entries:
        shown = report.entries[-_SHOWN:]
        table = _plain_table(f"The newest {count(len(shown), 'recurrence')}", *entry_columns(report))
        for entry in shown:
            table.add_row(*entry_row(report, entry))
        yield table


def _plain_table(title: str, *names: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i == 0 or not name else "right", overflow="fold")
    return table


def arm_rows(report: JobReport) -> Iterator[tuple[str, ...]]:
    """Yield what is known of each batch size: its best limit, what a run costs, and how sure that is."""
    best = {s.batch_size: s for s in sorted(report.settings, key=lambda s: -s.cost)}
    for arm in report.arms:
        setting = best.get(arm.batch_size)
        marks = [
            word
            for word, said in (
                ("default", arm.batch_size == report.job.default_batch_size),
                ("best", arm.batch_size == report.saved.default.best_batch_size),
            )
            if said
        ]
        yield (
            str(arm.batch_size),
            "" if setting is None else setting_text(setting.setting, report.saved.default.knob),
            "" if arm.expected_cost_j is None else cost_text(report.job, arm.expected_cost_j),
            describe_arm(arm),
            ", ".join(marks),
        )


def window_rows(report: JobReport) -> Iterator[tuple[str, ...]]:
    """Yield the drift windows: number, recurrences, what opened each, and what was best at its end."""
    for run in report.drift.runs:
        yield f"{run.number}{' (open)' if run.is_open else ''}", span_text(run), opened_by(run), run.best_batch_size


def entry_columns(report: JobReport) -> list[str]:
    """Return the names of a recurrence's cells."""
    joules = [] if report.job.in_seconds else ["energy"]
    return ["#", "began (UTC)", "batch size", "limit", *joules, "time", "cost", "outcome"]


def entry_row(report: JobReport, entry: TimelineEntry) -> list[str]:
    """Return a recurrence's cells."""
    joules = [] if report.job.in_seconds else [kwh_text(entry.energy_j / KWH_J)]
    words = [entry.outcome.replace("_", " "), *(["explored"] if entry.explored else [])]
    words += [*(["control"] if entry.control else []), *([] if entry.complete else ["partly measured"])]
    return [
        str(entry.recurrence),
        f"{datetime.fromtimestamp(entry.began_s, UTC):%m-%d %H:%M}",
        "→".join(str(b) for b in entry.batch_sizes),
        setting_text(entry.setting, report.saved.default.knob),
        *joules,
        seconds(entry.time_s),
        cost_text(report.job, entry.cost),
        ", ".join(words),
    ]
