"""All jobs of a tracking server on one page: for a terminal of 80 columns, as JSON, as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from zeus_flows.core.job_summary import JobSummary, SavedSoFar, concerns, totals, untunable
from zeus_flows.core.json import jsonable
from zeus_flows.core.records import EnergySource
from zeus_flows.core.text import one_line
from zeus_flows.reporting.page import ReportPage
from zeus_flows.reporting.savings import count, with_doubt
from zeus_flows.reporting.text import joules, seconds

_UNKNOWN: Final = "–"
_SOURCES: Final = {
    EnergySource.MEASURED: "Measured energy",
    EnergySource.SIMULATED: "SIMULATED energy",
    EnergySource.NONE: "Compared by time",
}
_WHY: Final = {"its roll-out, up to recurrence ": "≤", "the Prefect variable": "fleet", "the parameter": "caller"}


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a page is made of.

    Attributes:
        jobs: What the tracking server says.
        next_runs: When jobs run next; None where that is not known.
        at: When this was read.
        where: The tracking server, without secrets.
    """

    jobs: tuple[JobSummary, ...]
    next_runs: Mapping[str, datetime] | None
    at: datetime
    where: str


def fleet_tables(fleet: Fleet) -> Iterator[Table]:
    """Yield a table for each energy source that jobs have; they are never in one."""
    for source, title in _SOURCES.items():
        jobs = _of(fleet, source)
        if jobs:
            table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), expand=False)
            table.add_column("job", max_width=22, no_wrap=True, overflow="ellipsis")
            for name in ("mode", "best", "saved", "learning", "next"):
                table.add_column(name, no_wrap=True, justify="left" if name == "mode" else "right")
            table.add_column("state", overflow="fold")
            for job in jobs:
                cells = [_mode(job), best_text(job), share_text(job.saved), _learning(job.saved), next_text(fleet, job)]
                state = state_text(fleet, job)
                table.add_row(Text(_safe(job.name)), *map(Text, cells), Text(state, style=_style(state)))
            yield table


def _of(fleet: Fleet, source: EnergySource) -> list[JobSummary]:
    return [job for job in fleet.jobs if job.energy_source is source and not job.trouble]


def fleet_sentences(fleet: Fleet) -> Iterator[str]:
    """Yield what must be said below the tables."""
    for source, total in totals(fleet.jobs).items():
        amount, low, high = total.energy_j
        mark = " (simulated)" if source is EnergySource.SIMULATED else ""
        known = count(total.told, "job") if total.told == total.jobs else f"{total.told} of {total.jobs} jobs"
        saved = with_doubt(amount, (high - low) / 2)
        whose = "its default" if total.jobs == 1 else "their defaults"
        yield f"{known} saved {saved}{mark} against {whose}; learning cost {joules(-total.learning_j)}."
    if any(job.saved is not None for job in fleet.jobs):
        yield "Saved is a share of what the default would have cost, ± half its 90 % interval; a job learns at a cost."
    blocked = untunable(fleet.jobs)
    for why, names in blocked.items():
        shown = ", ".join(map(_safe, names[:5])) + (", ..." if len(names) > 5 else "")
        yield f"No power limit can be tuned in {count(len(names), 'job')} ({_safe(why)}): {shown}."
    told = [job for job in fleet.jobs if job.newest is not None]
    if told and not blocked:
        yield "Power limits can be tuned in every job that has run."
    if fleet.next_runs is None:
        yield "When jobs run next is not known: no Prefect server was asked (PREFECT_API_URL)."
    for job in fleet.jobs:
        if job.trouble:
            yield f"{_safe(job.name)}: {job.trouble}."


def fleet_document(fleet: Fleet) -> dict[str, Any]:
    """Return the fleet as JSON values."""
    now_s = fleet.at.timestamp()
    return {
        "tracking_uri": fleet.where,
        "at": fleet.at.isoformat(),
        "jobs": [
            {**jsonable(job), "concerns": [str(c) for c in concerns(job, now_s=now_s)], "next_run": _iso(fleet, job)}
            for job in fleet.jobs
        ],
        "totals": {source.value: jsonable(total) for source, total in totals(fleet.jobs).items()},
        "untunable": {why: list(names) for why, names in untunable(fleet.jobs).items()},
    }


def fleet_page(fleet: Fleet) -> str:
    """Return the fleet as one HTML file that needs nothing else."""
    page = ReportPage(f"{count(len(fleet.jobs), 'job')} at {fleet.where}")
    page.text(f"Read {fleet.at:%Y-%m-%d %H:%M} UTC; times of day are UTC.")
    for sentence in fleet_sentences(fleet):
        page.text(sentence)
    attention = [job for job in fleet.jobs if job.trouble or concerns(job, now_s=fleet.at.timestamp())]
    if attention:
        page.heading("To look at")
        page.points([f"**{_safe(job.name)}**: {_attention(fleet, job)}" for job in attention])
    columns = ("job", "mode", "best", "saved", "share", "learning", "runs", "next", "champion", "state")
    for source, title in _SOURCES.items():
        jobs = _of(fleet, source)
        if jobs:
            page.heading(title)
            page.table(columns, [_row(fleet, job) for job in jobs])
    return page.html()


def _row(fleet: Fleet, job: JobSummary) -> Sequence[str]:
    return (
        _safe(job.name, 40),
        _mode(job),
        best_text(job),
        amount_text(job.saved),
        share_text(job.saved),
        _learning(job.saved),
        str(job.recurrences),
        next_text(fleet, job),
        _age(fleet, job.champion_s),
        state_text(fleet, job),
    )


def _mode(job: JobSummary) -> str:
    """Return the mode, and in short whose word it is where it is not the job file's."""
    if job.newest is None:
        return _UNKNOWN
    why = job.newest.mode_why
    for begins, short in _WHY.items():
        if why.startswith(begins):
            rest = why.removeprefix(begins) if short == "≤" else ""
            return f"{job.newest.mode} {short}{rest}"
    return job.newest.mode


def best_text(job: JobSummary) -> str:
    """Return the batch size that is thought cheapest, at the limit that its newest run settled on."""
    newest = job.newest
    if job.best_batch_size is None:
        return _UNKNOWN
    if newest is None or newest.setting is None or newest.batch_size != job.best_batch_size:
        return str(job.best_batch_size)
    return f"{job.best_batch_size}@{newest.setting:.0f}{newest.knob.unit}"


def share_text(saved: SavedSoFar | None) -> str:
    """Return what was saved as a share of what the default would have cost, with its doubt."""
    if saved is None:
        return _UNKNOWN
    half = saved.percent_half
    return f"{saved.percent:.0f} %" if not half or half < 0.5 else f"{saved.percent:.0f} ± {half:.0f} %"


def amount_text(saved: SavedSoFar | None) -> str:
    """Return what was saved: energy with its doubt, or time where there are no joules."""
    if saved is None:
        return _UNKNOWN
    if saved.energy_j is None:
        amount, low, high = saved.cost
        return f"{seconds(amount)} ({seconds(low)} to {seconds(high)})"
    amount, low, high = saved.energy_j
    return with_doubt(amount, (high - low) / 2)


def _learning(saved: SavedSoFar | None) -> str:
    if saved is None:
        return _UNKNOWN
    return joules(saved.learning) if saved.unit == "j" else seconds(saved.learning)


def next_text(fleet: Fleet, job: JobSummary) -> str:
    """Return when the job runs next: the hour today, else the day, in UTC."""
    at = (fleet.next_runs or {}).get(job.name)
    if at is None:
        return _UNKNOWN
    at = at.astimezone(fleet.at.tzinfo)
    return f"{at:%H:%M}" if (at - fleet.at).total_seconds() < 86_400 else f"{at:%d %b}"


def _iso(fleet: Fleet, job: JobSummary) -> str | None:
    at = (fleet.next_runs or {}).get(job.name)
    return None if at is None else at.isoformat()


def _age(fleet: Fleet, made_s: float | None) -> str:
    if made_s is None:
        return _UNKNOWN
    age_s = max(fleet.at.timestamp() - made_s, 0.0)
    return f"{age_s / 86_400:.0f} d" if age_s >= 2 * 86_400 else seconds(age_s)


def state_text(fleet: Fleet, job: JobSummary) -> str:
    """Return how a job is in a word or two."""
    if job.trouble:
        return "damaged"
    found = concerns(job, now_s=fleet.at.timestamp())
    if found:
        return " ".join(found)
    return "running" if job.under_way else ("ok" if job.newest is not None else "new")


def _attention(fleet: Fleet, job: JobSummary) -> str:
    if job.trouble:
        return job.trouble
    words = ", ".join(concerns(job, now_s=fleet.at.timestamp()))
    ended = job.ended
    why = f": {_safe(ended.text)}" if "failing" in words and ended is not None and ended.text else ""
    return f"{words}{why}"


def _style(state: str) -> str:
    return {"ok": "green", "running": "cyan", "new": "dim"}.get(state, "bold red")


def _safe(text: str, most: int = 200) -> str:
    return one_line(text, most=most)
