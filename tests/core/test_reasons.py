"""Reasons that are told only when somebody looks."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from tests.builders import decision
from zeus_flows.core.json import jsonable
from zeus_flows.core.reasons import ArmBelief, ArmStatus, Explanation, Reason, ReasonKind
from zeus_flows.ledger.mlflow.record_text import dump_decision, load_decision

ARMS = (ArmBelief(32, 2, 900.0, status=ArmStatus.KNOWN), ArmBelief(64, 0))
AT_ONCE = Reason(ReasonKind.EXPLORE, "64 may pay", arms=ARMS, numbers={"gain_j": 10.0})


def told_later() -> Reason:
    return Reason.later(ReasonKind.EXPLORE, lambda: ("64 may pay", ARMS), {"gain_j": 10.0})


def test_a_reason_told_later_is_the_reason_told_at_once() -> None:
    assert told_later() == AT_ONCE
    assert repr(told_later()) == repr(AT_ONCE)
    assert jsonable(told_later()) == jsonable(AT_ONCE)
    assert replace(told_later(), kind=ReasonKind.RETRY) == replace(AT_ONCE, kind=ReasonKind.RETRY)


def test_it_is_stored_and_copied_with_all_it_has_to_tell() -> None:
    assert dump_decision(decision(1, reason=told_later())) == dump_decision(decision(1, reason=AT_ONCE))
    assert load_decision(dump_decision(decision(1, reason=told_later()))).reason == AT_ONCE
    assert pickle.loads(pickle.dumps(told_later())) == AT_ONCE  # noqa: S301 - as Prefect does
    assert copy.deepcopy(told_later()) == AT_ONCE


def test_it_is_told_once_and_only_when_looked_at() -> None:
    asked = []

    def tell() -> Explanation:
        asked.append("why")
        return "64 may pay", ARMS

    reason = Reason.later(ReasonKind.EXPLORE, tell)
    assert (reason.kind, reason.numbers, asked) == ("explore", {}, [])
    assert (reason.text, reason.arms, reason.text) == ("64 may pay", ARMS, "64 may pay")
    assert asked == ["why"]


def test_words_are_stored_as_they_are_and_read_as_what_they_mean() -> None:
    text = dump_decision(decision(1, reason=AT_ONCE))
    assert '"reason":{"kind":"explore","text":"64 may pay","arms":[{"batch_size":32,' in text
    assert '"status":"known"' in text
    reason = load_decision(text).reason
    assert (reason.kind, reason.arms[0].status) == (ReasonKind.EXPLORE, ArmStatus.KNOWN)
    assert reason.kind is ReasonKind.EXPLORE
    assert reason.arms[0].status is ArmStatus.KNOWN


def test_words_of_another_version_are_read_and_written_again_as_they_stand() -> None:
    text = dump_decision(decision(1, reason=AT_ONCE)).replace('"explore"', '"by whim"').replace('"known"', '"resting"')
    read = load_decision(text)
    assert (read.reason.kind, read.reason.arms[0].status) == ("by whim", "resting")
    assert (f"{read.reason.kind}", repr(read.reason.kind)) == ("by whim", "<ReasonKind.by whim: 'by whim'>")
    assert read.reason.kind not in set(ReasonKind)
    assert dump_decision(read) == text
    assert pickle.loads(pickle.dumps(read)) == copy.deepcopy(read) == read  # noqa: S301 - as Prefect does
    with pytest.raises(ValueError, match="7"):
        ReasonKind(7)  # type: ignore[arg-type]


def test_it_is_as_frozen_as_any_record() -> None:
    with pytest.raises(FrozenInstanceError):
        told_later().text = "because"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        told_later().txt  # type: ignore[attr-defined]  # noqa: B018
