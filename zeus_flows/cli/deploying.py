"""`zeus-flows deploy`: parsing and printing; `zeus_flows.orchestration` plans and does it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeus_flows.cli.documents import json_option, print_document
from zeus_flows.errors import ConfigError

if TYPE_CHECKING:
    from zeus_flows.job_sections.gpu_section import SimulatedGpu
    from zeus_flows.orchestration.deployments import DeploymentChange
    from zeus_flows.orchestration.janitors import JanitorChange
    from zeus_flows.orchestration.pools import PoolChange

_SIMULATED = click.Choice(["v100", "p100", "a40", "rtx6000"])


@dataclass(frozen=True, slots=True)
class Files:
    """The files that a command was given, and what it pins beside them."""

    paths: tuple[Path, ...]
    folder: Path | None
    tracking_uri: str | None
    simulate: SimulatedGpu | None


@click.command("deploy")
@click.argument("paths", metavar="JOB.yaml|DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--cron", help='When to run, such as "0 2 * * *".')
@click.option("--timezone", default="UTC", show_default=True, help="Whose clock --cron is by, such as Europe/Berlin.")
@click.option("--pool", help="The work pool; made where there is none. [default: gpu]")
@click.option("--lock-pool", is_flag=True, help="Let callers of runs replace nothing in a process pool that exists.")
@click.option("--janitor-pool", help="Where the pool's janitor runs, which needs no GPU. [default: the same pool]")
@click.option("--paused/--not-paused", default=None, help="Let schedules rest, or go on.")
@click.option("--grace-period", type=click.IntRange(60, 86_400), default=60, show_default=True, metavar="SECONDS",
              help="How long a run may take to start; pods that start slowly need more.")  # fmt: skip
@click.option("--folder", type=click.Path(path_type=Path), help="Where runs work, on workers. [default: this folder]")
@click.option("--tracking-uri", help="Where MLflow runs go, before the job file's and MLFLOW_TRACKING_URI.")
@click.option("--simulate", type=_SIMULATED, help="Run on a simulated GPU, whatever the job files say.")
@click.option("--dry-run", is_flag=True, help="Show the plan; change nothing.")
@json_option("Print one JSON document instead of the plan.")
def deploy_command(
    paths: tuple[Path, ...],
    cron: str | None,
    timezone: str,
    pool: str | None,
    lock_pool: bool,
    janitor_pool: str | None,
    paused: bool | None,
    grace_period: int,
    folder: Path | None,
    tracking_uri: str | None,
    simulate: SimulatedGpu | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make a Prefect deployment for each job file, or bring it up to date.

    A file may be a job's or a drift experiment's; of a folder all YAML files are taken. The plan is shown first. What
    is not said stays as it is; done again, nothing changes. A deployment pins the file by its digest: one that has
    changed on disk runs once it is deployed again.
    """
    files = Files(paths, folder, tracking_uri, simulate)
    _check_schedule(cron, timezone)
    from zeus_flows.settings import quiet_libraries

    quiet_libraries()
    from zeus_flows.orchestration import deployments, janitors, pools

    asked = deployments.DeploymentWishes(cron, timezone, pool, paused, grace_period)
    deployables = _deployables(files)
    with deployments.prefect_api() as client:
        changes = [deployments.plan(client, deployable, asked) for deployable in deployables]
        wanted = sorted({str(change.wanted["work pool"]) for change in changes})
        about_janitors = [janitors.plan_janitor(client, name, runs_in=janitor_pool) for name in wanted]
        wanted += sorted({about.runs_in for about in about_janitors} - set(wanted))
        about_pools = [pools.plan_pool(client, name, lock=lock_pool) for name in wanted]
        if not as_json:
            _show(changes, about_pools, about_janitors, str(client.api_url))
        if not dry_run:
            for about in about_pools:
                pools.apply_pool(client, about)
            for janitor in about_janitors:
                janitors.apply_janitor(client, janitor)
            for change in changes:
                deployments.apply(client, change)
    if as_json:
        document = _document(changes, about_pools, about_janitors, applied=not dry_run)
        print_document(document)
    else:
        click.echo(_closing(changes, about_pools, dry_run))


@click.command("serve")
@click.argument("paths", metavar="JOB.yaml|DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--cron", help='When to run, such as "0 2 * * *".')
@click.option("--timezone", default="UTC", show_default=True, help="Whose clock --cron is by, such as Europe/Berlin.")
@click.option("--tracking-uri", help="Where MLflow runs go, before the job file's and MLFLOW_TRACKING_URI.")
@click.option("--simulate", type=_SIMULATED, help="Run on a simulated GPU, whatever the job files say.")
def serve_command(
    paths: tuple[Path, ...], cron: str | None, timezone: str, tracking_uri: str | None, simulate: SimulatedGpu | None
) -> None:
    """Deploy job files and run them from this process, without a work pool or workers.

    Each recurrence is a process of its own. Ctrl-C ends it and lets the schedules rest.
    """
    _check_schedule(cron, timezone)
    from zeus_flows.settings import quiet_libraries

    quiet_libraries()
    from zeus_flows.orchestration import deployments, serving

    asked = deployments.DeploymentWishes(cron, timezone, paused=False, served=True)
    deployables = _deployables(Files(paths, None, tracking_uri, simulate))
    with deployments.prefect_api() as client:
        changes = [deployments.plan(client, deployable, asked) for deployable in deployables]
        serving.refuse_pools(changes)
        _show(changes, (), (), str(client.api_url))
        ids = [deployments.apply(client, change) for change in changes]
        serving.tidy(client, ids)
    click.echo(f"serving {len(ids)}; Ctrl-C ends it\nnext: prefect deployment run {deployables[0].full_name}")
    serving.serve_deployments(changes, ids)


def _deployables(files: Files) -> list[Any]:
    from zeus_flows.orchestration.deployable import Pins, files_of, read_deployables
    from zeus_flows.settings import public_uri, read_settings

    public_uri(files.tracking_uri, "--tracking-uri")
    folder = None if files.folder is None else files.folder.absolute()
    pins = Pins(folder, files.tracking_uri, files.simulate)
    return read_deployables([file for path in files.paths for file in files_of(path)], pins, read_settings())


def _check_schedule(cron: str | None, timezone: str) -> None:
    """Refuse what is no schedule before Prefect is asked."""
    if cron is None:
        return
    from pydantic import ValidationError

    from zeus_flows.settings import quiet_libraries

    quiet_libraries()
    from prefect.client.schemas.schedules import CronSchedule

    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        (problem, *_) = error.errors(include_url=False)
        what = re.sub(r"^Value error, ", "", str(problem["msg"]))
        flag = "--timezone" if "timezone" in problem["loc"] else "--cron"
        raise ConfigError(f'{flag}: {what}; such as --cron "0 2 * * *" --timezone UTC, every night at two') from None


def _show(
    changes: Sequence[DeploymentChange],
    about_pools: Sequence[PoolChange],
    about_janitors: Sequence[JanitorChange],
    api: str,
) -> None:
    from zeus_flows.masking import without_secrets
    from zeus_flows.orchestration.deployments import shown

    click.echo(f"Prefect at {without_secrets(api).rstrip('/')}")
    for pool in about_pools:
        if pool.change != "unchanged":
            click.echo(f"  {pool.change:<10} work pool {pool.name}: callers of runs can replace nothing in it")
        elif pool.open_to_callers:
            click.echo(
                f"  open       work pool {pool.name}: whoever may start a run can replace "
                f"{', '.join(pool.open_to_callers)}; --lock-pool takes that away"
            )
    for janitor in about_janitors:
        if janitor.kind != "unchanged":
            click.echo(
                f"  {janitor.kind:<10} janitor/{janitor.pool}: closes what has died, where a run waits for a slot"
            )
    for change in changes:
        click.echo(f"  {change.kind:<10} {change.deployable.full_name}")
        if change.kind == "create":
            for name in ("job_file", "experiment_file", "folder", "tracking_uri", "simulate", "schedule", "paused"):
                value = {**change.wanted["parameters"], **change.wanted}.get(name)
                if value:
                    click.echo(f"{'':<13}{name}: {shown(name, value)}")
        for name, (before, after) in change.differences.items() if change.kind == "update" else ():
            click.echo(f"{'':<13}{name}: {shown(name, before)} -> {shown(name, after)}")


def _closing(changes: Sequence[DeploymentChange], about_pools: Sequence[PoolChange], dry_run: bool) -> str:
    if dry_run:
        return "nothing was changed: this was a dry run"
    counts = {kind: sum(change.kind == kind for change in changes) for kind in ("create", "update", "unchanged")}
    done = f"{counts['create']} created, {counts['update']} updated, {counts['unchanged']} unchanged"
    workers = "\n".join(f"next: {pool.worker_command}" for pool in about_pools)
    return f"{done}\n{workers}"


def _document(
    changes: Sequence[DeploymentChange],
    about_pools: Sequence[PoolChange],
    about_janitors: Sequence[JanitorChange],
    *,
    applied: bool,
) -> dict[str, Any]:
    return {
        "applied": applied,
        "pools": [
            {"name": pool.name, "change": pool.change, "open_to_callers": list(pool.open_to_callers)}
            for pool in about_pools
        ],
        "janitors": [
            {"pool": janitor.pool, "runs_in": janitor.runs_in, "change": janitor.kind} for janitor in about_janitors
        ],
        "deployments": [
            {
                "name": change.deployable.full_name,
                "file": str(change.deployable.path),
                "change": change.kind,
                "differences": {
                    name: {"before": before, "after": after}
                    for name, (before, after) in change.differences.items()
                    if change.kind == "update"
                },
            }
            for change in changes
        ],
    }
