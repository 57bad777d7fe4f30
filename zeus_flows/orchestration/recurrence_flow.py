"""The flow that a schedule runs: one recurrence of a job."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from prefect import flow, get_run_logger, runtime
from prefect.states import Completed

from zeus_flows.core.job import Mode
from zeus_flows.core.rollout import in_force, lowered, why_in_force
from zeus_flows.errors import TargetNeverReached
from zeus_flows.job_file import JobFile, load_job
from zeus_flows.job_sections.gpu_section import SimulatedGpu
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.open_ledger import open_durable
from zeus_flows.masking import mask_logs
from zeus_flows.orchestration.blocks import shared_settings
from zeus_flows.orchestration.events import Happening, tell, tell_models
from zeus_flows.orchestration.fleet import in_fleet
from zeus_flows.orchestration.prefect_runs import bury_flow_run, flow_run_ended, page_of
from zeus_flows.orchestration.run_pictures import show_figures
from zeus_flows.orchestration.steps import PrefectSteps, artifact_key, show_models
from zeus_flows.recurrence.loop import Recurrence, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.reporting.links import run_url
from zeus_flows.reporting.text import seconds
from zeus_flows.settings import public_uri
from zeus_flows.training.gate import load_gate
from zeus_flows.training.promotion import Promoter, open_promoter
from zeus_flows.training.trainer import LocalTrainer


@flow(name="recurrence", validate_parameters=True)
def recurrence(
    job_file: str,
    simulate: SimulatedGpu | None = None,
    seed: int | None = None,
    tracking_uri: str | None = None,
    mode: Mode | None = None,
) -> Recurrence:
    """Run one recurrence of a job: decide a batch size, train, observe. One that the drift gate skips is `Skipped`.

    Args:
        job_file: Path of the job file on the machine that runs the flow.
        simulate: Run on a simulated GPU, whatever the job file says.
        seed: The job's seed, whatever the job file says.
        tracking_uri: Where MLflow runs go, whatever the job file says.
        mode: Change less than the job file allows; one that would change more changes nothing.

    Raises:
        RecurrenceFailed: no attempt converged; the flow run fails, so that a schedule's owner hears of it.
    """
    stated = load_job(Path(job_file)).overridden(simulate=simulate, seed=seed)
    return ended(run_one(stated, tracking_uri=tracking_uri, mode=mode))


def ended(done: Recurrence) -> Recurrence:
    """Return what a flow returns for a recurrence; one that the drift gate skipped is a state of that name.

    Raises:
        RecurrenceFailed: no attempt converged.
    """
    if not done.converged:
        raise RecurrenceFailed(done)
    if done.skipped and done.check is not None:  # Prefect keeps the state, and gives the caller what it holds
        return cast(Recurrence, Completed(name="Skipped", message=done.check.text, data=done))
    return done


class RecurrenceFailed(TargetNeverReached):
    """Carries the recurrence in which no attempt converged."""

    def __init__(self, recurrence: Recurrence) -> None:
        tried = ", ".join(str(attempt.decision.batch_size) for attempt, _ in recurrence.attempts)
        super().__init__(f"recurrence {recurrence.number}: the target was not reached with batch size {tried}")
        self.recurrence = recurrence


def run_one(job_file: JobFile, *, tracking_uri: str | None = None, mode: Mode | None = None) -> Recurrence:
    """Run one recurrence inside a flow run."""
    settings = shared_settings()
    uri = settings.tracking(public_uri(tracking_uri, "the parameter tracking_uri"), job_file.tracking_uri)
    mask_logs()
    trainer = LocalTrainer(job_file, settings, tracking_uri=uri)
    gate = load_gate(job_file, measure=trainer.measure, tracking_uri=uri)
    job = lowered(in_fleet(job_file.core(trainer.energy_source)), mode, "the parameter mode")
    due = None if job.ready_by is None else job.ready_by.due(runtime.flow_run.scheduled_start_time)
    flow_run_id = str(runtime.flow_run.id)
    context = {
        names.PREFECT_FLOW_RUN_ID: flow_run_id,
        names.PREFECT_FLOW_RUN_NAME: str(runtime.flow_run.name),
        names.PREFECT_URL: page_of(runtime.flow_run.ui_url),
        names.CODE_REVISION: trainer.code_revision,
        names.UNTUNABLE: trainer.untunable,
    }
    with closing(
        open_durable(
            job,
            tracking_uri=uri,
            energy_source=trainer.energy_source,
            state_dir=settings.state_dir,
            flow_run_id=flow_run_id,
            comparable=job_file.comparable,
        )
    ) as ledger:
        ledger.sweep(flow_run_ended=flow_run_ended, bury_flow_run=bury_flow_run)

        def models() -> Promoter | None:
            return open_promoter(
                job_file,
                job,
                ledger,
                tracking_uri=uri,
                state_dir=settings.state_dir,
                measure=trainer.measure,
            )

        before = models()
        if before is not None:
            before.check_owner()
            before.make_pass()
        local = LocalSteps(
            job,
            ledger,
            trainer,
            context,
            gate,
            learning_rate=lambda b: job_file.learning_rate.at(b, job_file.default_batch_size),
            seconds_left=None if due is None else lambda: _seconds_until(due),
            champion=lambda: None if before is None else before.champion(),
        )
        steps = PrefectSteps(local, run_url=run_url(uri, ledger.experiment_id), retries=job_file.train.retries)
        done = run_recurrence(local.job, steps)
        if job_file.figures:
            show_figures(in_force(job, done.number), ledger, local, done, key=artifact_key(job.name))
        after = models()
        if after is not None and not done.skipped:
            tell_models(job, show_models(after, done, job.name), done.number)
    if due is not None and not done.skipped and (left_s := _seconds_until(due)) < 0:
        text = f"recurrence {done.number} ended {seconds(-left_s)} after {job.ready_by}, by which it had to be ready"
        get_run_logger().warning("late: %s", text)
        tell(job, Happening.LATE, recurrence=done.number, text=text, seconds_left=left_s)
    if not done.converged:
        tell(job, Happening.FAILED, recurrence=done.number, text=str(RecurrenceFailed(done)))
    ran = in_force(job, done.number)
    get_run_logger().info("recurrence %d: the mode was %s, %s", done.number, ran.mode, why_in_force(ran))
    for attempt, observation in done.attempts:
        get_run_logger().info(
            "recurrence %d.%d: batch size %d (%s) -> %s",
            done.number,
            observation.attempt,
            observation.batch_size,
            attempt.decision.reason.text,
            observation.detail,
        )
    return done


def _seconds_until(due: datetime) -> float:
    return (due - datetime.now(UTC)).total_seconds()
