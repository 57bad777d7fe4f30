"""`zeus-flows run`: recurrences one after the other in this process, shown as they go."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from zeus_flows.core import policy
from zeus_flows.core.records import Ask, EnergySource, Job, Mode, Observation, decision_seed, jsonable
from zeus_flows.core.savings import savings
from zeus_flows.errors import ConfigError, StoreUnavailable, TargetNeverReached, TrainFunctionFailed, ZeusFlowsError
from zeus_flows.job import JobFile, SimulatedGpu, load_job
from zeus_flows.recurrence import Recurrence
from zeus_flows.reporting.console import RunView, show_decision
from zeus_flows.reporting.links import series_url, ui_command, without_secrets
from zeus_flows.settings import Settings, quiet_libraries, read_settings
from zeus_flows.training.gate import load_gate
from zeus_flows.training.trainer import LocalTrainer, train_traceback

if TYPE_CHECKING:
    from zeus_flows.ledger.mlflow import MlflowLedger


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for."""

    path: Path
    recurrences: int = 1
    simulate: SimulatedGpu | None = None
    seed: int | None = None
    tracking_uri: str | None = None
    as_json: bool = False

    def job_file(self) -> JobFile:
        """Return the job file with the flags applied."""
        return load_job(self.path).overridden(simulate=self.simulate, seed=self.seed)


def run(request: Request) -> int:
    """Run recurrences, each as a Prefect flow run; return the exit code.

    What can be wrong with the request is found before anything heavy is imported or written.
    """
    job_file, settings = request.job_file(), read_settings()
    uri = _tracking_uri(request, job_file, settings)
    trainer = LocalTrainer(job_file, settings)
    load_gate(job_file)
    view = RunView(
        Console(stderr=request.as_json),
        job_file.core(),
        total=request.recurrences,
        energy_source=trainer.energy_source,
    )
    done: list[Recurrence] = []
    with view.live():
        quiet_libraries()
        for _ in range(request.recurrences):
            done.append(_run_flow(request, uri))
            view.recurrence(done[-1])
    observations, experiment_id = _history(job_file, uri, trainer.energy_source)
    saved = savings(job_file.core(), observations)
    if request.as_json:
        document = _document(job_file, uri, trainer.energy_source) | {
            "recurrences": [_recurrence(job_file.core(), recurrence) for recurrence in done],
            "savings": jsonable(saved),
        }
        click.echo(json.dumps(document, indent=2))
    elif experiment_id is None:
        view.say(
            "MLflow does not answer: what these recurrences brought is kept and will be delivered by the next one."
        )
    else:
        at_default = [o for o in observations if o.converged and o.batch_size == job_file.default_batch_size]
        view.summary(saved, default_runs=len(at_default), skipped=sum(recurrence.skipped for recurrence in done))
        view.where_to_look(series_url(uri, experiment_id), ui_command(uri))
    return 0 if all(recurrence.converged for recurrence in done) else TargetNeverReached.exit_code


def _history(job_file: JobFile, uri: str, source: EnergySource) -> tuple[tuple[Observation, ...], str | None]:
    """Return the observations and their experiment; nothing and None where MLflow does not answer."""
    ledger = _ledger(job_file, uri, source)
    try:
        return ledger.observations(), ledger.experiment_id
    except StoreUnavailable:
        return (), None


def dry_run(request: Request) -> int:
    """Show what the next recurrence would do, from the history there is; write nothing."""
    job_file, settings = request.job_file(), read_settings()
    uri = _tracking_uri(request, job_file, settings)
    trainer = LocalTrainer(job_file, settings)
    job = job_file.core()
    observations: tuple[Observation, ...] = ()
    number = 1
    if _exists(uri):
        quiet_libraries()
        ledger = _ledger(job_file, uri, trainer.energy_source)
        observations, number = ledger.observations(), ledger.last_recurrence() + 1
    decision = policy.decide(
        job,
        policy.fold(job, observations),
        Ask(number, 1, decision_seed(job.seed, number, 1), gpu=trainer.gpu, power_limits_w=trainer.power_limits_w),
    )
    if request.as_json:
        document = _document(job_file, uri, trainer.energy_source) | {"decision": jsonable(decision)}
        click.echo(json.dumps(document, indent=2))
    else:
        gated = job_file.gate is not None and job.mode is Mode.FULL and any(o.converged for o in observations)
        show_decision(Console(), job, decision, gpu=trainer.gpu, observations=len(observations), gated=gated)
    return 0


def _run_flow(request: Request, uri: str) -> Recurrence:
    from zeus_flows.orchestration.flow import RecurrenceFailed, recurrence
    from zeus_flows.orchestration.prefect_runs import print_no_errors

    print_no_errors()
    try:
        return recurrence(str(request.path), simulate=request.simulate, seed=request.seed, tracking_uri=uri)
    except RecurrenceFailed as failure:
        return failure.recurrence
    except Exception as error:
        shown = None if isinstance(error, ZeusFlowsError) else train_traceback(error)
        if shown is None:
            raise
        raise TrainFunctionFailed(
            f"the train function failed; the attempt is recorded as failed, and the next recurrence goes on\n{shown}"
        ) from None


def _ledger(job_file: JobFile, uri: str, energy_source: EnergySource) -> MlflowLedger:
    from zeus_flows.ledger.open import open_direct

    return open_direct(job_file.core(), tracking_uri=uri, energy_source=energy_source)


def _tracking_uri(request: Request, job_file: JobFile, settings: Settings) -> str:
    """Return where runs go; flags are flow parameters and parameters are public, so they carry no password."""
    stated = request.tracking_uri
    if stated and without_secrets(stated) != stated:
        raise ConfigError("--tracking-uri holds a password; put it into MLFLOW_TRACKING_URI instead")
    return settings.tracking(stated, job_file.tracking_uri)


def _exists(uri: str) -> bool:
    """Whether there can be a history: asking MLflow would make a missing sqlite file."""
    return not uri.startswith("sqlite:///") or Path(uri.removeprefix("sqlite:///")).exists()


def _document(job_file: JobFile, uri: str, energy_source: EnergySource) -> dict[str, Any]:
    return {
        "job": job_file.name,
        "policy": job_file.policy,
        "seed": job_file.seed,
        "energy_source": energy_source.value,
        "tracking_uri": without_secrets(uri),
    }


def _recurrence(job: Job, done: Recurrence) -> dict[str, Any]:
    return {
        "recurrence": done.number,
        "skipped": done.skipped,
        "gate": jsonable(done.check),
        "converged": done.converged,
        "energy_to_accuracy_j": done.energy_j,
        "time_to_accuracy_s": done.time_s,
        "cost_j": done.cost_j(job),
        "attempts": [
            {"run_id": attempt.id, "decision": jsonable(attempt.decision), "observation": jsonable(observation)}
            for attempt, observation in done.attempts
        ],
    }
