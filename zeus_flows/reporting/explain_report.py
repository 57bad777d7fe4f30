"""Why a recurrence ran as it did, for a terminal of 80 columns and as JSON: batch size, power limit, stop."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zeus_flows.core import savings
from zeus_flows.core.explaining import DRAWS, Explained, cut_text, explain, job_then
from zeus_flows.core.job import Job, Selector
from zeus_flows.core.json import jsonable
from zeus_flows.core.power_profile import Knob
from zeus_flows.core.reasons import ArmBelief, ArmStatus
from zeus_flows.core.records import Observation, in_parts
from zeus_flows.core.text import one_line
from zeus_flows.errors import ConfigError
from zeus_flows.ledger.mlflow.attempts import Progress, untold
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.reporting.text import cost_text, describe_arm, joules, seconds, setting_text

_CHART: Final = 26  # columns of the chart
_NINE_IN_TEN: Final = 1.645
_ASIDE: Final = (ArmStatus.OUT_OF_REACH, ArmStatus.INFEASIBLE)  # they do not set the chart's scale
_BY: Final = {
    Selector.COST: "costs least by its profile",
    Selector.ENERGY: "takes the least energy by its profile",
    Selector.TIME: "is fastest by its profile",
    Selector.MAX_SLOWDOWN: "takes the least energy of those that are not too slow",
}


@dataclass(frozen=True, slots=True)
class ExplainedAttempt:
    """An attempt: its decision taken again, and how it went; None where nothing was observed so far."""

    job: Job
    told: Explained
    observation: Observation | None


@dataclass(frozen=True, slots=True)
class ExplainedRecurrence:
    """A recurrence and its attempts; none where it trained nothing, and then `why` says why."""

    job: Job
    recurrence: int
    attempts: tuple[ExplainedAttempt, ...] = ()
    why: str = ""


def explain_recurrence(
    job: Job, ledger: MlflowLedger, recurrence: int | None, told: Progress = untold
) -> ExplainedRecurrence:
    """Return a recurrence with its decisions taken again, the newest where none is named. Writes nothing.

    Raises:
        ConfigError: there is no such recurrence.
    """
    number = recurrence or ledger.last_recurrence()
    if not number:
        raise ConfigError(f"{job.name} has no recurrence yet")
    found = list[ExplainedAttempt]()
    for attempt in ledger.attempts_of(number):
        then, states = ledger.folded_before(attempt, told)
        told_again = explain(then, states, attempt.decision)
        found.append(ExplainedAttempt(job_then(then, attempt.decision), told_again, attempt.observation))
    if found:
        return ExplainedRecurrence(job, number, tuple(found))
    page = ledger.layout.read_page_of(number)
    gap = page.gaps.get(number)
    if gap is not None and gap.skipped:
        why = "the drift gate skipped it: the model there was still met the target"
    elif gap is not None:
        why = "its process was killed before it decided"
    else:
        why = "it has not decided yet" if number not in page.ended else "its attempts were deleted"
    return ExplainedRecurrence(job, number, why=why)


def explain_document(explained: ExplainedRecurrence) -> dict[str, Any]:
    """Return it as JSON values; without joules where there are none."""
    document = {
        "job": explained.job.name,
        "recurrence": explained.recurrence,
        "why": explained.why,
        "attempts": [
            {
                "decision": jsonable(a.told.decided),
                "same": a.told.same,
                "differences": list(a.told.differences),
                "why_not": a.told.why_not,
                "beliefs": jsonable(a.told.again.reason.arms) if a.told.again is not None else None,
                "would_change": [{"what": c.text, "batch_size": c.batch_size} for c in a.told.changes],
                "other_draws": {str(b): n for b, n in (a.told.draws or {}).items()},
                "observation": None if a.observation is None else jsonable(a.observation),
            }
            for a in explained.attempts
        ],
    }
    plain: dict[str, Any] = savings.without_joules(document) if explained.job.in_seconds else document
    return plain


def show_explained(console: Console, explained: ExplainedRecurrence) -> None:
    """Print why."""
    if explained.why:
        console.print(f"{explained.job.name}, recurrence {explained.recurrence}: {explained.why}.", highlight=False)
    for attempt in explained.attempts:
        for line in _lines(attempt):
            _say(console, line)
        arms = attempt.told.again.reason.arms if attempt.told.again is not None and attempt.told.same else ()
        arms = arms or attempt.told.decided.reason.arms
        if arms:
            console.print(belief_chart(attempt.job, arms, chosen=attempt.told.decided.batch_size))
        for line in _changes(attempt):
            _say(console, line)


def _say(console: Console, line: str) -> None:
    """Print a line, its rest indented where it is long."""
    width = min(console.width, 100)
    console.print(textwrap.fill(line, width, subsequent_indent=" " * 6), highlight=False, markup=False)


def belief_chart(job: Job, arms: Sequence[ArmBelief], *, chosen: int) -> Table:
    """Return what is believed of each batch size: expected cost as a point in its interval (nine times in ten)."""
    known = [arm for arm in arms if arm.expected_cost_j and arm.status not in _ASIDE]
    known = known or [arm for arm in arms if arm.expected_cost_j]
    ends = [_interval(arm) for arm in known]
    low, high = min((a for a, _ in ends), default=0.0), max((b for _, b in ends), default=0.0)
    high = min(high, 20 * max((arm.expected_cost_j or 0.0 for arm in known), default=0.0))
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("batch size", justify="right", no_wrap=True)
    table.add_column("cost of a run", justify="right", no_wrap=True)
    scale = f"{cost_text(job, low)} to {cost_text(job, high)}, log" if known else ""
    table.add_column(scale, no_wrap=True, min_width=_CHART)
    table.add_column("known", overflow="fold")
    for arm in arms:
        mine = arm.batch_size == chosen
        cost = "" if arm.expected_cost_j is None else cost_text(job, arm.expected_cost_j)
        bar = _bar(arm, low, high) if arm.expected_cost_j else ""
        row = (">" if mine else "", str(arm.batch_size), cost, bar, describe_arm(arm))
        table.add_row(*map(Text, row), style="bold" if mine else "")
    return table


def _interval(arm: ArmBelief) -> tuple[float, float]:
    doubt = math.exp(min(_NINE_IN_TEN * (arm.spread or 0.0), 5.0))
    return (arm.expected_cost_j or 0.0) / doubt, (arm.expected_cost_j or 0.0) * doubt


def _bar(arm: ArmBelief, low: float, high: float) -> str:
    """Return an arm's line of the chart.

    >>> _bar(ArmBelief(8, 1, 10.0), 10.0, 1000.0)
    'o                         '
    """
    span = math.log(high / low) if high > low > 0 else 1.0

    def column(value: float) -> int:
        return round((_CHART - 1) * min(max(math.log(max(value, low) / low) / span, 0.0), 1.0)) if low > 0 else 0

    (first, last), point = map(column, _interval(arm)), column(arm.expected_cost_j or 0.0)
    line = [" "] * _CHART
    line[first : last + 1] = "-" * (last + 1 - first)
    line[point] = "o"
    if arm.sampled_cost_j is not None:
        drawn = column(arm.sampled_cost_j)
        line[drawn] = "x" if drawn != point else "*"
    return "".join(line)


def _lines(attempt: ExplainedAttempt) -> Iterator[str]:
    job, decided, seen = attempt.job, attempt.told.decided, attempt.observation
    which = f"{job.name}, recurrence {decided.recurrence}" + (
        f", attempt {decided.attempt}" if decided.attempt > 1 else ""
    )
    yield f"{which}: batch size {in_parts(decided)}, by {decided.policy}"
    yield f"  why: {one_line(decided.reason.text)}"
    knob = attempt.told.decided.knob
    yield f"  {'limit' if knob is Knob.POWER_LIMIT else 'clock'}: {_setting(attempt)}"
    yield f"  to be stopped: {cut_text(job, decided.cut)}"
    if seen is None:
        yield "  outcome: none so far"
    else:
        took = seconds(seen.time_s) if job.in_seconds else f"{joules(seen.energy_j)} in {seconds(seen.time_s)}"
        detail = f": {one_line(seen.detail)}" if seen.detail else ""
        yield f"  outcome: {seen.outcome.value.replace('_', ' ')} after {seen.epochs} epochs, {took}{detail}"
    told = attempt.told
    if told.why_not:
        yield f"  It cannot be taken again: {told.why_not}."
    elif told.same:
        asked = decided.asked
        folded = asked.folded if asked is not None else 0
        yield f"  Taken again on the {folded} observations that it had, the decision is the same."
    else:
        yield "  Taken again, the decision is NOT the same, so what follows is as it was recorded:"
        for unlike in told.differences:
            yield f"    {unlike}"
        yield "    (a job file that was changed since, or runs that were deleted, do that)"


def _setting(attempt: ExplainedAttempt) -> str:
    decided, seen = attempt.told.decided, attempt.observation
    if not decided.tune_power:
        return "left as it was" + (": a control run" if decided.control else f": the mode is {attempt.job.mode}")
    if decided.setting is not None:
        return f"{setting_text(decided.setting, decided.knob)}, as the policy has it"
    if seen is None or seen.setting is None:
        return "none was settled on"
    by = _BY.get(attempt.job.selector, "is best by its profile")
    return f"{setting_text(seen.setting, seen.knob)}, the one that {by} at this batch size"


def _changes(attempt: ExplainedAttempt) -> Iterator[str]:
    told = attempt.told
    if not told.same:
        return
    if told.draws:
        shares = ", ".join(f"{batch_size}: {count}" for batch_size, count in told.draws.items())
        yield f"  Of {DRAWS} other draws, so many choose: {shares}."
    for change in told.changes:
        yield f"  Would change it: {change.text}, {change.batch_size} would run."
    if not told.changes:
        yield "  Nothing that was tried would change it: settings taken away, or one more run of another batch size."
