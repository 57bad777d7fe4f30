"""The stages of an experiment after its recurrences: what orchestration calls, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zeus_flows.core.job import Drift
from zeus_flows.experiments.capriccio.contenders import Experiment
from zeus_flows.experiments.capriccio.curves import Curves, FillProgress
from zeus_flows.experiments.capriccio.report import LOOKS_FOR_DRIFT, Report, Science, write_report
from zeus_flows.experiments.capriccio.science import detections, measure, slice_traces
from zeus_flows.experiments.fan_out import FanOut, in_turn
from zeus_flows.ledger.mlflow import names
from zeus_flows.settings import Settings


def placebo_curves(
    experiment: Experiment, settings: Settings, progress: FillProgress, fan_out: FanOut | None = None
) -> Curves | None:
    """Return the curves of the experiment with time shuffled, trained where need be; None where none are wanted."""
    file = experiment.file
    if not (file.simulated and file.science.replays and file.science.placebo):
        return None
    curves = Curves(file, experiment.curves.trainer.dataset, settings.cache_dir, placebo=True)
    curves.fill(progress, fan_out)
    return curves


def examine(
    experiment: Experiment,
    placebo: Curves | None,
    say: Callable[[str], None] = lambda _: None,
    fan_out: FanOut = in_turn,
) -> Science | None:
    """Return what the slices can tell; None where energy is measured, or no replays are wanted."""
    file = experiment.file
    if not (file.simulated and file.science.replays):
        return None
    replays = file.science.replays
    gated = {name for name, theirs in file.contenders.items() if theirs.gate}  # replays retrain on every slice
    jobs = {c.name: c.job_file for c in experiment.contenders if c.name not in gated}
    if not jobs:
        return None
    say(f"replaying the experiment {replays} times")
    real = measure(experiment.curves, jobs, replays=replays, fan_out=fan_out)
    if placebo is None:
        return Science(real)
    say(f"replaying the placebo {replays} times")
    shuffled = measure(placebo, jobs, replays=replays, fan_out=fan_out)
    alert = [c for c in experiment.contenders if c.job.policy in LOOKS_FOR_DRIFT and c.job.drift is Drift.RESET]
    resets = [c for c in alert if c.name in jobs]
    if not resets:
        return Science(real, shuffled)
    say("planting changes for the detector to notice")
    traces = slice_traces(placebo, resets[0].job_file)
    found = detections(traces, resets[0].job, times=replays, fan_out=fan_out)
    return Science(real, shuffled, resets[0].name, found)


def report(experiment: Experiment, science: Science | None, folder: Path) -> Report:
    """Write the report, and put it and the results into MLflow."""
    written = write_report(experiment, science, folder)
    experiment.tracking.results(written.values, written.files, {names.REPORT: "report.html"})
    return written
