"""`zeus-flows report` and `statement`: what a job took and saved, and what one model took. MLflow is only read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_flows.cli.documents import json_option, print_document
from zeus_flows.errors import ConfigError

if TYPE_CHECKING:
    from zeus_flows.core.prices import Tariff
    from zeus_flows.job_file import JobFile

_PRICES = click.option(
    "--prices",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A CSV file of hourly prices and carbon intensity, instead of the job file's.",
)
_URI = click.option("--tracking-uri", help="Where the runs are, before the job file's and MLFLOW_TRACKING_URI.")


@click.command("report")
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@_URI
@_PRICES
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write one HTML file instead.")
@click.option("--all", "everything", is_flag=True, help="Read every recurrence, not only the newest 100.")
@json_option("Print one JSON document instead.")
def report_command(
    job: Path, tracking_uri: str | None, prices: Path | None, html: Path | None, everything: bool, as_json: bool
) -> None:
    """Report what JOB took and saved: energy, money and CO2, against the default and against power-only.

    Each figure has its 90 % interval. The HTML file needs no network.
    """
    from datetime import UTC, datetime

    from rich.console import Console

    from zeus_flows.job_file import load_job
    from zeus_flows.masking import without_secrets
    from zeus_flows.settings import quiet_libraries, read_settings

    job_file = load_job(job)
    tariff = _tariff(job_file, job, prices)
    quiet_libraries()
    from zeus_flows.reporting.console import reading_bar
    from zeus_flows.reporting.job_report import NEWEST, read_report, report_document
    from zeus_flows.reporting.recorded import open_recorded
    from zeus_flows.reporting.report_text import show_report

    uri = read_settings().tracking(tracking_uri, job_file.tracking_uri)
    opened = open_recorded(job_file, uri)
    if opened is None:
        raise ConfigError(f"{job_file.name} has never run: nothing to report\n  type `zeus-flows run {job}`")
    with reading_bar() as told:
        report = read_report(
            job_file,
            opened,
            uri=uri,
            where=without_secrets(uri),
            tariff=tariff,
            at=datetime.now(UTC),
            most=None if everything else NEWEST,
            told=told,
        )
    if html is not None:
        from zeus_flows.reporting.report_page import report_page

        try:
            html.write_text(report_page(report), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{html} cannot be written: {error.strerror}") from None
    if as_json:
        print_document(report_document(report))
    elif html is not None:
        click.echo(f"wrote {html}")
    else:
        show_report(Console(), report)
        click.echo(f"\nnext: zeus-flows report {job} --html report.html")


@click.command("statement")
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("version")
@_URI
@_PRICES
@click.option("--with-history", is_flag=True, help="Add what the recurrences before it took.")
@json_option("Print one JSON document instead of Markdown.")
def statement_command(
    job: Path, version: str, tracking_uri: str | None, prices: Path | None, with_history: bool, as_json: bool
) -> None:
    """State the energy of one registered model of JOB, for its model card: how much, how it is known, how surely.

    VERSION is a number, or an alias such as champion.
    """
    from zeus_flows.job_file import load_job
    from zeus_flows.settings import quiet_libraries, read_settings

    job_file = load_job(job)
    tariff = _tariff(job_file, job, prices)
    quiet_libraries()
    from zeus_flows.reporting.recorded import open_recorded
    from zeus_flows.reporting.statement import read_statement, statement_document, statement_markdown

    opened = open_recorded(job_file, read_settings().tracking(tracking_uri, job_file.tracking_uri))
    if opened is None:
        raise ConfigError(f"{job_file.name} has never run: there is no model\n  type `zeus-flows run {job}`")
    statement = read_statement(job_file, opened[1], version, tariff, with_history=with_history)
    if as_json:
        print_document(statement_document(statement))
    else:
        click.echo(statement_markdown(statement))


def _tariff(job_file: JobFile, path: Path, prices: Path | None) -> Tariff:
    """Return what energy costs: the flag's file, the job file's prices, or those that a fleet shares."""
    stated = job_file.prices
    if prices is not None or stated.model_fields_set:
        return stated.tariff(path.parent, instead=prices)
    from pydantic import ValidationError

    from zeus_flows.settings import quiet_libraries

    quiet_libraries()
    from zeus_flows.orchestration.blocks import SHARED, shared_prices

    try:
        return type(stated).model_validate(shared_prices()).tariff(path.parent)
    except ValidationError as error:
        (problem, *_) = error.errors(include_url=False)
        raise ConfigError(f"the Prefect block zeus-flows-settings/{SHARED}: {problem['msg']}") from None
