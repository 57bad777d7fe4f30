"""`zeus-flows status` and `explain`: how jobs are, and why they ran as they did. They write nothing."""

from __future__ import annotations

import textwrap
from pathlib import Path

import click

from zeus_flows.cli.documents import json_option, print_document
from zeus_flows.errors import ConfigError


@click.command("status")
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option("--tracking-uri", help="Where the runs are, before the job file's and MLFLOW_TRACKING_URI.")
@json_option("Print one JSON document instead of lines.")
def status_command(job: Path | None, tracking_uri: str | None, as_json: bool) -> None:
    """Show how JOB is, or every job there: what runs now, the best batch size, what was saved, what to type next.

    It costs the same however long the history is, and writes nothing.
    """
    from datetime import UTC, datetime

    from zeus_flows.core.job_summary import JobSummary
    from zeus_flows.job_file import load_job
    from zeus_flows.masking import without_secrets
    from zeus_flows.reporting.fleet import Fleet
    from zeus_flows.settings import quiet_libraries, read_settings

    job_file = None if job is None else load_job(job)
    quiet_libraries()
    from zeus_flows.ledger.mlflow.address import may_exist
    from zeus_flows.ledger.mlflow.client import Store
    from zeus_flows.reporting.status import status_document, status_lines

    uri = read_settings().tracking(tracking_uri, None if job_file is None else job_file.tracking_uri)
    found, scheduled = tuple[JobSummary, ...](), None
    if may_exist(uri):
        from zeus_flows.ledger.mlflow.fleet_jobs import read_fleet
        from zeus_flows.orchestration.next_runs import next_runs

        found = read_fleet(Store(uri, patience_s=3.0), only=None if job_file is None else job_file.name)
        scheduled = next_runs() if found else None
    fleet = Fleet(found, scheduled, datetime.now(UTC), without_secrets(uri))
    if as_json:
        print_document(status_document(fleet))
    elif not found and job_file is not None:
        click.echo(f"{job_file.name} has never run at {fleet.where}\nnext: zeus-flows run {job}")
    elif not found:
        click.echo(f"there are no jobs at {fleet.where} yet\nnext: zeus-flows init")
    for number, summary in enumerate(() if as_json else found):
        lines = status_lines(fleet, summary, path="JOB.yaml" if job is None else str(job))
        shown = (textwrap.fill(line, 80, subsequent_indent=" " * 12, break_on_hyphens=False) for line in lines)
        click.echo(("\n" if number else "") + "\n".join(shown))


@click.command("explain")
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("recurrence", type=click.IntRange(min=1), required=False)
@click.option("--tracking-uri", help="Where the runs are, before the job file's and MLFLOW_TRACKING_URI.")
@json_option("Print one JSON document instead.")
def explain_command(job: Path, recurrence: int | None, tracking_uri: str | None, as_json: bool) -> None:
    """Explain why RECURRENCE of JOB (the newest by default) ran at its batch size and limit, and when it was stopped.

    Each decision is taken again, from what it was asked and what had been observed then; where it does not come out
    as it is recorded, that is said. Nothing is written.
    """
    from rich.console import Console

    from zeus_flows.job_file import load_job
    from zeus_flows.settings import quiet_libraries, read_settings

    job_file = load_job(job)
    quiet_libraries()
    from zeus_flows.reporting.console import reading_bar
    from zeus_flows.reporting.explain_report import explain_document, explain_recurrence, show_explained
    from zeus_flows.reporting.recorded import open_recorded

    opened = open_recorded(job_file, read_settings().tracking(tracking_uri, job_file.tracking_uri))
    if opened is None:
        raise ConfigError(f"{job_file.name} has never run: nothing to explain\n  type `zeus-flows run {job}`")
    with reading_bar() as told:
        explained = explain_recurrence(*opened, recurrence, told)
    if as_json:
        print_document(explain_document(explained))
    else:
        show_explained(Console(), explained)
