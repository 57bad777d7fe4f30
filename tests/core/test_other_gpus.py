"""Several GPU models in one job: epochs are shared, epoch costs are each GPU's own, and may be translated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.builders import GPU, JOB, observation
from zeus_flows.core import policy
from zeus_flows.core.power_profile import Gpu, LimitMeasurement, PowerProfile
from zeus_flows.core.records import Ask, Decision, Observation

A40 = Gpu(model="Simulated A40", count=1, max_power_w=300.0)


def seen_on_the_v100(cheap: int) -> list[Observation]:
    """Return observations in which batch size `cheap` is by far the cheapest on the V100."""
    done = []
    for number, batch_size in enumerate((64, 32, 128, 64, 32, 128), start=1):
        rate = 400.0 if batch_size == cheap else 100.0
        measured = PowerProfile(batch_size, GPU, (LimitMeasurement(250.0, 200.0, rate),))
        done.append(observation(number, batch_size=batch_size, profile=measured))
    return done


def decide_on_the_a40(*, translate: bool, cheap: int) -> Decision:
    job = replace(JOB, policy="lookahead", translate=translate)
    state = policy.fold(job, seen_on_the_v100(cheap))
    return policy.decide(job, state, Ask(7, 1, 1, gpu=A40))


@pytest.mark.parametrize("cheap", [32, 128])
def test_costs_seen_on_one_gpu_guide_the_choice_on_another(cheap: int) -> None:
    arms = {arm.batch_size: arm for arm in decide_on_the_a40(translate=True, cheap=cheap).reason.arms}
    costs = {b: arm.expected_cost_j for b, arm in arms.items()}
    assert min(costs, key=lambda b: costs[b] or float("inf")) == cheap


def test_translation_can_be_forbidden() -> None:
    with_it = decide_on_the_a40(translate=True, cheap=128)
    without = decide_on_the_a40(translate=False, cheap=128)
    assert [a.expected_cost_j for a in with_it.reason.arms] != [a.expected_cost_j for a in without.reason.arms]
