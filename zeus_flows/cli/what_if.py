"""`zeus-flows what-if`: a job's own history under another policy, eta or mode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_flows.cli.documents import json_option, print_document

if TYPE_CHECKING:
    from zeus_flows.experiments.cluster.what_if import OwnHistory, WhatIfRow
    from zeus_flows.job_file import JobFile
    from zeus_flows.job_sections.gpu_section import SimulatedGpu


@click.command("what-if")
@click.argument("jobs", type=click.Path(dir_okay=False, path_type=Path), nargs=-1, required=True, metavar="JOB...")
@click.option("--policy", "policies", default="", help="Other policies, with commas between.")
@click.option("--eta", "etas", type=click.FloatRange(0, 1), multiple=True, help="Another eta; may be repeated.")
@click.option(
    "--mode", "modes", type=click.Choice(["off", "observe", "power", "full"]), multiple=True, help="Another mode."
)
@click.option("--seeds", type=click.IntRange(min=1), default=50, show_default=True, help="Simulations of each.")
@click.option(
    "--simulate", type=click.Choice(["v100", "p100", "a40", "rtx6000"]), help="The simulated GPU the jobs ran on."
)
@click.option("--tracking-uri", help="Where the runs are, before the job file's URI.")
@json_option()
def what_if_command(
    jobs: tuple[Path, ...],
    policies: str,
    etas: tuple[float, ...],
    modes: tuple[str, ...],
    seeds: int,
    simulate: SimulatedGpu | None,
    tracking_uri: str | None,
    as_json: bool,
) -> None:
    """Reckon from the runs of each JOB what its recurrences would have cost otherwise.

    Without --policy, --eta and --mode: lookahead, zeus-paper and the mode power beside the job as it is.
    """
    from zeus_flows.core.job import Mode
    from zeus_flows.core.json import jsonable
    from zeus_flows.core.policy import POLICIES
    from zeus_flows.errors import ConfigError
    from zeus_flows.settings import quiet_libraries

    names = [name.strip() for name in policies.split(",") if name.strip()]
    if unknown := [name for name in names if name not in POLICIES]:
        raise ConfigError(f"--policy: there is no {', '.join(unknown)}; there are {', '.join(POLICIES)}")
    quiet_libraries()
    from zeus_flows.cli.upkeep import LedgerOf
    from zeus_flows.experiments.cluster.what_if import own_history, variants, what_if
    from zeus_flows.reporting.console import reading_bar

    documents = []
    for path in jobs:
        job_file, ledger = LedgerOf(path, simulate, tracking_uri).open_kept()
        with reading_bar() as told:
            history = own_history(job_file.core(), ledger.observations(told))
        asked = variants(history.job, policies=names, etas=etas, modes=[Mode(m) for m in modes])
        if not names and not etas and not modes:
            asked |= variants(history.job, policies=["lookahead", "zeus-paper"], etas=(), modes=())
            asked |= variants(history.job, policies=(), etas=(), modes=[Mode.POWER])
        rows = what_if(history, asked, seeds=seeds)
        if as_json:
            about = {"job": job_file.name, "recurrences": len(history.submissions), "gpu": history.trace.gpu.key}
            about |= {"energy_source": job_file.energy_source, "assumed": history.assumed}
            documents.append(about | {"rows": jsonable(rows)})
        else:
            _show(job_file, history, rows)
    if as_json:
        print_document({"seeds": seeds, "jobs": documents})


def _show(job_file: JobFile, history: OwnHistory, rows: list[WhatIfRow]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from zeus_flows.core.records import EnergySource
    from zeus_flows.core.text import joules, seconds

    source = job_file.energy_source
    happened = rows[0].cost_j.mean
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in ("energy", "time", "cost", "missed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        ends = "" if row is rows[0] else f" ({row.cost_j.low / happened:.2f}-{row.cost_j.high / happened:.2f})"
        energy = "-" if source is EnergySource.NONE else joules(row.energy_j.mean)
        cost = f"{row.cost_j.mean / happened:.2f}{ends}"
        table.add_row(row.name, energy, seconds(row.time_s.mean), cost, f"{row.missed:.1f}")
    of = {EnergySource.NONE: "runs without energy"}.get(source, f"runs whose energy was {source}")
    click.echo(f"{job_file.name}: {len(history.submissions)} recurrences on {history.trace.gpu.key}, {of}")
    Console().print(table)
    for line in (
        "Simulated, but for what happened: means, and 5 to 95 % of the simulations. cost: over what happened, by the "
        f"job's own objective (eta {history.job.objective_eta:g}). default: the default batch size at the greatest "
        "power limit. missed: recurrences that do not reach the target.",
        *(f"Assumed: {assumed}." for assumed in history.assumed),
    ):
        click.echo(click.wrap_text(line, width=80))
