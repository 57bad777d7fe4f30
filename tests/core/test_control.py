"""Control recurrences: the default runs now and then, to be compared with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.builders import ask, job, observation
from zeus_flows.core import policy
from zeus_flows.core.early_stop import NoCut
from zeus_flows.core.job import Mode
from zeus_flows.core.records import Outcome


def controls(upto: int, **changes: Any) -> list[int]:
    a_job = job(control=20, **changes)
    return [r for r in range(1, upto + 1) if policy.is_control(a_job, r)]


def test_one_recurrence_in_twenty_is_a_control_at_a_position_that_the_seed_draws() -> None:
    found = controls(200)
    assert [(r - 1) // 20 for r in found] == list(range(10)), "one in each block of twenty"
    assert len({(r - 1) % 20 for r in found}) > 3, "not always the same one"
    assert found == controls(200)
    assert found != controls(200, seed=1)


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_where_nothing_is_tuned_there_is_nothing_to_compare_with(mode: Mode) -> None:
    assert not controls(100, mode=mode)


@pytest.mark.parametrize("name", ["thompson", "lookahead", "zeus", "grid", "power"])
def test_a_control_runs_the_default_as_it_was_before_and_explores_nothing(name: str) -> None:
    a_job = job(name, control=20)
    history = [observation(1, 32, 30, profiled=True), *(observation(n, 64, 5, profiled=True) for n in range(2, 8))]
    decision = policy.decide(a_job, policy.fold(a_job, history), ask(controls(100)[2]))
    assert (decision.batch_size, decision.tune_power, decision.explores) == (32, False, False)
    assert isinstance(decision.cut, NoCut)
    assert decision.control
    assert "one recurrence in 20 is a control" in decision.reason.text


def test_a_control_that_fails_is_followed_by_what_the_policy_would_run() -> None:
    a_job = job(control=20)
    number = controls(100)[1]
    history = [*(observation(n, 64, 5, profiled=True) for n in range(1, 6))]
    history.append(observation(number, 32, 50, outcome=Outcome.EXHAUSTED))
    again = policy.decide(a_job, policy.fold(a_job, history), ask(number, 2, tried=(32,)))
    assert not again.control


def test_other_recurrences_are_decided_as_without_controls() -> None:
    history = [observation(n, 32, 10, profiled=True) for n in range(1, 4)]
    number = next(r for r in range(4, 30) if r not in controls(30))
    with_controls, without = (
        policy.decide(a_job, policy.fold(a_job, history), ask(number)) for a_job in (job(control=20), job())
    )
    assert with_controls == without


def test_a_decision_records_what_it_was_asked_and_what_it_had_folded() -> None:
    history = [observation(n, 32, 10, profiled=True) for n in range(1, 4)]
    asked = policy.decide(job(), policy.fold(job(), history), ask(7, tried=(64,), under_way=(5, 6))).asked
    assert asked is not None
    assert (asked.folded, asked.newest, asked.tried, asked.under_way) == (3, (3, 1), (64,), (5, 6))
