"""What a choice's run is believed to cost: a number for the bounds, and the same one in the table for people."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.core.builders import HISTORIES, ask, job
from zeus_flows.core import policy
from zeus_flows.core.policy import engine
from zeus_flows.core.policy.base import RunCost
from zeus_flows.core.records import Observation


@given(observations=HISTORIES)
def test_the_bounds_are_given_what_people_are_told(observations: list[Observation]) -> None:
    for name in ("thompson", "lookahead", "zeus"):  # drawing a history takes longer than deciding on it
        check_that_bounds_are_given_what_people_are_told(name, observations)


def check_that_bounds_are_given_what_people_are_told(name: str, observations: list[Observation]) -> None:
    a_job = job(name)
    choice = engine._choose(a_job, policy.fold(a_job, observations), ask(), a_job.batch_sizes)
    told = {arm.batch_size: arm for arm in choice.reason.arms}.get(choice.batch_size)
    cost = choice.run_cost()
    if cost is None:
        assert told is None or told.expected_cost_j is None
    else:
        assert told is not None
        assert (cost.expected_j, cost.spread, cost.noise) == (told.expected_cost_j, told.spread or 0.0, told.noise)


def test_doubt_of_the_mean_and_of_a_run_add_up() -> None:
    assert RunCost(100.0, 0.3, 0.4).likely_j(2.0) == pytest.approx(100.0 * 2.718281828459045)
