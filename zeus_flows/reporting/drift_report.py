"""`zeus-flows drift`: a job's drift windows, the evidence that ended each, and what changed across it.

All of it is told from the windows' own runs and the state that decisions are taken on, so it takes as long after fifty
thousand recurrences as after a hundred. Only the figure reads what was observed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from zeus_flows.core.drift_windows import Cause, beliefs, best_arm, fold_windows
from zeus_flows.core.job import Job
from zeus_flows.core.json import jsonable
from zeus_flows.core.records import EnergySource
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.mlflow import names
from zeus_flows.reporting.text import cost_text

if TYPE_CHECKING:
    from mlflow.entities import Run

    from zeus_flows.core.policy import State
    from zeus_flows.ledger.mlflow.ledger import MlflowLedger

#: Windows that are shown, the newest ones, where not all are asked for.
NEWEST: Final = 20

_OPENED_BY = {
    "first": "the job's first recurrence",
    "fingerprint": "a changed target, metric, optimizer, learning-rate rule, version or energy source",
    "reset": "a reset by hand",
    "drift": "drift",
    "full": "a full window",
}


@dataclass(frozen=True, slots=True)
class WindowRun:
    """A drift window as MLflow has it: its run, its recurrences, what opened and ended it, what was believed then.

    Attributes:
        first: Its first recurrence.
        last: Its last one so far; None where it has none yet.
        counts: Whether what was observed in it counts for the job as its file is now.
        best_cost_j: What the best known batch size was thought to cost; None where that was not known.
        beliefs: What was thought of every batch size after its last recurrence.
    """

    number: int
    run_id: str
    opened_by: str
    first: int
    last: int | None
    is_open: bool
    counts: bool = False
    ended_by: str = ""
    evidence: str = ""
    best_batch_size: str = ""
    best_cost_j: float | None = None
    beliefs: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class DriftHistory:
    """What is known of a job's drift.

    Attributes:
        runs: Its newest drift windows, oldest of them first.
        observations: How many observations count.
        skipped: How many recurrences the drift gate skipped.
        best: The best known batch size now, and what it is thought to cost.
        ledger: What to read observations from; None where there are none.
    """

    job: Job
    runs: tuple[WindowRun, ...] = ()
    observations: int = 0
    skipped: int = 0
    best: tuple[int, float | None] | None = None
    ledger: MlflowLedger | None = None

    @property
    def earlier(self) -> int:
        """How many windows there are before those shown."""
        return self.runs[0].number - 1 if self.runs else 0


def read_drift(job_file: JobFile, tracking_uri: str, *, most: int | None = NEWEST) -> DriftHistory:
    """Return a job's newest drift windows, or all of them; empty where it has never run. Nothing is written."""
    from zeus_flows.reporting.recorded import open_recorded

    opened = open_recorded(job_file, tracking_uri)
    if opened is None:
        return DriftHistory(job_file.core())
    return drift_of(*opened, most=most)


def drift_of(job: Job, ledger: MlflowLedger, state: State | None = None, *, most: int | None = NEWEST) -> DriftHistory:
    """Return a ledger's newest drift windows, or all of them; `state` is its fold, where that was read before."""
    found = ledger.layout.newest_windows(most)
    state = ledger.state() if state is None else state
    arms = beliefs(job, state) if state.observations else ()
    best = best_arm(arms)
    cost = next((arm.expected_cost_j for arm in arms if arm.batch_size == best), None)
    return DriftHistory(
        job,
        _window_runs(ledger, state, found),
        observations=state.observations,
        skipped=state.account.skipped.count if state.account is not None else 0,
        best=None if best is None else (best, cost),
        ledger=ledger,
    )


def show_drift(console: Console, history: DriftHistory) -> None:
    """Print windows, evidence and what changed."""
    name = history.job.name
    if not history.runs:
        console.print(f"{name} has no recurrences yet.")
        return
    table = Table("window", "recurrences", "opened by", "best at its end", title=f"Drift windows of {name}")
    table.add_column("run in MLflow", overflow="fold")
    for run in history.runs:
        table.add_row(
            f"{run.number}{' (open)' if run.is_open else ''}",
            span_text(run),
            opened_by(run),
            run.best_batch_size,
            run.run_id,
        )
    console.print(table)
    if history.earlier:
        console.print(f"{history.earlier} earlier windows are not shown; `--all` shows them.")
    _show_boundaries(console, history)
    if not history.observations:
        console.print("Nothing that was observed counts for this job's settings.")
        return
    drifts = sum(run.counts and run.ended_by == Cause.DRIFT for run in history.runs)
    where = "in these windows" if history.earlier else "in them"
    console.print(
        f"\n{history.observations} observations count; "
        + (f"drift was noticed {_times(drifts)} {where}." if drifts else f"no drift was noticed {where}.")
    )
    if history.skipped:
        what = f"{history.skipped} recurrence{'' if history.skipped == 1 else 's'}"
        console.print(f"\nThe drift gate skipped {what}.")
    if history.best is not None:
        arm, cost_j = history.best
        cost = "" if cost_j is None else f", about {cost_text(history.job, cost_j)} a run"
        console.print(f"\nBest known now: batch size {arm}{cost}.")


def _show_boundaries(console: Console, history: DriftHistory) -> None:
    """Print what ended each window, as its run says, and what changed across it, where that still counts."""
    changes = {before.number: _change(history.job, before, after) for before, after in pairwise(history.runs)}
    for run in history.runs:
        if not run.evidence:
            continue
        when = f"after recurrence {run.last}" if run.last is not None else "before its first recurrence"
        console.print(f"  window {run.number} ended {when} ({run.ended_by}): {run.evidence}", soft_wrap=True)
        if change := changes.get(run.number):
            console.print(f"    {change}", style="dim", soft_wrap=True)


def drift_document(history: DriftHistory) -> dict[str, Any]:
    """Return it all as plain values."""
    return {
        "job": history.job.name,
        "windows": jsonable(history.runs),
        "earlier_windows": history.earlier,
        "observations": history.observations,
        "skipped": history.skipped,
        "best_batch_size": None if history.best is None else history.best[0],
    }


def draw_drift(history: DriftHistory, folder: Path) -> tuple[Path, ...]:
    """Draw figure 10 of the observations that count, as SVG and PNG; nothing where there are none. Reads them all."""
    from zeus_flows.reporting import figures

    if history.ledger is None or not (observations := history.ledger.observations()):
        return ()
    last = observations[-1]
    figure = figures.figure_10(
        figures.points(observations),
        fold_windows(history.job, observations),
        title=f"{history.job.name} ({history.job.policy}) on {last.gpu.key}",
        simulated=last.energy_source is EnergySource.SIMULATED,
        skipped=[gap.recurrence for gap in history.ledger.gaps() if gap.skipped],
    )
    return figures.write(figure, folder, f"figure-10-{history.job.name}")


def _window_runs(ledger: MlflowLedger, state: State, found: tuple[Run, ...]) -> tuple[WindowRun, ...]:
    """Return drift windows as their runs say; each ended just before the next one began."""
    firsts = [int(run.data.params[names.FIRST_RECURRENCE]) for run in found]
    newest = found[-1]
    mine = all(newest.data.tags.get(name) == value for name, value in ledger.layout.about.items())
    lasts = [first - 1 for first in firsts[1:]] + [state.order[0] if mine else ledger.last_recurrence(looked=True)]
    counts_from = int(newest.data.params[names.COUNTS_FROM]) if mine else None
    return tuple(
        _window_run(run, first, last, counts_from, about=ledger.layout.about)
        for run, first, last in zip(found, firsts, lasts, strict=True)
    )


def _window_run(run: Run, first: int, last: int, counts_from: int | None, *, about: dict[str, str]) -> WindowRun:
    tags, arms = run.data.tags, _arms(run.data.tags.get(names.BELIEFS, ""))
    best = str(tags.get(names.BEST_BATCH_SIZE, ""))
    mine = all(tags.get(name) == value for name, value in about.items())
    return WindowRun(
        number=int(run.data.params[names.WINDOW]),
        run_id=str(run.info.run_id),
        opened_by=str(run.data.params[names.OPENED_BY]),
        first=first,
        last=last if last >= first else None,
        is_open=names.NEXT_WINDOW not in run.data.params,
        counts=mine and counts_from is not None and last >= counts_from,
        ended_by=str(tags.get(names.ENDED_BY, "")),
        evidence=str(tags.get(names.EVIDENCE, "")),
        best_batch_size=best,
        best_cost_j=next((a.get("expected_cost_j") for a in arms if str(a.get("batch_size")) == best), None),
        beliefs=arms,
    )


def _arms(text: str) -> tuple[dict[str, Any], ...]:
    """Return what a window's run says was believed of every batch size; nothing where the text was cut."""
    try:
        return tuple(json.loads(text))
    except ValueError:
        return ()


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def opened_by(run: WindowRun) -> str:
    """Return what opened a window, in words."""
    return _OPENED_BY.get(run.opened_by, run.opened_by)


def span_text(run: WindowRun) -> str:
    """Return a window's recurrences."""
    if run.last is None:
        return "none yet"
    return f"{run.first} to {run.last}" if run.last > run.first else str(run.first)


def _change(job: Job, before: WindowRun, after: WindowRun) -> str:
    """Return what the best known arm was on either side of a boundary, and what it was thought to cost."""
    if not (before.counts and after.counts) or before.best_cost_j is None or after.best_cost_j is None:
        return ""
    parts = [f"{run.best_batch_size} at about {cost_text(job, run.best_cost_j or 0.0)}" for run in (before, after)]
    return f"best known: {parts[0]} before, {parts[1]} at the end of the next window"
