"""`zeus-flows views`: what people see of a job in MLflow."""

from __future__ import annotations

from pathlib import Path

import click

from zeus_flows.cli.documents import json_option, print_document
from zeus_flows.errors import ConfigError


@click.command("views")
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--tracking-uri", help="Where the runs are, before the job file's and MLFLOW_TRACKING_URI.")
@click.option("--anew", is_flag=True, help="Write those, too, that somebody changed or deleted, and the description.")
@json_option("Print one JSON document instead of lines.")
def views_command(job: Path, tracking_uri: str | None, anew: bool, as_json: bool) -> None:
    """Bring the saved views of JOB in MLflow up to date, and its description; say where each is.

    The first recurrence installs them. What somebody changed or deleted by hand is left alone.
    """
    from zeus_flows.job_file import load_job
    from zeus_flows.settings import quiet_libraries, read_settings

    job_file = load_job(job)
    quiet_libraries()
    from zeus_flows.core import policy
    from zeus_flows.reporting.links import ui_command, view_url
    from zeus_flows.reporting.recorded import open_recorded

    uri = read_settings().tracking(tracking_uri, job_file.tracking_uri)
    opened = open_recorded(job_file, uri)
    if opened is None:
        raise ConfigError(f"{job_file.name} has never run: there is nothing to see\n  type `zeus-flows run {job}`")
    of, ledger = opened
    told = ledger.page.install(anew=anew)
    saved, newest = policy.saved(of, ledger.state()), ledger.last_recurrence(looked=True)
    last = ledger.attempts_of(newest)[-1:] if newest else ()
    ours = ledger.page.describe(newest, saved, *(attempt.observation for attempt in last), anew=anew)
    there = {view.id for view in ledger.page.installed()}
    urls = {view.id: view_url(uri, ledger.experiment_id, [view]) for view, _ in told if view.id in there}
    if as_json:
        listed = [{"name": view.name, "state": how, "url": urls.get(view.id)} for view, how in told]
        print_document({"job": job_file.name, "views": listed, "description_is_ours": ours})
        return
    for view, how in told:
        click.echo(f"{view.name}: {how}" + (f"\n  {urls[view.id]}" if view.id in urls else ""))
    click.echo("The description is up to date." if ours else "The description was written by hand, and left alone.")
    if command := ui_command(uri):
        click.echo(f"To look:  {command}")
