"""`zeus-flows drift`: a job's drift windows, the evidence that ended each, and what changed across it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from zeus_flows.core.drift_windows import Cause, DriftWindow, fold_windows
from zeus_flows.core.job import Job
from zeus_flows.core.json import jsonable
from zeus_flows.core.reasons import ArmBelief
from zeus_flows.core.records import EnergySource, Observation
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.names import RunKind
from zeus_flows.ledger.mlflow.query import having
from zeus_flows.reporting.text import cost_text

if TYPE_CHECKING:
    from mlflow import MlflowClient

_OPENED_BY = {
    "first": "the job's first recurrence",
    "fingerprint": "a changed target, metric, optimizer, learning-rate rule, version or energy source",
    "reset": "a reset by hand",
    "drift": "drift",
    "full": "a full window",
}


@dataclass(frozen=True, slots=True)
class WindowRun:
    """A drift window as MLflow has it: its run, what opened and ended it, and the recurrences of its series.

    Attributes:
        recurrences: Those that trained.
        asked: Of how many the drift gate was asked.
        skipped: Those that it skipped.
    """

    number: int
    run_id: str
    opened_by: str
    recurrences: tuple[int, ...]
    is_open: bool
    ended_by: str = ""
    evidence: str = ""
    best_batch_size: str = ""
    asked: int = 0
    skipped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DriftHistory:
    """What is known of a job's drift.

    Attributes:
        runs: Its drift windows' runs, oldest first.
        windows: The windows that the observations that count fall into, with evidence and beliefs.
        observations: Those observations.
    """

    job: Job
    runs: tuple[WindowRun, ...]
    windows: tuple[DriftWindow, ...]
    observations: tuple[Observation, ...]


def read_drift(job_file: JobFile, tracking_uri: str) -> DriftHistory:
    """Return a job's drift windows; empty where it has never run. Nothing is written."""
    job = job_file.core()
    if tracking_uri.startswith("sqlite:///") and not Path(tracking_uri.removeprefix("sqlite:///")).exists():
        return DriftHistory(job, (), (), ())
    from zeus_flows.ledger.mlflow.client import Store
    from zeus_flows.ledger.open_ledger import open_direct

    store = Store(tracking_uri)
    experiment = store.experiment(job.name)
    if experiment is None:
        return DriftHistory(job, (), (), ())
    windows = having({names.KIND: RunKind.DRIFT_WINDOW})
    found = store.client.search_runs([experiment.experiment_id], windows, max_results=1000)
    runs = sorted((_window_run(store.client, run) for run in found), key=lambda w: w.number)
    newest = max(found, key=lambda run: int(run.data.params[names.WINDOW]), default=None)
    source = EnergySource(newest.data.tags[names.ENERGY_SOURCE]) if newest else EnergySource.MEASURED
    job = job_file.core(source)
    observations = open_direct(job, tracking_uri=tracking_uri, energy_source=source).observations()
    return DriftHistory(job, tuple(runs), fold_windows(job, observations), observations)


def show_drift(console: Console, history: DriftHistory) -> None:
    """Print windows, evidence and what changed."""
    name = history.job.name
    if not history.runs:
        console.print(f"{name} has no recurrences yet.")
        return
    table = Table("window", "recurrences", "opened by", "best at its end", title=f"Drift windows of {name}")
    table.add_column("run in MLflow", overflow="fold")
    for run in history.runs:
        state = " (open)" if run.is_open else ""
        table.add_row(
            f"{run.number}{state}",
            _span(run.recurrences),
            _OPENED_BY.get(run.opened_by, run.opened_by),
            run.best_batch_size,
            run.run_id,
        )
    console.print(table)
    _show_boundaries(console, history)
    if not history.windows:
        console.print("Nothing that was observed counts for this job's settings.")
        return
    drifts = [w for w in history.windows if w.ended_by is not None and w.ended_by.kind is Cause.DRIFT]
    console.print(
        f"\n{len(history.observations)} observations count; "
        + (f"drift was noticed {_times(len(drifts))} in them." if drifts else "no drift was noticed in them.")
    )
    if asked := sum(run.asked for run in history.runs):
        skipped = sum(len(run.skipped) for run in history.runs)
        what = f"{skipped} recurrence{'' if skipped == 1 else 's'}"
        console.print(f"\nThe drift gate was asked {_times(asked)} and skipped {what}.")
    now = history.windows[-1]
    if now.best is not None:
        belief = _belief(now, now.best)
        cost = (
            ""
            if belief is None or belief.expected_cost_j is None
            else f", about {cost_text(history.job, belief.expected_cost_j)} a run"
        )
        console.print(f"\nBest known now: batch size {now.best}{cost}.")


def _show_boundaries(console: Console, history: DriftHistory) -> None:
    """Print what ended each window, as its run says, and what changed across it, where that still counts."""
    changes = {
        before.last: _change(history.job, before, after)
        for before, after in zip(history.windows, history.windows[1:], strict=False)
    }
    for run in history.runs:
        if not run.evidence:
            continue
        last = run.recurrences[-1] if run.recurrences else None
        when = f"after recurrence {last}" if last is not None else "before its first recurrence"
        console.print(f"  window {run.number} ended {when} ({run.ended_by}): {run.evidence}", soft_wrap=True)
        if last is not None and (change := changes.get(last)):
            console.print(f"    {change}", style="dim", soft_wrap=True)


def drift_document(history: DriftHistory) -> dict[str, Any]:
    """Return it all as plain values."""
    return {"job": history.job.name, "runs": jsonable(history.runs), "windows": jsonable(history.windows)}


def draw_drift(history: DriftHistory, folder: Path) -> tuple[Path, ...]:
    """Draw figure 10 of the observations that count, as SVG and PNG; nothing where there are none."""
    from zeus_flows.reporting import figures

    if not history.observations:
        return ()
    last = history.observations[-1]
    figure = figures.figure_10(
        figures.points(history.observations),
        history.windows,
        title=f"{history.job.name} ({history.job.policy}) on {last.gpu.key}",
        simulated=last.energy_source is EnergySource.SIMULATED,
        skipped=[number for run in history.runs for number in run.skipped],
    )
    return figures.write(figure, folder, f"figure-10-{history.job.name}")


def _window_run(client: MlflowClient, run: Any) -> WindowRun:
    series = client.get_metric_history(run.info.run_id, names.COST_J)
    gate = {p.step: p.value for p in client.get_metric_history(run.info.run_id, names.GATE_SKIPPED)}
    return WindowRun(
        number=int(run.data.params[names.WINDOW]),
        run_id=str(run.info.run_id),
        opened_by=str(run.data.params[names.OPENED_BY]),
        recurrences=tuple(sorted({int(point.step) for point in series})),
        is_open=names.NEXT_WINDOW not in run.data.params,
        ended_by=str(run.data.tags.get(names.ENDED_BY, "")),
        evidence=str(run.data.tags.get(names.EVIDENCE, "")),
        best_batch_size=str(run.data.tags.get(names.BEST_BATCH_SIZE, "")),
        asked=len(gate),
        skipped=tuple(sorted(int(step) for step, value in gate.items() if value)),
    )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _span(recurrences: tuple[int, ...]) -> str:
    if not recurrences:
        return "none yet"
    return f"{recurrences[0]} to {recurrences[-1]}" if len(recurrences) > 1 else str(recurrences[0])


def _belief(window: DriftWindow, batch_size: int | None) -> ArmBelief | None:
    return next((arm for arm in window.beliefs if arm.batch_size == batch_size), None)


def _change(job: Job, before: DriftWindow, after: DriftWindow) -> str:
    """Return what the best known arm was on either side of a boundary, and what it was thought to cost."""
    parts = []
    for window in (before, after):
        belief = _belief(window, window.best)
        if belief is None or belief.expected_cost_j is None:
            return ""
        parts.append(f"{window.best} at about {cost_text(job, belief.expected_cost_j)}")
    return f"best known: {parts[0]} before, {parts[1]} at the end of the next window"
