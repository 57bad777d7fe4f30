"""The Capriccio experiment as a flow: curves, then slice after slice, then what they tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefect import flow, get_run_logger, runtime, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from zeus_flows.experiments.capriccio import stages
from zeus_flows.experiments.capriccio.contenders import Experiment, open_experiment
from zeus_flows.experiments.capriccio.curves import Curves
from zeus_flows.experiments.capriccio.dataset_files import READING
from zeus_flows.experiments.capriccio.experiment_lease import Lease, leased
from zeus_flows.experiments.capriccio.file import load_experiment
from zeus_flows.experiments.capriccio.lock import alone
from zeus_flows.experiments.capriccio.report import Report, Science
from zeus_flows.experiments.capriccio.results import SliceOutcome
from zeus_flows.experiments.capriccio.slices import Slice
from zeus_flows.experiments.fan_out import FanOut, in_turn
from zeus_flows.ledger.mlflow import names
from zeus_flows.masking import mask_logs
from zeus_flows.orchestration.capriccio_view import ExperimentView, Silent
from zeus_flows.orchestration.fan_out import shared_out
from zeus_flows.orchestration.prefect_runs import page_of
from zeus_flows.reporting.links import run_url
from zeus_flows.settings import Settings, public_uri, read_settings

_MOST_CHARACTERS = 400_000  # of a Markdown artifact; a larger page is linked to, not embedded


@dataclass(frozen=True, slots=True)
class Summary:
    """What the flow returns: where to look."""

    name: str
    slices: int
    run_id: str
    report: str
    values: dict[str, float]


@flow(name="capriccio", validate_parameters=True)
def capriccio(
    experiment_file: str,
    data: str | None = None,
    tracking_uri: str | None = None,
    out: str | None = None,
    runner: str | None = None,
) -> Summary:
    """Run an experiment from where it stands: one recurrence per slice and policy, then the report.

    Args:
        experiment_file: Path of the experiment file on the machine that runs the flow.
        data: Path of the data, whatever the experiment file says.
        tracking_uri: Where MLflow runs go, whatever the experiment file says.
        out: Folder for figures and report; `<name>-report` in the working directory by default.
        runner: Who trains batch sizes and seeds and replays contenders, as `zeus_flows.orchestration.fan_out` has it.
    """
    fan_out = None if runner is None else shared_out(runner)
    return run(experiment_file, data, tracking_uri, out, Silent(), fan_out)


def run(
    experiment_file: str,
    data: str | None,
    tracking_uri: str | None,
    out: str | None,
    view: ExperimentView,
    fan_out: FanOut | None = None,
) -> Summary:
    """Run the experiment inside a flow run, shown by `view`; `fan_out` does what can be done in pieces.

    Raises:
        ConfigError: another process is running it.
    """
    settings = read_settings()
    path, data_path = Path(experiment_file), None if data is None else Path(data)
    file = load_experiment(path, data=data_path)
    uri = settings.tracking(public_uri(tracking_uri, "the parameter tracking_uri"), file.tracking_uri)
    mask_logs()
    with alone(file.name, tracking_uri=uri, state_dir=settings.state_dir):
        READING.set(view.reading)
        experiment = open_experiment(path, data=data_path, tracking_uri=uri, settings=settings)
        run_id, flow_run_id = experiment.tracking.run_id, str(runtime.flow_run.id)
        with leased(uri, run_id, file.name, flow_run_id=flow_run_id, say=view.say) as lease:
            if lease.number > 1:  # somebody may have gone on with it until now
                experiment = open_experiment(path, data=data_path, tracking_uri=uri, settings=settings)
            get_run_logger().info(
                "%s: %d slices, %d written", file.name, len(experiment.slices), experiment.tracking.written
            )
            view.opened(experiment)
            folder = Path(out) if out else Path.cwd() / f"{file.name}-report"
            return _run(experiment, lease, settings, folder, view, fan_out)


def _run(
    experiment: Experiment,
    lease: Lease,
    settings: Settings,
    folder: Path,
    view: ExperimentView,
    fan_out: FanOut | None,
) -> Summary:
    file = experiment.file
    if file.simulated and file.science.replays:
        _train(experiment, view.training("every batch size on every slice"), fan_out)
    context = {
        names.PREFECT_FLOW_RUN_ID: str(runtime.flow_run.id),
        names.PREFECT_FLOW_RUN_NAME: str(runtime.flow_run.name),
        names.PREFECT_URL: page_of(runtime.flow_run.ui_url),
    }
    for part in experiment.slices:
        lease.check()
        outcomes = _slice.with_options(task_run_name=f"slice-{part.number}-{part.day}")(experiment, part, context)
        view.slice(part, outcomes)
    placebo = _placebo(experiment, settings, view.training("the placebo: time shuffled"), fan_out)
    science = _examine(experiment, placebo, view.say, fan_out or in_turn)
    written = _report(experiment, science, folder)
    _artifacts(experiment, written, folder)
    return Summary(
        file.name, len(experiment.slices), experiment.tracking.run_id, str(written.files[0]), dict(written.values)
    )


@task(name="train", cache_policy=NO_CACHE)
def _train(experiment: Experiment, progress: Callable[[int, int], None], fan_out: FanOut | None) -> None:
    experiment.curves.fill(progress, fan_out)


@task(name="slice", cache_policy=NO_CACHE)
def _slice(experiment: Experiment, part: Slice, context: dict[str, str]) -> dict[str, SliceOutcome]:
    return experiment.run_slice(part, context)


@task(name="placebo", cache_policy=NO_CACHE)
def _placebo(
    experiment: Experiment, settings: Settings, progress: Callable[[int, int], None], fan_out: FanOut | None
) -> Curves | None:
    return stages.placebo_curves(experiment, settings, progress, fan_out)


@task(name="examine", cache_policy=NO_CACHE)
def _examine(
    experiment: Experiment, placebo: Curves | None, say: Callable[[str], None], fan_out: FanOut
) -> Science | None:
    return stages.examine(experiment, placebo, say, fan_out)


@task(name="report", cache_policy=NO_CACHE)
def _report(experiment: Experiment, science: Science | None, folder: Path) -> Report:
    return stages.report(experiment, science, folder)


def _artifacts(experiment: Experiment, written: Report, folder: Path) -> None:
    """Show the report in Prefect, figures included, with a link to MLflow."""
    key = "".join(c if c.isalnum() else "-" for c in experiment.file.name.lower()).strip("-")
    markdown = written.page.markdown(embed=folder)
    if len(markdown) > _MOST_CHARACTERS:
        markdown = written.page.markdown()
    create_markdown_artifact(key=f"{key}-report", markdown=markdown, description="Figure 10, regret and what it means")
    create_table_artifact(
        key=f"{key}-results", table=[{"result": name, "value": value} for name, value in sorted(written.values.items())]
    )
    tracking = experiment.tracking
    create_link_artifact(
        key=f"{key}-mlflow-run",
        link=run_url(tracking.uri, tracking.experiment_id).format(run_id=tracking.run_id),
        link_text=f"{experiment.file.name} in MLflow",
    )
