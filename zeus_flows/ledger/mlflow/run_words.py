"""What an attempt's run says to people: its name, its tags, its params. Decisions are never taken on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME

from zeus_flows.core import policy
from zeus_flows.core.drift_windows import beliefs, best_arm
from zeus_flows.core.job import Job
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.core.records import Decision, Observation, in_parts
from zeus_flows.core.text import setting_text
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow import record_text as codec
from zeus_flows.ledger.mlflow.names import RunKind

#: What takes the place of an attempt's lease once it has its outcome.
ENDED: Final = "ended"
#: What a context may hold that an attempt's run has as a param.
_PARAMS: Final = frozenset({names.LEARNING_RATE})


def run_name(record: Decision | Observation, setting: float | None) -> str:
    """Return what an attempt's run is called: MLflow's table shows about 25 characters.

    Such as `#42 · 512 · 150 W`; `#42.2 · 64` where it is a second attempt and no limit is known yet. Whether its joules
    are simulated is in its tags.
    """
    number = f"#{record.recurrence}" + (f".{record.attempt}" if record.attempt > 1 else "")
    return " · ".join(filter(None, (number, in_parts(record), setting_text(setting, record.knob))))


def decision_tags(
    job: Job, decision: Decision, window: Mapping[str, str], context: Mapping[str, str]
) -> dict[str, str]:
    """Return the tags of an attempt's run as it begins.

    Args:
        job: Whose attempt.
        decision: What was decided.
        window: The tags that name its drift window and what it is comparable with.
        context: What else is known of it, by tag.
    """
    return {
        names.KIND: RunKind.ATTEMPT,
        names.RECURRENCE: str(decision.recurrence),
        names.ATTEMPT: str(decision.attempt),
        **window,
        names.POLICY: decision.policy,
        names.MODE: (decision.mode or job.mode).value,
        names.REASON: decision.reason.text,
        **dict.fromkeys(_true(decision), "true"),
        **{name: value for name, value in _said(context).items() if name not in _PARAMS},
    }


def decision_params(decision: Decision, context: Mapping[str, str], text: str) -> dict[str, str]:
    """Return the params of an attempt's run: its decision as text, and what people compare runs by."""
    params = {names.BATCH_SIZE: str(decision.batch_size), names.SEED: str(decision.seed), names.DECISION: text}
    if decision.micro_batch_size is not None:
        params[names.MICRO_BATCH_SIZE] = str(decision.micro_batch_size)
    return params | {name: value for name, value in _said(context).items() if name in _PARAMS}


def outcome_tags(observation: Observation) -> dict[str, str]:
    """Return the tags that an attempt's run gets with its outcome; they rename it."""
    tags = {names.OUTCOME: observation.outcome.value, names.DETAIL: codec.fits_tag(observation.detail)}
    tags[MLFLOW_RUN_NAME] = run_name(observation, observation.setting)
    tags[names.LEASE] = ENDED
    if observation.foreign_limit_w is not None:
        tags[names.FOREIGN_LIMIT_W] = f"{observation.foreign_limit_w:g}"
    return tags


def belief_tags(job: Job, state: policy.State) -> dict[str, str]:
    """Return what a drift window's run says is believed of every arm, and which one is thought cheapest."""
    arms = beliefs(job, state)
    return {names.BELIEFS: codec.dump_arms(arms), names.BEST_BATCH_SIZE: str(best_arm(arms) or "")}


def _true(decision: Decision) -> list[str]:
    """Return the tags that say what is so; what is not so has none."""
    late = decision.reason.kind is ReasonKind.LATE
    so = {names.EXPLORES: decision.explores, names.DEGRADED: decision.degraded, names.LATE: late}
    return [name for name, is_so in so.items() if is_so]


def _said(context: Mapping[str, str]) -> dict[str, str]:
    """Return those words of a context that say something."""
    return {name: value for name, value in context.items() if value}
