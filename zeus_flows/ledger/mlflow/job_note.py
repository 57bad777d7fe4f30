"""The description of a job's experiment: what the job is, what runs now, what it saves since when, and the views.

MLflow shows its first line above the runs, and the rest when that is opened. The last line, which nobody sees, has a
digest of the others: a description that somebody changed or wrote is told from ours, and left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from zeus_flows.core.job import Job, Mode
from zeus_flows.core.power_profile import Knob
from zeus_flows.core.records import EnergySource, Observation, in_parts
from zeus_flows.core.savings import Savings
from zeus_flows.core.text import joules, one_line, seconds, setting_text
from zeus_flows.ledger.mlflow.views import SavedView


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What a job's description tells.

    Attributes:
        job: Which, with the mode in force.
        saved: What is known once the newest recurrence is folded; None where nothing is.
        recurrence: The newest one.
        newest: How its last attempt went; None where that is not known.
        counts_from: The first one that counts.
        began_ms: When the experiment was made; None where that is not known.
        energy_source: What its joules are.
        comparable: What its recurrences share, in words.
    """

    job: Job
    saved: Savings | None
    recurrence: int
    newest: Observation | None
    counts_from: int
    began_ms: int | None
    energy_source: EnergySource
    comparable: Mapping[str, str]


def job_note(facts: JobFacts, links: Mapping[str, str], views: Sequence[SavedView]) -> str:
    """Return the description in Markdown, signed.

    Args:
        facts: What is so.
        links: The views' addresses, by their ids.
        views: In the order in which they are listed.
    """
    jump = " · ".join(f"[{view.name}]({links[view.id]})" for view in views)
    first = " ".join(filter(None, (_saves(facts), _runs_now(facts), jump)))
    rows = [f"| [{view.name}]({links[view.id]}) | {view.about} |" for view in views]
    lines = [
        first,
        "",
        _what(facts),
        "",
        *_savings(facts),
        "| view | shows |",
        "| --- | --- |",
        *rows,
        "",
        f"Written after recurrence {facts.recurrence}; `zeus-flows views` with the job's file writes it anew. "
        "Once you change it, it is yours, and left alone.",
    ]
    return signed("\n".join(lines))


def signed(text: str) -> str:
    """Return a description with the line that says it is ours, which Markdown does not show."""
    return f"{text}\n\n[//]: # (zeus-flows {_digest(text)})"


def is_ours(note: str) -> bool:
    """Return whether a description is as it was written; also where there is none.

    >>> is_ours(signed("a")), is_ours(signed("a").replace("a", "b", 1)), is_ours("mine"), is_ours("")
    (True, False, False, True)
    """
    text, _, mark = note.strip().rpartition("\n\n[//]: # (zeus-flows ")
    return not note.strip() or mark.rstrip(")") == _digest(text)


def _what(facts: JobFacts) -> str:
    job, target = facts.job, facts.comparable.get("target")
    name = one_line(job.name, most=64)
    until = f" until {one_line(target, most=100)}" if target else " to its target"
    what = {
        Mode.OFF: "changes nothing (mode `off`)",
        Mode.OBSERVE: "changes nothing, and measures what could be saved (mode `observe`)",
        Mode.POWER: f"chooses the power limit; the batch size stays {job.default_batch_size} (mode `power`)",
        Mode.FULL: f"chooses the batch size, of {_sizes(job)}, and the power limit, by the policy `{job.policy}`",
    }[job.mode]
    return f"The job **{name}** trains again and again{until}, and zeus_flows {what}."


def _sizes(job: Job) -> str:
    first, last = job.batch_sizes[0], job.batch_sizes[-1]
    return str(first) if first == last else f"{first} to {last} ({job.default_batch_size} by default)"


def _runs_now(facts: JobFacts) -> str:
    newest = facts.newest
    if newest is None:
        return ""
    return f"Batch size {in_parts(newest)}{_at(newest.setting, newest.knob)} runs now."


def _saves(facts: JobFacts) -> str:
    """Return what was saved in a few words; empty where that is not known."""
    saved = facts.saved
    if saved is None or saved.so_far is None or saved.mode in (Mode.OFF, Mode.OBSERVE):
        return ""
    share = saved.so_far.total.amount.percent_of(saved.so_far.baseline)
    shares = [] if saved.in_seconds else [(share.energy_j, f"energy{_mark(facts)}")]
    shares.append((share.time_s, "time"))
    less = " and ".join(f"{percent:.0f} % of the {what}" for percent, what in shares if percent >= 0)
    more = " and ".join(f"{-percent:.0f} % more {what}" for percent, what in shares if percent < 0)
    return f"**Saved {less}{f', at {more}' if more else ''}.**" if less else f"**Took {more}.**"


def _savings(facts: JobFacts) -> list[str]:
    saved = facts.saved
    if saved is None or saved.so_far is None or not _saves(facts):
        why = f": {saved.why}" if saved is not None and saved.why else ""
        return [f"What it saves is not known yet{why}.", ""]
    began, total = "", saved.so_far.total.amount
    if facts.counts_from == 1 and facts.began_ms is not None:
        at = datetime.fromtimestamp(facts.began_ms / 1000, tz=UTC)
        began = f", {at.day} {at:%B %Y}"
    energy = "" if saved.in_seconds else f"{joules(total.energy_j)}{_mark(facts)} and "
    default = f"batch size {saved.default.batch_size}{_at(saved.default.setting, saved.default.knob)}"
    recurrences = f"{saved.so_far.recurrences} recurrence{'' if saved.so_far.recurrences == 1 else 's'}"
    return [
        f"It saved {energy}{seconds(total.time_s)} in {recurrences} since recurrence {facts.counts_from}{began}, "
        f"against {default}: what would have run without zeus_flows.",
        "",
    ]


def _mark(facts: JobFacts) -> str:
    return " (simulated)" if facts.energy_source is EnergySource.SIMULATED else ""


def _at(setting: float | None, knob: Knob) -> str:
    return "" if setting is None else f" at {setting_text(setting, knob)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]
