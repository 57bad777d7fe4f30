"""`zeus-flows models`: a job's registered versions, what each took, and who is champion."""

from __future__ import annotations

from pathlib import Path

import click

from zeus_flows.cli.documents import json_option, print_document


@click.command("models")
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--tracking-uri", help="Where MLflow runs are, before the job file's and MLFLOW_TRACKING_URI.")
@json_option("Print one JSON document instead of a table.")
def models_command(job: Path, tracking_uri: str | None, as_json: bool) -> None:
    """Show the models that JOB kept: what each took, who is champion, and why."""
    from rich.console import Console

    from zeus_flows.job_file import load_job
    from zeus_flows.settings import quiet_libraries, read_settings

    job_file = load_job(job)
    quiet_libraries()
    from zeus_flows.reporting.models_report import models_document, read_models, show_models

    models = read_models(job_file, read_settings().tracking(tracking_uri, job_file.tracking_uri))
    if as_json:
        print_document(models_document(models))
    else:
        show_models(Console(), models)
