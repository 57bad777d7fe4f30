"""Decisions, observations and verdicts on models <-> JSON text that fits MLflow's params. No pickle.

`docs/reference/mlflow-schema.md` has the stored form. It is compact: fields that have their default are left out (so
the defaults of these two records are part of the form), measured numbers have six digits, and what comes in rows is an
array. Texts are canonical: dumping what was loaded gives the same text. A text that is longer than a param is packed.

Texts without a schema number are of schema 1, which named every field of the records of its day.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

from zeus_flows.core.early_stop import CostCut, Cut, NoCut, PlannedCut
from zeus_flows.core.json import TAG, compact, from_plain, plain_text, short, to_text
from zeus_flows.core.power_profile import Knob, Part, Parts, PowerProfile, SettingMeasurement
from zeus_flows.core.promotion import ModelVerdict
from zeus_flows.core.reasons import ArmBelief
from zeus_flows.core.records import SCHEMA, Decision, InFlight, Observation
from zeus_flows.errors import MeasurementError, StoreError, UnreadableRecord
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.packing import pack, unpack

R = TypeVar("R", Decision, Observation)

MAX_PARAM: Final = 6_000
MAX_TAG: Final = 5_000
#: The schema of a text that holds another one, packed.
PACKED: Final = 3

_DIGITS: Final = 6  # of measured numbers: no meter has more
_TELLING: Final = ("batch_size", "runs", "expected_cost_j", "status")  # of an arm, where all of it is too much
_THINNED: Final = "; its learning curve was thinned to fit"
_UNPROFILED: Final = "; its power profile did not fit and was left out"


def dump_decision(decision: Decision) -> str:
    """Return a decision as JSON that fits a param; what explains it is shortened where it must be."""
    return _fitting(names.DECISION, decision, _write_decision, (_fewer_arms, _no_numbers, _shorter_reason, _not_asked))


def load_decision(text: str) -> Decision:
    """Return the decision that `dump_decision` wrote, now or in an earlier version.

    Raises:
        UnreadableRecord: it is broken.
        StoreError: it was written by a newer version.
    """
    return _load("decision", text, _read_decision)


def dump_observation(observation: Observation) -> str:
    """Return an observation as JSON that fits a param; it is shortened, and says so, where it must be."""
    shorten = (_shorter_traceback, _thinner_curve, _shorter_detail, _no_profile)
    return _fitting(names.OBSERVATION, observation, _write_observation, shorten)


def load_observation(text: str) -> Observation:
    """Return the observation that `dump_observation` wrote, now or in an earlier version.

    Raises:
        UnreadableRecord: it is broken.
        StoreError: it was written by a newer version.
    """
    return _load("observation", text, _read_observation)


def dump_verdict(verdict: ModelVerdict) -> str:
    """Return a verdict as a param has it; packed where it is long."""
    text = plain_text({"schema": 1, **compact(verdict)})
    return text if len(text) <= MAX_PARAM else plain_text({"schema": 1, "zlib": pack(text)})


def load_verdict(text: str) -> ModelVerdict:
    """Return the verdict that a param has.

    Raises:
        ValueError: it is something else.
    """
    data = json.loads(text)
    if isinstance(data, dict) and "zlib" in data:
        data = json.loads(unpack(data["zlib"]))
    if not isinstance(data, dict) or data.get("schema") != 1:
        raise ValueError("it is no verdict that this version knows")
    return from_plain(ModelVerdict, data)


def is_same_decision(standing: str, text: str) -> bool:
    """Return whether a stored decision, of whatever schema, is the one that `dump_decision` made a text of."""
    return standing == text or _again(standing, load_decision, dump_decision) == text


def is_same_observation(standing: str, text: str) -> bool:
    """Return whether a stored observation, of whatever schema, is the one that `dump_observation` made a text of."""
    return standing == text or _again(standing, load_observation, dump_observation) == text


def dump_arms(arms: Sequence[ArmBelief]) -> str:
    """Return what is believed of each arm as JSON that fits a tag: in full, else without what says least."""
    text = to_text(arms)
    if len(text) > MAX_TAG:
        short_arms = [_short_arm(compact(arm)) for arm in arms]
        text = plain_text(short_arms)
        if len(text) > MAX_TAG:
            text = plain_text([{name: arm[name] for name in _TELLING if name in arm} for arm in short_arms])
    return fits_tag(text)


def fits_tag(value: str) -> str:
    """Return `value` cut to what a tag holds, visibly."""
    return value if len(value) <= MAX_TAG else value[: MAX_TAG - 1] + "…"


# -- decisions -------------------------------------------------------------------------------------------------------


def _write_decision(decision: Decision) -> dict[str, Any]:
    plain = {"schema": SCHEMA, **compact(replace(decision, schema=SCHEMA))}
    plain["cut"] = compact(decision.cut)
    for arm in plain["reason"].get("arms", ()):
        _short_arm(arm)
    plain |= _knob(decision.knob, plain.pop("setting", None))
    if decision.asked is not None and decision.asked.in_flight:
        rows = [[f.recurrence, f.attempt, f.batch_size, f.explores] for f in decision.asked.in_flight]
        plain["asked"]["in_flight"] = rows
    return plain


def _short_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Return an arm after giving its numbers six digits."""
    arm |= {name: short(_digits(value)) for name, value in arm.items() if isinstance(value, float)}
    return arm


def _read_decision(data: dict[str, Any], schema: int) -> Decision:
    reason = data["reason"]
    reason["numbers"] = {k: v for k, v in reason.get("numbers", {}).items() if v is not None}  # schema 1: infinite
    if schema > 1:
        data["setting"] = _setting(data)
        if asked := data.get("asked"):
            names = tuple(InFlight.__dataclass_fields__)
            asked["in_flight"] = [dict(zip(names, row, strict=True)) for row in asked.get("in_flight", ())]
    else:
        data["cut"] = _untagged_cut(data.get("cut", {}))
    return from_plain(Decision, data)


def _untagged_cut(cut: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cut of schema 1 with the tag that it had not: its fields tell."""
    kind: type[Cut] = CostCut if "threshold_j" in cut else PlannedCut if "log_epochs" in cut else NoCut
    return {TAG: kind.tag, **cut}


def _fewer_arms(decision: Decision, _excess: int) -> Decision:
    arms = decision.reason.arms
    return replace(decision, reason=replace(decision.reason, arms=arms[: len(arms) // 2]))


def _no_numbers(decision: Decision, _excess: int) -> Decision:
    return replace(decision, reason=replace(decision.reason, numbers={}))


def _shorter_reason(decision: Decision, excess: int) -> Decision:
    return replace(decision, reason=replace(decision.reason, text=_without_end(decision.reason.text, excess)))


def _not_asked(decision: Decision, _excess: int) -> Decision:
    return replace(decision, asked=None)


# -- observations ----------------------------------------------------------------------------------------------------


def _write_observation(observation: Observation) -> dict[str, Any]:
    plain = {"schema": SCHEMA, **compact(replace(observation, schema=SCHEMA))}
    plain["gpu"].pop("knob", None)  # it is the record's
    if observation.knob is Knob.POWER_LIMIT:  # as it was written when there was no other
        plain = {"limit_before_w" if name == "setting_before" else name: value for name, value in plain.items()}
    plain |= _knob(observation.knob, plain.pop("setting", None))
    if observation.metric is not None and not math.isfinite(observation.metric):
        del plain["metric"]  # a run that diverged has none
    if observation.profile is not None:
        plain["profile"] = _write_profile(observation, observation.profile)
    if observation.parts is not None:
        plain["parts"] = _write_parts(observation.parts)
    if observation.curve:
        plain["curve"] = [[epoch, short(_digits(metric))] for epoch, metric in observation.curve]
    return plain


#: Counts beyond this are no float any more.
_MOST_COUNTED: Final = 2**53


def _read_observation(data: dict[str, Any], schema: int) -> Observation:
    if schema > 1:
        data["setting"] = _setting(data)
        data["gpu"]["knob"] = data["knob"]
        if "profile" in data:
            data["profile"] = _read_profile(data, data["profile"])
        if "parts" in data:
            data["parts"] = _read_parts(data["parts"])
    observation = from_plain(Observation, data)
    if max(map(abs, (observation.recurrence, observation.epochs, observation.samples_per_epoch))) > _MOST_COUNTED:
        raise ValueError("a count is greater than any that can be meant")
    return observation


def _write_profile(observation: Observation, profile: PowerProfile) -> dict[str, Any]:
    """Return a profile as rows of setting, average power, throughput and, where they were too few, the seconds."""
    plain: dict[str, Any] = compact(profile)
    if profile.gpu == observation.gpu:
        del plain["gpu"]
    if profile.batch_size == observation.batch_size:
        del plain["batch_size"]
    plain.pop("micro_batch_size", None)
    if profile.micro_batch_size != observation.micro_batch_size:
        plain["micro_batch_size"] = profile.micro_batch_size
    if "stale" in plain:
        plain["stale"] = plain.pop("stale")
    plain["measurements"] = [
        [
            short(m.setting),
            *(short(_digits(v)) for v in (m.average_power_w, m.samples_per_s, m.begun_s) if v is not None),
        ]
        for m in profile.measurements
    ]
    return plain


def _read_profile(data: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    names = tuple(field.name for field in fields(SettingMeasurement))
    return {
        "gpu": data["gpu"],
        "batch_size": data["batch_size"],
        "micro_batch_size": data.get("micro_batch_size"),
        **plain,
        "measurements": [dict(zip(names, row, strict=False)) for row in plain["measurements"]],
        "stale": plain.get("stale", ()),
    }


def _write_parts(parts: Parts) -> dict[str, Any]:
    """Return parts as rows of count, joules and seconds; an evaluation's row begins with the setting."""

    def row(part: Part) -> list[Any]:
        return [short(_digits(v)) for v in (part.count, part.energy_j, part.time_s)]

    plain: dict[str, Any] = compact(parts)
    for name in ("once", "rest"):
        if name in plain:
            plain[name] = row(getattr(parts, name))
    if parts.evaluation:
        plain["evaluation"] = [[short(setting), *row(part)] for setting, part in parts.evaluation]
    return plain


def _read_parts(plain: Mapping[str, Any]) -> dict[str, Any]:
    names = tuple(Part.__dataclass_fields__)
    read: dict[str, Any] = {n: dict(zip(names, plain[n], strict=True)) for n in ("once", "rest") if n in plain}
    rows = plain.get("evaluation", ())
    return read | {"evaluation": [(setting, dict(zip(names, part, strict=True))) for setting, *part in rows]}


def _shorter_traceback(observation: Observation, excess: int) -> Observation:
    shorter = "…" + observation.traceback[excess + 1 :]  # where it broke is at its end
    return replace(observation, traceback=min(shorter, observation.traceback, key=len))


def _thinner_curve(observation: Observation, _excess: int) -> Observation:
    curve = observation.curve
    if len(curve) <= 2:
        return observation
    detail = observation.detail.removesuffix(_THINNED) + _THINNED
    return replace(observation, curve=(*curve[:-1:2], curve[-1]), detail=detail)


def _shorter_detail(observation: Observation, excess: int) -> Observation:
    return replace(observation, detail=_without_end(observation.detail, excess))


def _no_profile(observation: Observation, _excess: int) -> Observation:
    if observation.profile is None:
        return observation
    return replace(observation, profile=None, detail=observation.detail + _UNPROFILED)


# -- both ------------------------------------------------------------------------------------------------------------


def _fitting(
    name: str, record: R, write: Callable[[R], dict[str, Any]], shortenings: tuple[Callable[[R, int], R], ...]
) -> str:
    """Return a record's text, after as many shortenings as it takes, each as often as it helps."""
    text = _stored(write(record))
    for shorten in shortenings:
        while (excess := len(text) - MAX_PARAM) > 0 and (shorter := shorten(record, excess)) != record:
            record, text = shorter, _stored(write(shorter))
    if len(text) > MAX_PARAM:
        raise StoreError(f"{name} has {len(text)} characters; MLflow holds {MAX_PARAM}")
    return text


def _stored(plain: dict[str, Any]) -> str:
    """Return a record's text: as people can read it where it fits, else packed."""
    text = plain_text(plain, allow_nan=False)
    return text if len(text) <= MAX_PARAM else plain_text({"schema": PACKED, "zlib": pack(text)})


def _load(what: str, text: str, read: Callable[[dict[str, Any], int], R]) -> R:
    try:
        data = json.loads(text)
        if data.get("schema") == PACKED:
            data = json.loads(unpack(data["zlib"]))
        data["schema"] = schema = int(data.get("schema", 1))
        if 1 <= schema <= SCHEMA:
            return read(data, schema)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError, MeasurementError):
        raise UnreadableRecord(f"a stored {what} cannot be read, as if it was changed by hand") from None
    raise StoreError(
        f"a stored {what} has schema {schema}, and this version of zeus_flows reads those up to {PACKED}: "
        f"install the version that wrote it, or a newer one"
    )


def _again(text: str, load: Callable[[str], R], dump: Callable[[R], str]) -> str | None:
    """Return a stored text as it would be written now; None where it cannot be read."""
    try:
        return dump(load(text))
    except StoreError:
        return None


def _digits(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _knob(knob: Knob, setting: Any) -> dict[str, Any]:
    return {"knob": knob.value} | ({} if setting is None else {"setting": setting})


def _setting(data: dict[str, Any]) -> Any:
    """Return what a record's knob was set to; None where it was left alone."""
    Knob(data["knob"])
    return data.pop("setting", None)


def _without_end(text: str, excess: int) -> str:
    """Return a text that is shorter by `excess` characters, and shows it."""
    return min(text[: max(len(text) - excess - 1, 0)] + "…", text, key=len)
