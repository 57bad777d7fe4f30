"""Several GPU models in one job: epochs are shared, epoch costs are each GPU's own, and may be translated."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.builders import GPU, JOB, observation
from tests.core import builders
from zeus_flows.core import policy
from zeus_flows.core.belief import EpochsBelief
from zeus_flows.core.early_stop import PlannedCut
from zeus_flows.core.epoch_costs import epoch_costs
from zeus_flows.core.job import Job
from zeus_flows.core.policy.base import Costs, View
from zeus_flows.core.policy.outlook import Outlook
from zeus_flows.core.power_profile import Gpu, PowerProfile, SettingMeasurement
from zeus_flows.core.records import Ask, Decision, InFlight, Observation

A40 = Gpu(model="Simulated A40", count=1, max_power_w=300.0)


def seen_on_the_v100(cheap: int) -> list[Observation]:
    """Return observations in which batch size `cheap` is by far the cheapest on the V100."""
    done = []
    for number, batch_size in enumerate((64, 32, 128, 64, 32, 128), start=1):
        rate = 400.0 if batch_size == cheap else 100.0
        measured = PowerProfile(batch_size, GPU, (SettingMeasurement(250.0, 200.0, rate),))
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


POLICIES = ["lookahead", "thompson"]


def known_on_the_v100(*arms: int, epochs: int = 10) -> list[Observation]:
    """Return three completed runs of each arm."""
    return [builders.observation(n, b, epochs, profiled=True) for n, b in enumerate(3 * arms, start=1)]


def measured_on_the_p100(recurrence: int, batch_size: int, *, speed: float = 1.0) -> Observation:
    """Return a completed run of ten epochs on a GPU that is `speed` times as fast as the V100."""
    profile = builders.profile(batch_size, builders.P100, speed=speed)
    run = builders.observation(recurrence, batch_size, 10, gpu=builders.P100, profile=profile, profiling_time_s=1.0)
    return replace(run, time_s=run.time_s / speed, energy_j=run.energy_j / speed)


def decide_on_the_p100(a_job: Job, history: list[Observation], **ask: Any) -> Decision:
    recurrence = history[-1].recurrence + ("attempt" not in ask)
    return policy.decide(a_job, policy.fold(a_job, history), builders.ask(recurrence, gpu=builders.P100, **ask))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("arms", [(32,), (32, 64), (16, 32), (8, 64)])
@pytest.mark.parametrize("translate", [True, False])
def test_the_first_run_on_a_gpu_is_of_a_batch_size_that_completed_elsewhere(
    name: str, arms: tuple[int, ...], translate: bool
) -> None:
    choice = decide_on_the_p100(builders.job(name, translate=translate), known_on_the_v100(*arms))
    assert choice.batch_size in arms
    assert not choice.explores
    assert not translate or choice.batch_size == max(arms), "larger ones are cheaper there, for as many epochs"


@pytest.mark.parametrize("name", POLICIES)
def test_prices_of_a_dearer_gpu_do_not_hold_a_job_to_what_it_measured_first(name: str) -> None:
    history = [*known_on_the_v100(32, 64), measured_on_the_p100(7, 8, speed=4.0)]
    choice = decide_on_the_p100(builders.job(name), history)
    assert choice.batch_size != 8
    assert choice.explores


@pytest.mark.parametrize("name", POLICIES)
def test_what_looks_best_by_another_gpu_is_a_trial_until_it_is_measured(name: str) -> None:
    history = [*known_on_the_v100(*builders.ARMS), measured_on_the_p100(16, 8)]
    choice = decide_on_the_p100(builders.job(name), history)
    assert choice.batch_size == 128
    assert choice.explores
    assert isinstance(choice.cut, PlannedCut)
    assert choice.cut.at_least == 1, "its first epoch tells what it costs here, and whether to go on"
    safe = decide_on_the_p100(builders.job(name), history, in_flight=(InFlight(99, 1, 128, explores=True),))
    assert safe.batch_size == 8, "the best known is one that was measured here"


def test_the_factor_between_gpus_says_nothing_about_which_arm_is_cheaper() -> None:
    arms, there = (8, 16, 32, 64), {8: 400.0, 16: 200.0, 32: 120.0, 64: 100.0}
    mean, covariance = epoch_costs(arms, 32, {}, [there])
    assert np.exp(mean) == pytest.approx(list(there.values()), rel=0.05)
    assert (np.sqrt(covariance.diagonal()) > 0.9).all()
    apart = covariance.diagonal()[:, None] + covariance.diagonal() - 2 * covariance
    off = np.sqrt(apart[2])
    assert off[1] == pytest.approx(off[3], rel=0.3)
    assert 0.02 < off[1] < off[0] < 0.2, "the farther apart, the less sure"


def test_one_arm_measured_on_both_gpus_gives_the_factor() -> None:
    arms, there = (8, 16, 32, 64), {8: 400.0, 16: 200.0, 32: 120.0, 64: 100.0}
    mean, covariance = epoch_costs(arms, 32, {16: 50.0}, [there])
    assert np.exp(mean) == pytest.approx([100.0, 50.0, 30.0, 25.0], rel=0.05)
    off = np.sqrt(covariance.diagonal())
    assert off[1] < 1e-3
    assert 0.02 < off[2] < off[3] < 0.2


def test_several_gpus_say_more_than_one() -> None:
    arms, there = (8, 16, 32, 64), {16: 200.0, 32: 120.0}
    _, one = epoch_costs(arms, 32, {16: 50.0}, [there])
    mean, two = epoch_costs(arms, 32, {16: 50.0}, [there, {b: 3 * cost for b, cost in there.items()}])
    assert math.exp(mean[2]) == pytest.approx(30.0, rel=0.05)
    assert two[2, 2] < 0.7 * one[2, 2]
    mean, _ = epoch_costs(arms, 32, {}, [there, {64: 1.0}])
    assert np.exp(mean[1:3]) == pytest.approx([200.0, 120.0], rel=0.05)


def test_neighbours_of_a_translated_optimum_stay_candidates() -> None:
    a_job = builders.job("lookahead")
    belief = EpochsBelief.empty(a_job.batch_sizes, 32)
    for b in (16, 32, 64) * 10:
        belief = belief.complete(a_job, b, 10)
    there = {8: 500.0, 16: 300.0, 32: 100.0, 64: 300.0, 128: 500.0}
    costs = Costs({32: 100.0}, elsewhere=(there,))
    view = View(builders.ask(40), a_job.batch_sizes, 32, may_explore=True, look_up_costs=lambda: costs)
    outlook = Outlook(a_job, belief, view)
    assert outlook.incumbent == 2
    assert {1, 3} <= set(outlook.candidates)


@pytest.mark.parametrize("name", POLICIES)
def test_a_gpu_without_room_for_what_is_known_starts_with_what_fits(name: str) -> None:
    a_job, history = builders.job(name), known_on_the_v100(64, 128)
    choice = decide_on_the_p100(a_job, history, out_of_memory=(64,))
    assert choice.batch_size == 32
    assert "fits this GPU" in choice.reason.text
    history.append(measured_on_the_p100(7, 32))
    for n in range(8, 20):
        choice = decide_on_the_p100(a_job, history, out_of_memory=(64,))
        assert choice.batch_size <= 32
        history.append(measured_on_the_p100(n, choice.batch_size))
    assert choice.batch_size == 32


@pytest.mark.parametrize("name", POLICIES)
def test_where_the_best_known_is_out_of_memory_the_next_best_known_runs(name: str) -> None:
    choice = decide_on_the_p100(builders.job(name), known_on_the_v100(16, 32, 64), out_of_memory=(64,))
    assert choice.batch_size == 32
