"""`zeus-flows run`: recurrences one after the other in this process, shown as they go."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from zeus_flows.cli.documents import print_document
from zeus_flows.core import policy, savings
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.json import jsonable
from zeus_flows.core.records import Ask, EnergySource, decision_seed
from zeus_flows.core.rollout import in_force, lowered, why_in_force
from zeus_flows.errors import StoreError, StoreUnavailable, TargetNeverReached, TrainFunctionFailed, ZeusFlowsError
from zeus_flows.job_file import JobFile, load_job
from zeus_flows.job_sections.gpu_section import SimulatedGpu
from zeus_flows.masking import without_secrets
from zeus_flows.recurrence.loop import Recurrence
from zeus_flows.reporting.console import RunView, show_decision
from zeus_flows.reporting.links import ui_command, view_url
from zeus_flows.settings import Settings, public_uri, quiet_libraries, read_settings
from zeus_flows.training.evaluation import load_evaluation
from zeus_flows.training.gate import load_gate
from zeus_flows.training.trainer import LocalTrainer, train_traceback

if TYPE_CHECKING:
    from zeus_flows.ledger.mlflow.ledger import MlflowLedger


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for."""

    path: Path
    recurrences: int = 1
    simulate: SimulatedGpu | None = None
    seed: int | None = None
    tracking_uri: str | None = None
    mode: Mode | None = None
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
    load_evaluation(job_file)
    source, done = trainer.energy_source, list[Recurrence]()
    job = job_file.core(source)
    console = Console(stderr=request.as_json)
    view = RunView(console, job, total=request.recurrences, energy_source=source, knob=trainer.gpu.knob)
    with view.live():
        quiet_libraries()
        _warm_up(uri)
        for _ in range(request.recurrences):
            done.append(_run_flow(request))
            view.recurrence(done[-1])
        job = in_force(_in_fleet(request, job), done[-1].number)
        saved, url = _saved(job_file, job, uri, source, done[-1])
    if request.as_json:
        told = None if saved is None else savings.document(saved)
        recurrences = _told(job, [_recurrence(job, recurrence) for recurrence in done])
        print_document(_document(job_file, uri, source) | {"recurrences": recurrences, "savings": told})
    elif url is None:
        view.say(
            "MLflow does not answer: what these recurrences brought is kept and will be delivered by the next one."
        )
    else:
        view.summary(saved)
        if job_file.model is not None:
            view.say(_champion(job_file, uri))
        view.where_to_look(url, ui_command(uri))
    return 0 if all(recurrence.converged for recurrence in done) else TargetNeverReached.exit_code


def _warm_up(uri: str) -> None:
    """Start Prefect's server, where none is configured, and load what is heavy meanwhile: MLflow, scipy, the flow."""
    from zeus_flows.orchestration.ephemeral_server import start_server

    wait_for_server = start_server()
    import_module("zeus_flows.orchestration.recurrence_flow")
    import_module("zeus_flows.ledger.open_ledger")
    if not uri.startswith("http"):
        import_module("mlflow.store.tracking.sqlalchemy_store")
    wait_for_server()


def _saved(
    job_file: JobFile, job: Job, uri: str, source: EnergySource, done: Recurrence
) -> tuple[savings.Savings | None, str | None]:
    """Return what was saved so far and where to look at it; None and None where MLflow does not answer.

    The job's description is brought up to date, for whoever looks.
    """
    ledger = _ledger(job_file, job, uri, source)
    try:
        saved, experiment_id = policy.saved(job, ledger.state()), ledger.experiment_id
        with suppress(StoreError):
            ledger.page.describe(done.number, saved, done.attempts[-1][1] if done.attempts else None)
        return saved, view_url(uri, experiment_id, ledger.page.installed())
    except StoreUnavailable:
        return None, None


def _champion(job_file: JobFile, uri: str) -> str:
    """Return who is champion, and why."""
    from zeus_flows.reporting.models_report import read_models

    try:
        return f"{read_models(job_file, uri).why}."
    except StoreError as error:
        return f"The models could not be looked at: {error}"


def dry_run(request: Request) -> int:
    """Show what the next recurrence would do, from the history there is; write nothing."""
    job_file, settings = request.job_file(), read_settings()
    uri = _tracking_uri(request, job_file, settings)
    trainer = LocalTrainer(job_file, settings)
    quiet_libraries()
    _warm_up(uri)
    job = _in_fleet(request, job_file.core(trainer.energy_source))
    state, number, set_aside = policy.initial(job), 1, None
    if _exists(uri):
        ledger = _ledger(job_file, job, uri, trainer.energy_source)
        state, number, set_aside = (
            ledger.state(),
            ledger.last_recurrence(looked=True) + 1,
            ledger.would_set_aside(looked=True),
        )
    decision = policy.decide(
        job,
        state,
        Ask(
            number,
            1,
            decision_seed(job.seed, number, 1),
            gpu=trainer.gpu,
            power_limits_w=trainer.power_limits_w,
            seconds_left=_seconds_left(job),
        ),
    )
    job = in_force(job, number)
    if request.as_json:
        document = _document(job_file, uri, trainer.energy_source) | {"mode": job.mode, "mode_why": why_in_force(job)}
        document |= {"decision": _told(job, jsonable(decision)), "set_aside": set_aside}
        print_document(document)
    else:
        gated = job_file.gate is not None and job.mode is Mode.FULL and state.newest_model is not None
        console = Console()
        show_decision(console, job, decision, gpu=trainer.gpu, observations=state.observations, gated=gated)
        if set_aside:
            console.print(set_aside)
    return 0


def _seconds_left(job: Job) -> float | None:
    """Return how long a recurrence that began now would have until its model must be ready."""
    now = datetime.now(UTC)
    return None if job.ready_by is None else (job.ready_by.due(now) - now).total_seconds()


def _told(job: Job, document: Any) -> Any:
    """Return a document as it may be shown: without joules where they mean nothing."""
    return savings.without_joules(document) if job.in_seconds else document


def _run_flow(request: Request) -> Recurrence:
    """Run the flow. It finds by itself what the job file and the environment say: its parameters are public."""
    from zeus_flows.orchestration.ephemeral_server import end_server_with_us
    from zeus_flows.orchestration.prefect_runs import named_outages, print_no_errors
    from zeus_flows.orchestration.recurrence_flow import RecurrenceFailed, recurrence

    print_no_errors()
    end_server_with_us()
    try:
        return recurrence(
            str(request.path),
            simulate=request.simulate,
            seed=request.seed,
            tracking_uri=request.tracking_uri,
            mode=request.mode,
        )
    except RecurrenceFailed as failure:
        return failure.recurrence
    except Exception as error:
        shown = None if isinstance(error, ZeusFlowsError) else train_traceback(error)
        if shown is None:
            with named_outages():
                raise
        raise TrainFunctionFailed(
            f"the train function failed; the attempt is recorded as failed, and the next recurrence goes on\n{shown}"
        ) from None


def _in_fleet(request: Request, job: Job) -> Job:
    """Return the job in the mode that fleet and flag leave it, as its recurrences would run it."""
    from zeus_flows.orchestration.ephemeral_server import end_server_with_us
    from zeus_flows.orchestration.fleet import in_fleet
    from zeus_flows.orchestration.prefect_runs import named_outages

    end_server_with_us()
    with named_outages():
        return lowered(in_fleet(job), request.mode, "the parameter mode")


def _ledger(job_file: JobFile, job: Job, uri: str, energy_source: EnergySource) -> MlflowLedger:
    from zeus_flows.ledger.open_ledger import open_direct

    return open_direct(job, tracking_uri=uri, energy_source=energy_source, comparable=job_file.comparable)


def _tracking_uri(request: Request, job_file: JobFile, settings: Settings) -> str:
    """Return where runs go; flags are flow parameters and parameters are public, so they carry no password."""
    return settings.tracking(public_uri(request.tracking_uri, "--tracking-uri"), job_file.tracking_uri)


def _exists(uri: str) -> bool:
    from zeus_flows.ledger.mlflow.address import may_exist

    return may_exist(uri)


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
