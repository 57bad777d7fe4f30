"""Commands that look after a job's ledger: janitor, reset, verify, import."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import click

from zeus_flows.errors import ConfigError
from zeus_flows.job_file import JobFile, SimulatedGpu, load_job
from zeus_flows.ledger.janitor import sweep_orphans
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.importing import Columns, import_runs
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct, open_durable
from zeus_flows.settings import Settings, quiet_libraries, read_settings


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


def janitor(target: LedgerOf) -> int:
    """Deliver what dead processes left in the outbox, close their recurrences, and discard runs nobody refers to."""
    from zeus_flows.orchestration.prefect_runs import bury_flow_run, flow_run_ended

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
        buried = durable.sweep(flow_run_ended=flow_run_ended, bury_flow_run=bury_flow_run)
    orphans = sweep_orphans(ledger, now_s=time.time())
    for grave in buried:
        click.echo(f"recurrence {grave.recurrence} was closed: {grave.why}")
    if orphans:
        click.echo(f"{len(orphans)} runs that a killed process had made and nothing refers to were discarded")
    if not buried and not orphans:
        click.echo("nothing is dead; what another machine holds is dead after five minutes without a heartbeat")
    return 0


def reset(target: LedgerOf) -> int:
    """Start a new drift window in which nothing observed before counts."""
    job_file, ledger, _, _ = target.open()
    number = ledger.reset()
    click.echo(f"{job_file.name}: drift window {number} begins; what was observed before no longer counts")
    return 0


def verify(target: LedgerOf) -> int:
    """Fold every run anew and compare with the state that decisions are taken on; exit 5 where they differ."""
    job_file, ledger, _, _ = target.open()
    same, observations = ledger.verify()
    if same:
        click.echo(f"{job_file.name}: the state is the fold of all {observations} observations")
        return 0
    click.echo(
        f"{job_file.name}: the snapshot differs from the fold of all {observations} observations; "
        f"delete the tag {names.SNAPSHOT} of the newest drift window's run, and the next recurrence folds anew",
        err=True,
    )
    return 5


def traces(target: LedgerOf, folder: Path) -> int:
    """Write a job's runs in the published trace format; say how to replay them."""
    from zeus_flows.experiments.replay.written_traces import TraceLabels, write_traces

    job_file, ledger, _, _ = target.open()
    rates = {b: job_file.learning_rate.at(b, job_file.default_batch_size) for b in job_file.batch_sizes}
    labels = TraceLabels(job_file.name, "model", job_file.optimizer, job_file.target.value, rates)
    for file in write_traces(ledger.observations(), folder, labels):
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
