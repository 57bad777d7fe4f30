"""What happens to jobs, as Prefect events: automations react to them (`deployments/automations/`).

Each is about the resource `zeus-flows.job.<name>`; Prefect adds the flow run by itself. An event that cannot be sent is
Prefect's to log: no training waits for one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from prefect.events import emit_event

from zeus_flows.core.job import Job
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.core.records import Decision, Observation, Outcome
from zeus_flows.training.promotion import Promoted


class Happening(StrEnum):
    """What happened: the event's name."""

    DECIDED = "zeus-flows.decided"  # a batch size was chosen
    STOPPED_EARLY = "zeus-flows.stopped-early"  # an attempt would not have paid
    DRIFTED = "zeus-flows.drifted"  # what was learnt of epochs is forgotten
    DEGRADED = "zeus-flows.degraded"  # MLflow was away: the default runs
    LATE = "zeus-flows.late"  # the model will not, or may not, be ready in time; or was not
    BUDGET_SPENT = "zeus-flows.budget-spent"  # an exploration waits until enough is saved
    FAILED = "zeus-flows.failed"  # no attempt reached the target
    PROMOTED = "zeus-flows.promoted"  # another model is champion
    NOT_PROMOTED = "zeus-flows.not-promoted"  # a model was refused: it would replace a better one


def tell(job: Job, what: Happening, *, recurrence: int, text: str, **numbers: Any) -> None:
    """Send an event about a job: what happened, in which recurrence, as a sentence, with numbers."""
    emit_event(
        event=str(what),
        resource=resource_of(job.name),
        payload={"job": job.name, "recurrence": recurrence, "text": text, **numbers},
    )


def resource_of(job: str) -> dict[str, str]:
    """Return what events about a job are about.

    >>> resource_of("nightly")
    {'prefect.resource.id': 'zeus-flows.job.nightly', 'prefect.resource.name': 'nightly'}
    """
    return {"prefect.resource.id": f"zeus-flows.job.{job}", "prefect.resource.name": job}


def tell_decision(job: Job, decision: Decision) -> None:
    """Tell that a decision was taken, and what it means that somebody should know of."""
    kind = decision.reason.kind
    about: dict[str, Any] = {
        "recurrence": decision.recurrence,
        "text": decision.reason.text,
        "attempt": decision.attempt,
        "batch_size": decision.batch_size,
        "mode": str(decision.mode or job.mode),
    }
    tell(job, Happening.DECIDED, **about, explores=decision.explores, why=str(kind))
    if decision.degraded:
        tell(job, Happening.DEGRADED, **about)
    if kind is ReasonKind.LATE:
        tell(job, Happening.LATE, **about, seconds_left=decision.asked.seconds_left if decision.asked else None)
    if kind is ReasonKind.HELD_BACK and job.exploration_budget is not None:
        tell(job, Happening.BUDGET_SPENT, **about)


def tell_models(job: Job, promoted: Promoted, recurrence: int) -> None:
    """Tell of a model that was made champion, and of those that were refused."""
    for text in promoted.refused:
        tell(job, Happening.NOT_PROMOTED, recurrence=recurrence, text=text)
    if promoted.moved and promoted.champion is not None:
        text = f"version {promoted.champion.number} is champion"
        tell(job, Happening.PROMOTED, recurrence=recurrence, text=text, version=promoted.champion.number)


def tell_observation(job: Job, observation: Observation) -> None:
    """Tell of an attempt that was stopped early."""
    if observation.outcome is Outcome.STOPPED:
        tell(
            job,
            Happening.STOPPED_EARLY,
            recurrence=observation.recurrence,
            text=observation.detail,
            attempt=observation.attempt,
            batch_size=observation.batch_size,
            epochs=observation.epochs,
        )
