"""The steps of a recurrence as Prefect tasks, with artifacts for whoever looks at the flow run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final, Generic, TypeVar

from prefect import get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from zeus_flows.core.attempt import AttemptFailed
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.job import Job
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.core.records import Decision, Observation
from zeus_flows.errors import StoreUnavailable
from zeus_flows.ledger.mlflow import names
from zeus_flows.orchestration.events import Happening, tell, tell_decision, tell_observation
from zeus_flows.orchestration.prefect_runs import rename_flow_run
from zeus_flows.recurrence.loop import Attempt, Recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.reporting.text import cost_text, describe_arm
from zeus_flows.training.forms.child import output_log
from zeus_flows.training.promotion import Promoted, Promoter

T = TypeVar("T")


class _Opaque(Generic[T]):
    """Holds what goes into a task or comes out of it, which Prefect would else walk through, field by field.

    It looks for futures in there, several times for each task. A record of a wide search space has thousands of fields.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value


async def _store_was_away(_task: Task[..., object], _run: TaskRun, state: State[object]) -> bool:
    """Retry a task only where that is safe: MLflow did not answer."""
    return isinstance(await state.aresult(raise_on_failure=False), StoreUnavailable)


@task(name="gate", cache_policy=NO_CACHE)
def _gate(steps: LocalSteps, recurrence: int) -> GateCheck | None:
    check = steps.gate(recurrence)
    if check is not None:
        get_run_logger().info("gate: %s", check.text)
    return check


#: Seconds after which a task that only talks to MLflow is given up: its calls are bounded, so this is never reached.
BACKSTOP_S: Final = 600.0


@task(
    name="decide",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=_store_was_away,
    timeout_seconds=BACKSTOP_S,
)
def _decide(steps: LocalSteps, recurrence: int, earlier: _Opaque[tuple[Observation, ...]]) -> _Opaque[Attempt]:
    return _Opaque(steps.decide(recurrence, earlier.value))


async def _can_go_on(_task: Task[..., object], _run: TaskRun, state: State[object]) -> bool:
    """Retry a training only where it goes on from a checkpoint: from the start it would break again."""
    failure = await state.aresult(raise_on_failure=False)
    return isinstance(failure, AttemptFailed) and failure.resumable


@task(name="train", cache_policy=NO_CACHE, retry_condition_fn=_can_go_on)
def _train(steps: LocalSteps, attempt: _Opaque[Attempt]) -> _Opaque[Observation]:
    with _shown_in_prefect(output_log):
        observation = steps.try_once(attempt.value)
    get_run_logger().info("batch size %d %s: %s", observation.batch_size, observation.outcome, observation.detail)
    return _Opaque(observation)


@cache
def _training(retries: int) -> Task[[LocalSteps, _Opaque[Attempt]], _Opaque[Observation]]:
    """Return the task `train` with so many retries. Made once: Prefect reads a task's source when it makes it."""
    return _train.with_options(retries=retries, retry_delay_seconds=1)


@task(
    name="observe",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=10,
    retry_condition_fn=_store_was_away,
    timeout_seconds=BACKSTOP_S,
)
def _observe(steps: LocalSteps, done: _Opaque[tuple[Attempt, Observation]]) -> None:
    steps.observe(*done.value)


@task(name="models", cache_policy=NO_CACHE)
def _models(promoter: Promoter) -> Promoted:
    promoted = promoter.make_pass()
    for line in promoted.lines:
        get_run_logger().info("model: %s", line)
    return promoted


def show_models(promoter: Promoter, done: Recurrence, job: str) -> Promoted:
    """Look after a job's models in a task, after a recurrence; show what came of it."""
    promoted = _models(promoter)
    lines = promoted.lines
    if not done.converged:
        stays = f"; version {promoted.champion.number} stays champion" if promoted.champion is not None else ""
        lines = (f"no attempt reached the target, so no model is kept{stays}", *lines)
        get_run_logger().info("model: %s", lines[0])
    if lines:
        markdown = "\n".join(f"- {line}" for line in lines)
        create_markdown_artifact(key=f"{artifact_key(job)}-models", markdown=markdown, description="Models")
    return promoted


def artifact_key(job: str) -> str:
    """Return a job's name as Prefect's artifacts take it."""
    return re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")


@contextmanager
def _shown_in_prefect(log: logging.Logger) -> Iterator[None]:
    """Let what a training command prints be lines of the task run's log."""
    target = get_run_logger()

    class ToPrefect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            target.info("%s", record.getMessage())

    handler, level, up = ToPrefect(), log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = up


class PrefectSteps:
    """`LocalSteps`, each long one in a task of its own.

    Args:
        local: What does the work.
        run_url: Makes the MLflow UI's address of an attempt's run from its id.
        retries: How often a training that broke goes on from its last checkpoint.
    """

    def __init__(self, local: LocalSteps, *, run_url: str, retries: int = 0) -> None:
        self._local, self._run_url = local, run_url
        self._train = _training(retries)
        self._key = artifact_key(local.job.name)

    def begin(self) -> int:
        """Take the next recurrence number, and name the flow run after it."""
        number = self._local.begin()
        name = f"{self._local.job.name} #{number}"
        if rename_flow_run(name):
            self._local.note({names.PREFECT_FLOW_RUN_NAME: name})
        return number

    def gate(self, recurrence: int) -> GateCheck | None:
        """Ask the drift gate in a task, where the job has one; show what it found."""
        if not self._local.has_gate:
            return None
        check = _gate(self._local, recurrence)
        if check is not None:
            markdown = f"**{check.verdict}**: {check.text}"
            create_markdown_artifact(key=f"{self._key}-gate", markdown=markdown, description="Drift gate")
        return check

    def decide(self, recurrence: int, earlier: tuple[Observation, ...]) -> Attempt:
        """Decide in a task; show the beliefs behind the decision as a table."""
        attempt = _decide(self._local, recurrence, _Opaque(earlier)).value
        if attempt.decision.reason.kind is ReasonKind.LATE:
            get_run_logger().warning("late: %s", attempt.decision.reason.text)
        tell_decision(self._local.job, attempt.decision)
        create_table_artifact(
            key=f"{self._key}-decision",
            table=decision_table(self._local.job, attempt.decision),
            description=attempt.decision.reason.text,
        )
        create_link_artifact(
            key=f"{self._key}-mlflow-run",
            link=self._run_url.format(run_id=attempt.id),
            link_text=f"Recurrence {recurrence}.{attempt.decision.attempt} of {self._local.job.name} in MLflow",
        )
        return attempt

    def train(self, attempt: Attempt) -> Observation:
        """Train in a task; one that broke is tried again from its checkpoint, then observed as failed."""
        try:
            return self._train(self._local, _Opaque(attempt)).value
        except AttemptFailed as failure:
            text = failure.observation.detail
            tell(self._local.job, Happening.FAILED, recurrence=attempt.decision.recurrence, text=text)
            self._local.failed(attempt, failure)

    def observe(self, attempt: Attempt, observation: Observation) -> None:
        """Write the outcome in a task."""
        _observe(self._local, _Opaque((attempt, observation)))
        tell_observation(self._local.job, observation)

    def end(self, recurrence: int, observations: tuple[Observation, ...]) -> None:
        """Write the recurrence's end and its point of the series; tell of drift that it shows."""
        self._local.end(recurrence, observations)
        if (found := self._local.drift(observations)) is not None:
            tell(self._local.job, Happening.DRIFTED, recurrence=recurrence, text=found.text)


def decision_table(job: Job, decision: Decision) -> list[dict[str, str]]:
    """Return the beliefs behind a decision, a row per arm, the chosen one marked."""
    return [
        {
            "batch size": f"{arm.batch_size} ←" if arm.batch_size == decision.batch_size else str(arm.batch_size),
            "what is known": describe_arm(arm),
            "expected cost": "" if arm.expected_cost_j is None else cost_text(job, arm.expected_cost_j),
            "drawn": "" if arm.sampled_cost_j is None else cost_text(job, arm.sampled_cost_j),
        }
        for arm in decision.reason.arms
    ] or [{"batch size": f"{decision.batch_size} ←", "what is known": decision.reason.text}]
