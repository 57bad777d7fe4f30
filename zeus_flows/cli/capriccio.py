"""`zeus-flows capriccio` and `zeus-flows drift`: parsing and printing; the work is imported when asked for."""

from __future__ import annotations

from pathlib import Path

import click

from zeus_flows.cli.documents import json_option, print_document


@click.command("capriccio")
@click.argument("experiment", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--data", type=click.Path(dir_okay=False, path_type=Path), help="The data, whatever the file says.")
@click.option("--tracking-uri", help="Where MLflow runs go, before the file's and MLFLOW_TRACKING_URI.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the report and its figures; <name>-report by default.",
)
@click.option("--runner", help="Share training and replays out on a Prefect task runner, as `replay` does.")
@json_option("Print one JSON document instead of rows.")
def capriccio_command(
    experiment: Path, data: Path | None, tracking_uri: str | None, out: Path | None, runner: str | None, as_json: bool
) -> None:
    """Run the drift experiment that the file EXPERIMENT describes, or go on with it.

    A dataset is cut into slices by time; on each, every policy runs one recurrence. Killed and started again, it goes
    on at the slice where it stopped. deployments/experiments has files to start from.
    """
    from rich.console import Console

    from zeus_flows.experiments.capriccio.file import load_experiment
    from zeus_flows.settings import public_uri, quiet_libraries

    public_uri(tracking_uri, "--tracking-uri")
    load_experiment(experiment, data=data)  # what is wrong with it is said before anything heavy starts
    quiet_libraries()
    from zeus_flows.cli.capriccio_run import run_locally
    from zeus_flows.core.json import jsonable
    from zeus_flows.reporting.links import ui_command
    from zeus_flows.settings import read_settings

    console = Console(stderr=as_json)
    summary = run_locally(experiment, data, tracking_uri, out, runner, console)
    if as_json:
        print_document(jsonable(summary))
        return
    uri = read_settings().tracking(tracking_uri, load_experiment(experiment, data=data).tracking_uri)
    console.print(f"\nThe report: {summary.report}", soft_wrap=True)
    if command := ui_command(uri):
        console.print(f"The runs:   {command}", soft_wrap=True)


@click.command("drift")
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--tracking-uri", help="Where MLflow runs are, before the job file's and MLFLOW_TRACKING_URI.")
@click.option("--figure", type=click.Path(file_okay=False, path_type=Path), help="Folder to draw figure 10 into.")
@click.option("--all", "every", is_flag=True, help="Show every window, not only the newest 20.")
@json_option("Print one JSON document instead of a table.")
def drift_command(job: Path, tracking_uri: str | None, figure: Path | None, every: bool, as_json: bool) -> None:
    """Show the newest drift windows of the job that the file JOB describes: what ended each, and what changed."""
    from rich.console import Console

    from zeus_flows.job_file import load_job
    from zeus_flows.settings import quiet_libraries, read_settings

    job_file = load_job(job)
    quiet_libraries()
    from zeus_flows.reporting.drift_report import NEWEST, drift_document, read_drift, show_drift

    uri = read_settings().tracking(tracking_uri, job_file.tracking_uri)
    history = read_drift(job_file, uri, most=None if every else NEWEST)
    if figure is not None:
        from zeus_flows.reporting.drift_report import draw_drift

        drawn = draw_drift(history, figure)
        click.echo(f"wrote {', '.join(str(path) for path in drawn)}", err=True)
    if as_json:
        print_document(drift_document(history))
    else:
        show_drift(Console(), history)
