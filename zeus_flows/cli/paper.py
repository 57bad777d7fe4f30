"""`zeus-flows paper`: the paper's figures, computed anew and held against what was published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_flows.cli.documents import json_option, print_document

if TYPE_CHECKING:
    from zeus_flows.experiments.paper.result import Result


@click.command("paper")
@click.argument("figure", required=False)
@click.option(
    "--traces",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder with the published summary_train.csv and summary_power_<gpu>.csv. Without it: built-in models, whose "
    "figures say nothing about the published ones.",
)
@click.option("--gpu", default="v100", show_default=True, help="Which GPU, for figures that are about one.")
@click.option("--seeds", type=click.IntRange(min=1), default=10, show_default=True, help="Replays of each policy.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write figure-<number>.csv, .svg and .png into this folder.",
)
@click.option(
    "--tracking-uri", help="Log each figure as a run of the experiment zeus-paper-figures in this MLflow, too."
)
@json_option()
def paper_command(
    figure: str | None,
    traces: Path | None,
    gpu: str,
    seeds: int,
    out: Path | None,
    tracking_uri: str | None,
    as_json: bool,
) -> None:
    """Compute FIGURE of the Zeus paper anew, or `all`; without FIGURE: list what there is and what is left out.

    Each published claim is printed with what came out here, the tolerance, and whether it is met.
    """
    from zeus_flows.errors import ConfigError
    from zeus_flows.experiments.paper.registry import FIGURES, LEFT_OUT, traces_for

    if figure is None:
        for number, entry in FIGURES.items():
            click.echo(f"{number:>4}  {entry.title}")
        click.echo("\nnot computed:")
        for number, why in LEFT_OUT.items():
            click.echo(f"{number:>12}  {why}")
        return
    if figure != "all" and figure not in FIGURES:
        raise ConfigError(f"there is no figure {figure!r} here; there are {', '.join(FIGURES)}, and all")
    source = "built-in models (simulated GPU)" if traces is None else f"traces in {traces}"
    documents = []
    for number in FIGURES if figure == "all" else (figure,):
        entry = FIGURES[number]
        found = traces_for(entry, traces, gpu.lower())
        click.echo(f"figure {number}: {entry.title}", err=True)
        result = entry.compute(found, seeds, _tell)
        title = f"Figure {number}: {entry.title} · {source.partition(' in ')[0]}"
        if out is not None:
            _write(result, out, number, title)
        if tracking_uri is not None:
            _track(result, tracking_uri, number, title, {"source": source, "gpu": gpu, "seeds": str(seeds)})
        if as_json:
            documents.append(_document(number, entry.title, result))
        else:
            _show(result, title, compared=traces is not None)
    if as_json:
        print_document({"source": source, "seeds": seeds, "figures": documents})


def _tell(what: str) -> None:
    """Say what is being replayed, on a terminal's one line."""
    import sys

    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K  {what}", nl=False, err=True)


def _document(number: str, title: str, result: Result) -> dict[str, object]:
    from zeus_flows.core.json import jsonable

    rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    return {"figure": number, "title": title, "claims": jsonable(result.claims), "rows": rows}


def _track(result: Result, tracking_uri: str, number: str, title: str, settings: dict[str, str]) -> None:
    import tempfile

    from zeus_flows.experiments.paper.logged import log_figure
    from zeus_flows.ledger.mlflow.client import Store
    from zeus_flows.reporting.links import run_url
    from zeus_flows.settings import quiet_libraries

    quiet_libraries()
    compared = settings["source"].startswith("traces")
    with tempfile.TemporaryDirectory() as folder:
        files = _write(result, Path(folder), number, title)
        store = Store(tracking_uri)
        settings = {"figure": number, **settings}
        experiment_id, run_id = log_figure(store, title, result, files, settings=settings, compared=compared)
    click.echo(f"  {run_url(tracking_uri, experiment_id).format(run_id=run_id)}", err=True)


def _write(result: Result, folder: Path, number: str, title: str) -> list[Path]:
    """Write table and figure; return the files.

    Raises:
        ConfigError: the folder cannot be written.
    """
    from zeus_flows.errors import ConfigError
    from zeus_flows.experiments.paper.drawing import draw
    from zeus_flows.experiments.paper.result import write_csv
    from zeus_flows.reporting.figures import write

    name = f"figure-{number}"
    try:
        return [*write(draw(result, title=title), folder, name), write_csv(result, folder / f"{name}.csv")]
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written: {error.strerror}") from None


def _show(result: Result, title: str, *, compared: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in result.columns:
        table.add_column(column, no_wrap=True)
    for row in result.rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)
    for claim in result.claims:
        verdict = ("met" if claim.met else "NOT MET") if compared else "not compared: no published traces"
        click.echo(
            f"{claim.what}\n  published {claim.published}; here {claim.ours}; tolerance {claim.tolerance}: {verdict}"
        )
    click.echo()
