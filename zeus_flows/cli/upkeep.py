"""Commands that look after a job's ledger: janitor, reset, verify, repair, import."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from zeus_flows.errors import ConfigError, StoreUnavailable
from zeus_flows.job_file import JobFile, load_job
from zeus_flows.job_sections.gpu_section import SimulatedGpu
from zeus_flows.ledger.durable import DurableLedger
from zeus_flows.ledger.janitor import Swept, sweep_orphans
from zeus_flows.ledger.mlflow.address import may_exist
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.importing import Columns, import_runs
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.repair import repair
from zeus_flows.ledger.open_ledger import open_direct, open_durable
from zeus_flows.masking import without_secrets
from zeus_flows.reporting.console import reading_bar
from zeus_flows.settings import Settings, quiet_libraries, read_settings

#: Seconds that the janitor may take where nobody waits to train.
JANITOR_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LedgerOf:
    """Which ledger a command is about."""

    path: Path
    simulate: SimulatedGpu | None = None
    tracking_uri: str | None = None

    def open(self) -> tuple[JobFile, MlflowLedger, str, Settings]:
        """Return the job, its ledger, where that is, and the settings."""
        quiet_libraries()
        settings = read_settings()
        job_file = load_job(self.path).overridden(simulate=self.simulate)
        uri = settings.tracking(self.tracking_uri, job_file.tracking_uri)
        ledger = open_direct(
            job_file.core(), tracking_uri=uri, energy_source=job_file.energy_source, comparable=job_file.comparable
        )
        return job_file, ledger, uri, settings

    def open_kept(self) -> tuple[JobFile, MlflowLedger]:
        """Return the job and its ledger; no database is made where there is none.

        Raises:
            ConfigError: there is none.
        """
        job_file = load_job(self.path)
        uri = read_settings().tracking(self.tracking_uri, job_file.tracking_uri)
        if not may_exist(uri):
            raise ConfigError(
                f"{job_file.name} has never run at {without_secrets(uri)}: there is no database\n"
                f"  type `zeus-flows run {self.path}`"
            )
        return self.open()[:2]


def janitor(target: LedgerOf) -> int:
    """Deliver what dead processes left here, close their recurrences, look after models, discard runs nobody names."""
    from zeus_flows.orchestration.ephemeral_server import end_server_with_us
    from zeus_flows.orchestration.prefect_runs import bury_flow_run, flow_run_ended

    end_server_with_us()
    job_file, ledger, uri, settings = target.open()
    with closing(
        open_durable(
            job_file.core(),
            tracking_uri=uri,
            energy_source=job_file.energy_source,
            state_dir=settings.state_dir,
            comparable=job_file.comparable,
        )
    ) as durable:
        swept = durable.sweep(within_s=JANITOR_S, flow_run_ended=flow_run_ended, bury_flow_run=bury_flow_run)
        left = durable.left()
        lines = _look_after_models(job_file, durable, uri, settings)
    for grave in swept.buried:
        click.echo(f"recurrence {grave.recurrence} was closed: {grave.why}")
    for line in lines:
        click.echo(line)
    if left:
        click.echo(f"what {left} attempts brought still waits here to be delivered")
    orphans, unseen = list[str](), [_unseen(swept)] if swept.why else []
    try:
        with ledger.store.within(JANITOR_S):
            orphans = sweep_orphans(ledger, now_s=time.time())
    except StoreUnavailable as error:
        unseen.append(f"runs that nothing refers to could not be looked at: {error}")
    if orphans:
        click.echo(f"{len(orphans)} runs that a killed process had made and nothing refers to were discarded")
    if unseen:
        click.echo("\n".join((*unseen, f"  type `zeus-flows janitor {target.path}` again")), err=True)
        return StoreUnavailable.exit_code
    if not swept.buried and not orphans:
        click.echo("nothing is dead; what another machine holds is dead after five minutes without a heartbeat")
    return 0


def _look_after_models(job_file: JobFile, ledger: DurableLedger, uri: str, settings: Settings) -> Sequence[str]:
    """Make a pass over a job's models; return what happened, as sentences."""
    from zeus_flows.training.promotion import open_promoter

    try:
        promoter = open_promoter(job_file, job_file.core(), ledger, tracking_uri=uri, state_dir=settings.state_dir)
        if promoter is None:
            return ()
        promoter.check_owner()
    except ConfigError as error:  # the code that evaluates models may not be on this machine
        return (f"models were not looked at: {error}",)
    return promoter.make_pass().lines


def _unseen(swept: Swept) -> str:
    """Return what a sweep that broke off did not come to, as a sentence."""
    if not swept.unseen:
        return f"no recurrence could be looked at: {swept.why}"
    numbers = ", ".join(map(str, swept.unseen[:20])) + (", ..." if len(swept.unseen) > 20 else "")
    return f"{len(swept.unseen)} recurrences could not be looked at ({numbers}): {swept.why}"


def reset(target: LedgerOf, *, sure: bool) -> int:
    """Start a new drift window in which nothing observed before counts, where that is really wanted."""
    if not sure:
        name = load_job(target.path).name
        if not sys.stdin.isatty():
            raise ConfigError(
                f"what {name} has learnt would no longer count, and there is no terminal to ask at\n"
                f"  type `zeus-flows reset {target.path} --yes`"
            )
        click.confirm(f"What {name} has learnt will no longer count. Begin anew?", abort=True)
    job_file, ledger = target.open_kept()
    number = ledger.reset()
    click.echo(f"{job_file.name}: drift window {number} begins; what was observed before no longer counts")
    return 0


def verify(target: LedgerOf) -> int:
    """Fold every run anew and compare with the state that decisions are taken on; exit 5 where they differ."""
    job_file, ledger = target.open_kept()
    with reading_bar() as told:
        same, observations = ledger.verify(told)
    if same:
        click.echo(f"{job_file.name}: the state is the fold of all {observations} observations")
        return 0
    click.echo(
        f"{job_file.name}: the snapshot differs from the fold of all {observations} observations, as where runs were "
        f"deleted or changed by hand\n  type `zeus-flows ledger repair {target.path}`",
        err=True,
    )
    return 5


def mend(target: LedgerOf) -> int:
    """Bring back or rebuild what holds a job's ledger together, drop its snapshots and fold the history anew."""
    job_file, ledger = target.open_kept()
    repaired = repair(ledger.store, job_file.name)
    for line in repaired.done or ["nothing that holds the ledger together was missing"]:
        click.echo(line)
    for line in repaired.lost:
        click.echo(f"cannot be rebuilt: {line}")
    ledger.history()
    with reading_bar() as told:
        _, observations = ledger.verify(told)
    click.echo(f"{job_file.name}: the history is folded anew; {observations} observations count")
    return 0


def traces(target: LedgerOf, folder: Path) -> int:
    """Write a job's runs in the published trace format; say how to replay them."""
    from zeus_flows.experiments.replay.written_traces import TraceLabels, write_traces

    job_file, ledger = target.open_kept()
    rates = {b: job_file.learning_rate.at(b, job_file.default_batch_size) for b in job_file.batch_sizes}
    labels = TraceLabels(job_file.name, "model", job_file.optimizer, job_file.target.value, rates)
    with reading_bar() as told:
        observations = ledger.observations(told)
    for file in write_traces(observations, folder, labels):
        click.echo(f"wrote {file}")
    return 0


def bring(
    target: LedgerOf,
    *,
    experiment: str,
    columns: Columns,
    samples_per_epoch: int,
    max_power_w: float | None,
    gpu: str | None,
) -> int:
    """Turn existing MLflow runs into observations of a job."""
    from zeus_flows.core.power_profile import Gpu
    from zeus_flows.training.trainer import LocalTrainer

    job_file, ledger, uri, settings = target.open()
    if (gpu is None) != (max_power_w is None):
        raise ConfigError("--gpu and --max-power go together: the model's name and its greatest power limit in watts")
    if gpu is not None and max_power_w is not None:
        trained_on = Gpu(gpu, 1, max_power_w)
    else:
        trained_on = LocalTrainer(job_file, settings).gpu
    done = import_runs(
        job_file.core(),
        ledger,
        Store(uri, patience_s=10.0),
        experiment=experiment,
        columns=columns,
        target=job_file.target,
        gpu=trained_on,
        energy_source=job_file.energy_source,
        samples_per_epoch=samples_per_epoch,
    )
    click.echo(f"{job_file.name}: {done.imported} runs imported from {experiment}, {done.known_before} known before")
    for run_id, why in done.left_out.items():
        click.echo(f"  left out {run_id}: {why}")
    return 0
