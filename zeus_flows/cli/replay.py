"""`zeus-flows replay`: policies side by side on traces or built-in models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_flows.cli.documents import json_option, print_document

if TYPE_CHECKING:
    from zeus_flows.experiments.fan_out import FanOut


@click.command("replay")
@click.option(
    "--traces",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder with summary_train.csv and summary_power_<gpu>.csv. Without it: built-in models of the workloads.",
)
@click.option("--gpu", default="v100", show_default=True, help="Which power trace, or which built-in GPU.")
@click.option(
    "--policy",
    "policies",
    default="thompson,lookahead,zeus,zeus-paper,power,default",
    show_default=True,
    help="Policies to compare, with commas between.",
)
@click.option("--workload", "workloads", multiple=True, help="Only this workload; may be repeated.")
@click.option("--recurrences", type=click.IntRange(min=1), help="How many. Default: 2 |B| |P|, as in figure 6.")
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True, help="Replays to average over.")
@click.option("--eta", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Energy (1) against time (0).")
@click.option("--beta", type=click.FloatRange(min=1), default=2.0, show_default=True, help="Early stop of zeus.")
@click.option("--window", type=click.IntRange(min=1), help="Newest runs of an arm that count. Default: all.")
@click.option("--b0", type=click.IntRange(min=1), help="Another default batch size than the paper's.")
@click.option("--target", type=float, help="Another target metric than the paper's; needs --traces.")
@click.option("--budget", type=click.FloatRange(min=0), help="exploration_budget: share above the estimated default.")
@click.option(
    "--runner",
    help="Share the work out on a Prefect task runner: threads, processes, dask, or a Dask scheduler's address such as "
    "tcp://10.0.0.1:8786. Default: one after the other, without Prefect.",
)
@json_option()
def replay(
    traces: Path | None,
    gpu: str,
    policies: str,
    workloads: tuple[str, ...],
    recurrences: int | None,
    seeds: int,
    eta: float,
    beta: float,
    window: int | None,
    b0: int | None,
    target: float | None,
    budget: float | None,
    runner: str | None,
    as_json: bool,
) -> None:
    """Compare policies on the paper's workloads, or on your own job's traces.

    `zeus-flows ledger traces JOB FOLDER` writes a job's runs as traces; replay them with --traces FOLDER and --gpu as
    in the power file's name.
    """
    from zeus_flows.core.json import jsonable
    from zeus_flows.core.policy import POLICIES
    from zeus_flows.errors import ConfigError
    from zeus_flows.experiments.fan_out import in_turn
    from zeus_flows.experiments.replay.comparison import compare, find_traces

    names = [name.strip() for name in policies.split(",") if name.strip()]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise ConfigError(f"--policy: there is no {', '.join(unknown) or 'policy'}; there are {', '.join(POLICIES)}")
    found = find_traces(folder=traces, gpu=gpu.lower(), workloads=workloads, target=target, default_batch_size=b0)
    rows = compare(
        found,
        names,
        seeds=seeds,
        recurrences=recurrences,
        fan_out=in_turn if runner is None else _shared_out(runner),
        eta=eta,
        beta=beta,
        window=window,
        exploration_budget=budget,
    )
    source = "built-in models" if traces is None else f"traces in {traces}"
    if as_json:
        settings = {"eta": eta, "beta": beta, "window": window, "exploration_budget": budget}
        print_document({"source": source, "settings": settings, "rows": jsonable(rows)})
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{gpu}, {source}, eta {eta:g}; energy from the model, not measured here", title_justify="left")
    for heading in ("workload", "policy"):
        table.add_column(heading, no_wrap=True)
    for heading in ("runs", "regret", "energy", "time", "cost", "missed"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = None
    for r in rows:
        table.add_row(
            r.workload if r.workload != previous else "",
            r.policy,
            str(r.recurrences),
            f"{r.regret:.2f}",
            f"{r.energy_saved_percent:.1f} %",
            f"{r.time_saved_percent:.1f} %",
            f"{r.last_cost_ratio:.3f}",
            str(r.unconverged),
            end_section=r.policy == names[-1],
        )
        previous = r.workload
    Console().print(table)
    click.echo(
        "regret: cumulative, in runs of the best batch size. energy, time: saved by the last five recurrences against\n"
        "the default batch size at maximum power. cost: of the last five, over the best batch size's. missed: "
        "recurrences\nin which the target was not reached."
    )


def _shared_out(runner: str) -> FanOut:
    """Return what shares work out on a Prefect task runner, with Prefect's server for the time of the command."""
    from zeus_flows.settings import quiet_libraries

    quiet_libraries()
    from zeus_flows.orchestration.ephemeral_server import end_server_with_us
    from zeus_flows.orchestration.fan_out import shared_out

    end_server_with_us()
    return shared_out(runner)
