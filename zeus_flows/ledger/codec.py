"""Records <-> JSON text, checked against MLflow's limits. No pickle."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from zeus_flows.core.records import Decision, Observation
from zeus_flows.errors import StoreError

T = TypeVar("T")

MAX_PARAM: Final = 6_000
MAX_TAG: Final = 5_000

_DECISION: Final = TypeAdapter(Decision)
_OBSERVATION: Final = TypeAdapter(Observation)


def dump_decision(decision: Decision) -> str:
    """Return a decision as JSON that fits a param; the per-arm table is shortened where it must be."""
    text = _DECISION.dump_json(decision).decode()
    while len(text) > MAX_PARAM and decision.reason.arms:
        kept = decision.reason.arms[: len(decision.reason.arms) // 2]
        decision = replace(decision, reason=replace(decision.reason, arms=kept))
        text = _DECISION.dump_json(decision).decode()
    return fits_param("zf.decision", text)


def load_decision(text: str) -> Decision:
    """Return the decision that `dump_decision` wrote."""
    return _load(_DECISION, "decision", text)


def dump_observation(observation: Observation) -> str:
    """Return an observation as JSON that fits a param."""
    return fits_param("zf.observation", _OBSERVATION.dump_json(observation).decode())


def load_observation(text: str) -> Observation:
    """Return the observation that `dump_observation` wrote."""
    return _load(_OBSERVATION, "observation", text)


def fits_param(name: str, value: str) -> str:
    """Return `value`, or raise: MLflow would cut or refuse it."""
    if len(value) > MAX_PARAM:
        raise StoreError(f"{name} has {len(value)} characters; MLflow holds {MAX_PARAM}")
    return value


def fits_tag(value: str) -> str:
    """Return `value` cut to what a tag holds, visibly."""
    return value if len(value) <= MAX_TAG else value[: MAX_TAG - 1] + "…"


def _load(adapter: TypeAdapter[T], what: str, text: str) -> T:
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise StoreError(f"a stored {what} cannot be read: {error.errors()[0]['msg']}") from None
