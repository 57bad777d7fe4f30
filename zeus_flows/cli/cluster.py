"""`zeus-flows cluster`: policies side by side on groups of recurring jobs that overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from zeus_flows.cli.documents import json_option, print_document

if TYPE_CHECKING:
    from zeus_flows.experiments.cluster.comparing import Share
    from zeus_flows.experiments.cluster.request import ClusterRequest, ClusterResult

T = TypeVar("T")
R = TypeVar("R")


@click.command("cluster")
@click.option(
    "--groups",
    type=click.Path(path_type=Path, dir_okay=False),
    help="CSV with group,start_time,end_time and, where it says what groups train, dataset,runtime_ratio. Without it: "
    "groups drawn by a recipe.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="How many jobs are drawn where there is no --groups.  [5000]")
@click.option(
    "--traces",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder with summary_train.csv and summary_power_<gpu>.csv. Without it: built-in models of the workloads.",
)
@click.option("--gpu", default="v100", show_default=True, help="Which power trace, or which built-in GPU.")
@click.option("--workload", "workloads", multiple=True, help="Only this workload; may be repeated.")
@click.option(
    "--policies",
    default="zeus-paper,thompson,lookahead,default,grid",
    show_default=True,
    help="Policies to compare, with commas between.",
)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Simulations of each group.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="First seed, and the recipe's.")
@click.option("--eta", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Energy (1) against time (0).")
@click.option("--beta", type=click.FloatRange(min=1), default=2.0, show_default=True, help="Early stop of zeus.")
@click.option(
    "--runner",
    help="Share the groups out on a Prefect task runner, as in a flow: threads, processes, dask, or a Dask scheduler's "
    "address. Default: one after the other.",
)
@click.option("--track", is_flag=True, help="Run as a Prefect flow and write a run to MLflow.")
@click.option("--tracking-uri", help="Where that run goes, before MLFLOW_TRACKING_URI; implies --track.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Write cluster.csv, .svg and .png into this folder."
)
@json_option()
def cluster_command(
    groups: Path | None,
    jobs: int | None,
    traces: Path | None,
    gpu: str,
    workloads: tuple[str, ...],
    policies: str,
    seeds: int,
    seed: int,
    eta: float,
    beta: float,
    runner: str | None,
    track: bool,
    tracking_uri: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Simulate a cluster: groups of recurring jobs that overlap, under every policy (section 6.3 of the Zeus paper).

    A job that is submitted before earlier ones have ended decides without having seen them. How long each takes is
    simulated. --jobs 1000000 draws a million jobs; memory does not grow with those that have ended.
    """
    from zeus_flows.core.json import jsonable
    from zeus_flows.errors import ConfigError
    from zeus_flows.experiments.cluster.request import DRAWN_JOBS, ClusterRequest, answer, write_files
    from zeus_flows.settings import public_uri

    if groups is not None and jobs is not None:
        raise ConfigError("--groups and --jobs do not go together: groups are read from a file, or drawn")
    public_uri(tracking_uri, "--tracking-uri")
    request = ClusterRequest(
        groups=groups,
        drawn_jobs=DRAWN_JOBS if jobs is None else jobs,
        traces=traces,
        gpu=gpu.lower(),
        workloads=workloads,
        policies=tuple(name.strip() for name in policies.split(",") if name.strip()),
        seeds=seeds,
        seed=seed,
        eta=eta,
        beta=beta,
    )
    if runner is None and not track and tracking_uri is None:
        result = answer(request, _telling)
    else:
        result = _as_flow(request, runner, tracked=track or tracking_uri is not None, tracking_uri=tracking_uri)
    if out is not None:
        write_files(request, result, out)
    if as_json:
        document = {"arrivals": result.source, "training": request.training, "gpu": request.gpu, "simulated": True}
        settings = {"eta": eta, "beta": beta, "seeds": seeds, "seed": seed}
        print_document(document | {"settings": settings, "rows": jsonable(result.rows)})
    else:
        _show(request, result)


def _as_flow(request: ClusterRequest, runner: str | None, *, tracked: bool, tracking_uri: str | None) -> ClusterResult:
    from zeus_flows.settings import quiet_libraries

    quiet_libraries()
    from zeus_flows.orchestration.cluster_flow import run_cluster
    from zeus_flows.orchestration.ephemeral_server import end_server_with_us
    from zeus_flows.orchestration.prefect_runs import named_outages, print_no_errors

    print_no_errors()
    end_server_with_us()
    with named_outages():
        return run_cluster(request, runner=runner, tracked=tracked, in_turn=_telling, tracking_uri=tracking_uri)


def _telling(work: Callable[[T], R], items: Sequence[T], told: Callable[[T, R], None] | None = None) -> list[R]:
    """Do one after the other, and say how far that is where somebody watches."""
    import sys

    done = []
    for count, item in enumerate(items):
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{100 * count // len(items)} % simulated", nl=False, err=True)
        done.append(work(item))
        if told is not None:
            told(item, done[-1])
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", nl=False, err=True)
    return done


def _show(request: ClusterRequest, result: ClusterResult) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for heading in ("energy", "time", "cost", "missed"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for r in result.rows:
        if r.workload != previous:
            table.add_section()
            table.add_row(f"[bold]{r.workload}[/]", f"{r.groups:,} groups", f"{r.jobs:,} jobs")
        shares = (_share(share) for share in (r.energy, r.time, r.cost))
        table.add_row(f"  {r.policy}", *shares, f"{r.missed_percent:.1f} %")
        previous = r.workload
    click.echo(f"SIMULATED: {request.gpu}, {request.training}, eta {request.eta:g}")
    Console().print(table)
    last = [r for r in result.rows if r.workload == result.rows[-1].workload]
    overlap = ", ".join(f"{r.overlapping_percent:.0f} % ({r.policy})" for r in last)
    for paragraph in (
        f"Arrivals: {result.source}.",
        f"Submitted while an earlier job of the group was under way: {overlap}.",
        "energy, time, cost: of all attempts, over what the default batch size at maximum power takes on the same "
        "groups; 95 % interval by resampling groups. missed: jobs that never reached the target.",
    ):
        click.echo(click.wrap_text(paragraph, width=100))


def _share(share: Share) -> str:
    """Return a share with its interval.

    >>> from zeus_flows.experiments.cluster.comparing import Share
    >>> _share(Share(0.5, 0.4, 0.625)), _share(Share(1.0))
    ('0.50 (0.40-0.62)', '1.00')
    """
    return f"{share.value:.2f}" + ("" if share.low is None else f" ({share.low:.2f}-{share.high:.2f})")
