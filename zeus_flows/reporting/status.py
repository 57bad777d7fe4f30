"""How jobs are: what runs now, the best batch size, the last outcome, what was saved, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zeus_flows.core.job_summary import Concern, JobSummary, concerns
from zeus_flows.core.records import EnergySource
from zeus_flows.core.text import one_line, seconds, setting_text
from zeus_flows.reporting.fleet import Fleet, amount_text, best_text, fleet_document, next_text, share_text, state_text

_SOURCE = {
    EnergySource.MEASURED: "measured",
    EnergySource.SIMULATED: "SIMULATED energy",
    EnergySource.NONE: "by time: there are no joules",
}


def status_lines(fleet: Fleet, job: JobSummary, *, path: str = "JOB.yaml") -> Iterator[str]:
    """Yield how a job is, a line each.

    Args:
        fleet: Where the job was read, and when.
        job: Which.
        path: Its job file, for what to type next.
    """
    yield f"{one_line(job.name, most=64)}: {state_text(fleet, job)}"
    if job.trouble:
        yield f"  {one_line(job.trouble)}"
        return
    yield f"  now       {_now(fleet, job)}"
    yield f"  best      batch size {best_text(job)}" if job.best_batch_size else "  best      not known yet"
    yield f"  last      {_last(job)}"
    yield f"  saved     {_saved(job)}"
    yield f"  next run  {_next_run(fleet, job)}"
    for command in next_commands(fleet, job, path):
        yield f"  type      {command}"


def next_commands(fleet: Fleet, job: JobSummary, path: str) -> list[str]:
    """Return what to type next, the most urgent first."""
    found, commands = concerns(job, now_s=fleet.at.timestamp()), list[str]()
    if Concern.STUCK in found:
        commands.append(f"zeus-flows janitor {path}")
    if Concern.DEGRADED in found:
        commands.append("zeus-flows doctor")
    if job.newest is None:
        return [*commands, f"zeus-flows run {path}"]
    return [*commands, f"zeus-flows explain {path} {job.newest.recurrence}"]


def status_document(fleet: Fleet) -> dict[str, Any]:
    """Return how jobs are as JSON values: those of `zeus-flows fleet`, and what to type next."""
    document = fleet_document(fleet)
    for told, job in zip(document["jobs"], fleet.jobs, strict=True):
        told |= {"state": state_text(fleet, job), "type": next_commands(fleet, job, "JOB.yaml")}
    return document


def _now(fleet: Fleet, job: JobSummary) -> str:
    newest = job.newest
    if not job.under_way:
        return f"nothing runs; {job.recurrences} recurrences so far"
    numbers = ", ".join(map(str, job.under_way[:5])) + (", ..." if len(job.under_way) > 5 else "")
    if newest is None or newest.recurrence not in job.under_way or newest.outcome is not None:
        return f"recurrence {numbers} is under way"
    since = seconds(max(fleet.at.timestamp() - newest.began_s, 0.0))
    return f"recurrence {numbers} is under way, at batch size {newest.batch_size} for {since}"


def _next_run(fleet: Fleet, job: JobSummary) -> str:
    return next_text(fleet, job) if fleet.next_runs is not None else "not known: no Prefect server was asked"


def _last(job: JobSummary) -> str:
    ended = job.ended
    if ended is None:
        return "no recurrence has ended"
    limit = "" if ended.setting is None else f" at {setting_text(ended.setting, ended.knob)}"
    how = ended.outcome.value.replace("_", " ") if ended.outcome is not None else "not observed"
    detail = f": {one_line(ended.text, most=120)}" if ended.text else ""
    return f"recurrence {ended.recurrence}, batch size {ended.batch_size}{limit}: {how}{detail}"


def _saved(job: JobSummary) -> str:
    if job.saved is None:
        return "not known yet"
    of = f"{share_text(job.saved)} of the default's cost"
    return f"{amount_text(job.saved)}, {of} ({_SOURCE[job.energy_source]}; {job.saved.recurrences} recurrences)"
