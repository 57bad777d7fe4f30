"""`zeus-flows fleet`: all jobs of a tracking server on one page."""

from __future__ import annotations

from pathlib import Path

import click

from zeus_flows.cli.documents import json_option, print_document
from zeus_flows.errors import ConfigError


@click.command("fleet")
@click.option("--tracking-uri", help="Where the runs are, before MLFLOW_TRACKING_URI.")
@json_option("Print one JSON document instead of tables.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write one HTML file instead.")
def fleet_command(tracking_uri: str | None, as_json: bool, html: Path | None) -> None:
    """Show all jobs of a tracking server: mode, best batch size, savings, what learning cost, what to look at.

    Nothing is written to MLflow, and nothing is begun where there is no database yet.
    """
    from datetime import UTC, datetime

    from rich.console import Console

    from zeus_flows.core.job_summary import JobSummary
    from zeus_flows.ledger.mlflow.address import may_exist
    from zeus_flows.ledger.mlflow.client import Store
    from zeus_flows.masking import without_secrets
    from zeus_flows.reporting.fleet import Fleet, fleet_document, fleet_page, fleet_sentences, fleet_tables
    from zeus_flows.settings import quiet_libraries, read_settings

    quiet_libraries()
    uri = read_settings().tracking(tracking_uri)
    jobs, scheduled = tuple[JobSummary, ...](), None
    if may_exist(uri):
        from zeus_flows.ledger.mlflow.fleet_jobs import read_fleet
        from zeus_flows.orchestration.next_runs import next_runs

        jobs, scheduled = read_fleet(Store(uri, patience_s=3.0)), next_runs()
    fleet = Fleet(jobs, scheduled, datetime.now(UTC), without_secrets(uri))
    if html is not None:
        try:
            html.write_text(fleet_page(fleet), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{html} cannot be written: {error.strerror}") from None
        click.echo(f"wrote {html}")
    elif as_json:
        print_document(fleet_document(fleet))
    elif not fleet.jobs:
        click.echo(f"there are no jobs at {fleet.where} yet")
    else:
        console = Console()
        for table in fleet_tables(fleet):
            console.print(table)
            console.print()
        for sentence in fleet_sentences(fleet):
            console.print(sentence, highlight=False, markup=False)
