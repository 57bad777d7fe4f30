"""The command line: parsing only. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeus_flows.cli.capriccio import capriccio_command, drift_command
from zeus_flows.cli.cluster import cluster_command
from zeus_flows.cli.deploying import deploy_command, serve_command
from zeus_flows.cli.documents import json_option
from zeus_flows.cli.fleet_command import fleet_command
from zeus_flows.cli.gpu import doctor_command, restore_power_command
from zeus_flows.cli.models import models_command
from zeus_flows.cli.paper import paper_command
from zeus_flows.cli.replay import replay
from zeus_flows.cli.report_commands import report_command, statement_command
from zeus_flows.cli.telling import explain_command, status_command
from zeus_flows.cli.views_command import views_command
from zeus_flows.cli.what_if import what_if_command
from zeus_flows.ending import end_when_told, note_exit
from zeus_flows.errors import ConfigError, WrongPlatform, ZeusFlowsError

if TYPE_CHECKING:
    from zeus_flows.gpu.doctor import CheckFunction
    from zeus_flows.job_sections.gpu_section import SimulatedGpu

_SIMULATED = click.Choice(["v100", "p100", "a40", "rtx6000"])


class _Group(click.Group):
    """A group whose commands end with a sentence and an exit code, not a traceback, when we raised on purpose."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse Windows before anything is parsed: what the commands import does not exist there."""
        if sys.platform == "win32":
            error = WrongPlatform()
            click.echo(f"zeus-flows: {error}", err=True)
            sys.exit(error.exit_code)
        try:
            return super().main(*args, **kwargs)
        except SystemExit as end:
            note_exit(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
            raise

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ZeusFlowsError as error:
            click.echo(f"zeus-flows: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"max_content_width": 100})
@click.version_option(package_name="zeus-flows", prog_name="zeus-flows")
def main() -> None:
    """Make recurring GPU training cheaper in energy and time.

    A job recurs on a schedule. Each recurrence asks a bandit for a batch size, trains with just-in-time power
    profiling, and writes what it cost to MLflow, from which the next one learns.

    \b
    Start here:
      zeus-flows init                                  write a commented job file
      zeus-flows run job.yaml --simulate v100          run one recurrence on a simulated GPU
      zeus-flows deploy job.yaml --cron "0 2 * * *"     let Prefect run one every night

    \b
    Exit codes: 0 done, 2 a job file or flag is wrong, 3 the target was not reached,
                4 no GPU can be used, 5 MLflow or Prefect failed, 1 anything else.
    """  # noqa: D301


@main.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path), default=Path("job.yaml"))
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
def init(path: Path, force: bool) -> None:
    """Write a commented job file to PATH (job.yaml by default) that runs as it is."""
    from importlib.resources import files

    template = files("zeus_flows").joinpath("templates/job.yaml").read_text(encoding="utf-8")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; give another path, or --force to overwrite it")
    try:
        path.write_text(template, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    click.echo(f"wrote {path}\nnext: zeus-flows run {path} --simulate v100")


@main.command()
@click.argument("job", type=click.Path(dir_okay=False, path_type=Path))
@click.option("-n", "--recurrences", type=click.IntRange(min=1), default=1, show_default=True, help="How many to run.")
@click.option("--simulate", type=_SIMULATED, help="Run on a simulated GPU, whatever the job file says.")
@click.option("--seed", type=int, help="The job's seed, whatever the job file says.")
@click.option("--tracking-uri", help="Where MLflow runs go, before the job file's and MLFLOW_TRACKING_URI.")
@click.option("--mode", type=click.Choice(["off", "observe", "power"]), help="Change less than the job file allows.")
@click.option("--dry-run", is_flag=True, help="Show what the next recurrence would do; write nothing.")
@json_option("Print one JSON document instead of a table.")
def run(
    job: Path,
    recurrences: int,
    simulate: SimulatedGpu | None,
    seed: int | None,
    tracking_uri: str | None,
    mode: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run recurrences of the job that the file JOB describes, each as a Prefect flow run."""
    from zeus_flows.cli import running as local
    from zeus_flows.core.job import Mode

    request = local.Request(
        job,
        recurrences=recurrences,
        simulate=simulate,
        seed=seed,
        tracking_uri=tracking_uri,
        mode=None if mode is None else Mode(mode),
        as_json=as_json,
    )
    end_when_told()
    sys.exit(local.dry_run(request) if dry_run else local.run(request))


def _of_a_job(command: Callable[..., None]) -> Callable[..., None]:
    """Add what every command about a job's ledger takes."""
    command = click.option("--tracking-uri", help="Where the runs are, before the job file's URI.")(command)
    command = click.option("--simulate", type=_SIMULATED, help="The simulated GPU the job ran on.")(command)
    return click.argument("job", type=click.Path(dir_okay=False, path_type=Path))(command)


@main.command()
@_of_a_job
def janitor(job: Path, simulate: SimulatedGpu | None, tracking_uri: str | None) -> None:
    """Close recurrences of JOB whose process was killed; look after its models. Every recurrence does this first."""
    from zeus_flows.cli import upkeep

    sys.exit(upkeep.janitor(upkeep.LedgerOf(job, simulate, tracking_uri)))


@main.command()
@_of_a_job
@click.option("--yes", is_flag=True, help="Do not ask.")
def reset(job: Path, simulate: SimulatedGpu | None, tracking_uri: str | None, yes: bool) -> None:
    """Start a new drift window of JOB: what was observed before no longer counts.

    It asks first; without a terminal to ask at, and without --yes, it ends with exit code 2.
    """
    from zeus_flows.cli import upkeep

    sys.exit(upkeep.reset(upkeep.LedgerOf(job, simulate, tracking_uri), sure=yes))


@main.group()
def ledger() -> None:
    """Look after the history that decisions are taken on."""


@ledger.command()
@_of_a_job
def verify(job: Path, simulate: SimulatedGpu | None, tracking_uri: str | None) -> None:
    """Fold every run of JOB anew and compare with the state in use. Exit 5 where they differ."""
    from zeus_flows.cli import upkeep

    sys.exit(upkeep.verify(upkeep.LedgerOf(job, simulate, tracking_uri)))


@ledger.command()
@_of_a_job
def repair(job: Path, simulate: SimulatedGpu | None, tracking_uri: str | None) -> None:
    """Bring back or rebuild what was deleted of the ledger of JOB, and fold its history anew.

    Attempts that were deleted stay so, and no longer count. No recurrence of JOB may run meanwhile.
    """
    from zeus_flows.cli import upkeep

    sys.exit(upkeep.mend(upkeep.LedgerOf(job, simulate, tracking_uri)))


@ledger.command()
@_of_a_job
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def traces(job: Path, simulate: SimulatedGpu | None, tracking_uri: str | None, folder: Path) -> None:
    """Write the runs of JOB into FOLDER in the published trace format, for `zeus-flows replay --traces`."""
    from zeus_flows.cli import upkeep

    sys.exit(upkeep.traces(upkeep.LedgerOf(job, simulate, tracking_uri), folder))


@main.command("import")
@_of_a_job
@click.option("--experiment", required=True, help="The experiment whose finished runs are imported.")
@click.option("--batch-size", default="params.batch_size", show_default=True, help="Where a run says its batch size.")
@click.option("--epochs", default="metrics.epochs", show_default=True, help="Where, how many epochs it trained.")
@click.option("--energy", default="metrics.energy_j", show_default=True, help="Where, its energy in joules.")
@click.option("--time", "time_s", default="metrics.time_s", show_default=True, help="Where, its time in seconds.")
@click.option("--metric", default="metrics.accuracy", show_default=True, help="Where, the metric the target is about.")
@click.option("--samples", type=click.IntRange(min=1), required=True, help="Training samples in an epoch.")
@click.option("--gpu", help="The GPU model the runs trained on, where it is not this machine's.")
@click.option("--max-power", type=float, help="That model's greatest power limit in watts.")
def import_command(
    job: Path,
    simulate: SimulatedGpu | None,
    tracking_uri: str | None,
    experiment: str,
    batch_size: str,
    epochs: str,
    energy: str,
    time_s: str,
    metric: str,
    samples: int,
    gpu: str | None,
    max_power: float | None,
) -> None:
    """Turn existing MLflow runs into observations of JOB; done again, it adds only what is new.

    A run counts as converged where its metric meets the job's target.
    """
    from zeus_flows.cli import upkeep
    from zeus_flows.ledger.mlflow.importing import Columns

    sys.exit(
        upkeep.bring(
            upkeep.LedgerOf(job, simulate, tracking_uri),
            experiment=experiment,
            columns=Columns(batch_size, epochs, energy, time_s, metric),
            samples_per_epoch=samples,
            max_power_w=max_power,
            gpu=gpu,
        )
    )


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what lets SHELL complete commands, options and file names.

    \b
    Say in ~/.bashrc:                   eval "$(zeus-flows completion bash)"
    in ~/.zshrc:                        eval "$(zeus-flows completion zsh)"
    in ~/.config/fish/config.fish:      zeus-flows completion fish | source
    """  # noqa: D301
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(main, {}, "zeus-flows", "_ZEUS_FLOWS_COMPLETE").source())


def _server_checks() -> Sequence[CheckFunction]:
    from zeus_flows.orchestration.checks import mlflow_answers, prefect_answers

    return (mlflow_answers, prefect_answers)


main.add_command(doctor_command(_server_checks))
main.add_command(restore_power_command)
main.add_command(replay)
main.add_command(cluster_command)
main.add_command(paper_command)
main.add_command(fleet_command)
main.add_command(capriccio_command)
main.add_command(deploy_command)
main.add_command(serve_command)
main.add_command(drift_command)
main.add_command(models_command)
main.add_command(status_command)
main.add_command(explain_command)
main.add_command(report_command)
main.add_command(statement_command)
main.add_command(views_command)
main.add_command(what_if_command)
