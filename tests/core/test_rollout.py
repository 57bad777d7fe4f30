"""The mode in force: the least that anybody allows, and by whose word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.builders import job, observation
from zeus_flows.core import policy
from zeus_flows.core.job import Mode, Rollout
from zeus_flows.core.records import Ask, Observation
from zeus_flows.core.rollout import in_force, lowered

JOB = job()
ORDER = list(Mode)
modes = st.sampled_from(ORDER)
stages = st.builds(Rollout, observe=st.integers(0, 5), power=st.integers(0, 5))


@given(modes, st.none() | modes, st.none() | modes, stages, st.integers(1, 15))
def test_the_mode_in_force_is_the_least_that_anybody_allows(
    stated: Mode, fleet: Mode | None, asked: Mode | None, rollout: Rollout, recurrence: int
) -> None:
    now = in_force(
        lowered(lowered(replace(JOB, mode=stated, rollout=rollout), fleet, "fleet"), asked, "caller"), recurrence
    )
    stage = Mode.FULL
    if recurrence <= rollout.observe + rollout.power:
        stage = Mode.OBSERVE if recurrence <= rollout.observe else Mode.POWER
    allowed = [mode for mode in (stated, fleet, asked, stage) if mode is not None]
    assert now.mode is min(allowed, key=ORDER.index)
    assert bool(now.mode_why) == (now.mode is not stated)
    assert in_force(now, recurrence) == now


def test_a_decision_says_whose_word_its_mode_is_and_keeps_it() -> None:
    staged = replace(JOB, rollout=Rollout(observe=1, power=1))
    decided = [policy.decide(staged, policy.initial(staged), Ask(n, 1, seed=0)) for n in (1, 2, 3)]
    assert [d.mode for d in decided] == [Mode.OBSERVE, Mode.POWER, Mode.FULL]
    assert [d.tune_power for d in decided] == [False, True, True]
    assert decided[0].reason.text == (
        f"the mode is observe, by its roll-out, up to recurrence 1: the batch size stays {JOB.default_batch_size}"
    )
    assert [d.asked.mode_why for d in decided if d.asked] == [
        "its roll-out, up to recurrence 1",
        "its roll-out, up to recurrence 2",
        "",
    ]


@pytest.mark.parametrize("now", ORDER)
def test_what_was_folded_does_not_depend_on_the_mode_that_the_job_is_in_now(now: Mode) -> None:
    ran: list[Observation] = [
        observation(n, b, 5, mode=mode, setting=None, profiled=True)
        for n, (b, mode) in enumerate(((32, Mode.OBSERVE), (32, Mode.POWER), (16, Mode.FULL), (32, Mode.FULL)), start=1)
    ]
    assert policy.fold(replace(JOB, mode=now), ran) == policy.fold(JOB, ran)
