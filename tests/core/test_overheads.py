"""What lies beside training steps: measured parts, beliefs about parts not seen, and what they do to decisions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.builders import SAMPLES, V100, ask, job, observation, profile
from zeus_flows.core import policy
from zeus_flows.core.cost import observed_cost, price
from zeus_flows.core.early_stop import CostCut, epochs_allowed
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import NOTHING, Overheads, nearest, pooled
from zeus_flows.core.policy import engine
from zeus_flows.core.policy.bounds import budget_left
from zeus_flows.core.policy.costs import arm_costs
from zeus_flows.core.policy.outlook import Outlook
from zeus_flows.core.power import best_setting, epoch_at, epoch_cost, run_at
from zeus_flows.core.power_profile import Gpu, Part, Parts, PowerProfile
from zeus_flows.core.records import Observation

EVALUATION = Part(1, 2_000.0, 10.0)


ONE = Part(1)


def with_parts(o: Observation, *, evaluation: Part = EVALUATION, once: Part = ONE, rest: Part = ONE) -> Observation:
    """Return an observation whose epochs were each followed by an evaluation."""
    at = evaluation.times(o.epochs)
    parts = Parts(once, ((o.setting or 250.0, at),), replace(rest.times(o.epochs), count=o.epochs))
    beside = parts.together
    return replace(o, energy_j=o.energy_j + beside.energy_j, time_s=o.time_s + beside.time_s, parts=parts)


def known(batch_size: int = 32, **changes: Part) -> Overheads:
    parts = with_parts(observation(1, batch_size, 4), **changes).parts
    assert parts is not None
    return NOTHING.add(parts)


def test_an_evaluation_seen_at_a_limit_is_what_it_is_there() -> None:
    (at, _), *_ = known().evaluation
    seen = known().evaluation_at(at, profile(32))
    assert (seen.energy_j, seen.time_s) == pytest.approx((EVALUATION.energy_j, EVALUATION.time_s))


def test_an_evaluation_that_loads_the_gpu_as_training_does_is_slowed_as_training_is() -> None:
    of = profile(32)
    fast, slow = nearest(of, 250.0), nearest(of, 100.0)
    seen = Overheads(evaluation=((250.0, Part(1, 10.0 * fast.average_power_w, 10.0)),), rest=Part(1))
    elsewhere = seen.evaluation_at(100.0, of)
    assert elsewhere.time_s == pytest.approx(10.0 * fast.samples_per_s / slow.samples_per_s)
    assert elsewhere.energy_j == pytest.approx(elsewhere.time_s * slow.average_power_w)


def test_an_evaluation_that_waits_for_the_host_takes_as_long_at_any_limit() -> None:
    seen = Overheads(evaluation=((250.0, Part(1, 300.0, 10.0)),), rest=Part(1))
    assert seen.evaluation_at(100.0, profile(32)).time_s == pytest.approx(10.0)
    assert seen.evaluation_at(100.0, profile(32)).energy_j == pytest.approx(300.0)


def test_a_part_that_was_not_seen_is_believed_from_other_batch_sizes() -> None:
    together = pooled([known(16), known(64)])
    assert together.evaluations_per_epoch == pytest.approx(1.0)
    assert together.evaluation_at(175.0).energy_j == pytest.approx(EVALUATION.energy_j)


@given(st.floats(1.0, 500.0), st.floats(0.0, 5_000.0))
def test_an_epoch_costs_its_steps_and_what_lies_beside_them(seconds: float, joules: float) -> None:
    a_job, of = job(), profile(32)
    overheads = Overheads(evaluation=((250.0, Part(1, joules, seconds)),), rest=Part(1, 7.0, 3.0))
    at = best_setting(a_job, of, samples_per_epoch=SAMPLES, overheads=overheads)
    epoch = epoch_at(of, at, samples_per_epoch=SAMPLES, overheads=overheads)
    steps = epoch_at(of, at, samples_per_epoch=SAMPLES)
    assert epoch.time_s >= steps.time_s + 3.0
    rates = price(a_job, of.gpu.max_power_w)
    cost = epoch_cost(a_job, of, samples_per_epoch=SAMPLES, overheads=overheads)
    assert cost == pytest.approx(rates.of(epoch.energy_j, epoch.time_s))
    for m in of.measurements:
        other = epoch_at(of, m, samples_per_epoch=SAMPLES, overheads=overheads)
        assert cost <= rates.of(other.energy_j, other.time_s) * (1 + 1e-9)


def test_evaluation_does_not_grow_with_the_training_data() -> None:
    of, overheads = profile(32), known()
    once, twice = (epoch_at(of, of.measurements[0], samples_per_epoch=n, overheads=overheads) for n in (1_000, 2_000))
    steps = epoch_at(of, of.measurements[0], samples_per_epoch=1_000)
    assert twice.time_s - once.time_s == pytest.approx(steps.time_s)


def test_a_cut_counts_what_an_attempt_costs_before_its_first_epoch() -> None:
    cut = CostCut(threshold_j=100.0)
    assert epochs_allowed(cut, epoch_cost_j=30.0, max_epochs=10) == 3
    assert epochs_allowed(cut, epoch_cost_j=30.0, max_epochs=10, once_j=20.0) == 2
    assert epochs_allowed(cut, epoch_cost_j=30.0, max_epochs=10, once_j=500.0) == 0


def outlook(a_job: Job, history: list[Observation]) -> Outlook:
    state = policy.fold(a_job, history)
    view = engine._view(a_job, state, ask(), a_job.batch_sizes, a_job.default_batch_size, may_explore=True)
    return Outlook(a_job, state.belief, view)


def test_what_a_run_is_expected_to_cost_is_what_runs_cost_evaluation_and_start_up_included() -> None:
    start = Part(1, 5_000.0, 100.0)
    history = [with_parts(observation(n, 32, 10, profiled=n == 1), once=start) for n in range(1, 6)]
    a_job = job()
    believed = outlook(a_job, history)
    assert believed.best_cost_j == pytest.approx(observed_cost(a_job, history[-1]), rel=0.02)


def test_a_batch_size_whose_evaluation_was_not_seen_has_that_doubt_in_its_cost() -> None:
    a_job = job()
    plain = outlook(a_job, [observation(1, 32, 10, profiled=True)])
    history = [with_parts(observation(1, 32, 10, profiled=True), evaluation=Part(1, 20_000.0, 100.0))]
    evaluated = outlook(a_job, history)
    arm, other = a_job.batch_sizes.index(32), a_job.batch_sizes.index(64)
    assert evaluated.costs[0][arm] > plain.costs[0][arm]
    assert evaluated.costs[1][arm, arm] < 1e-6, "its own was seen"
    share = 1 - math.exp(plain.costs[0][other] - evaluated.costs[0][other])
    assert evaluated.costs[1][other, other] > (0.25 * share) ** 2


@pytest.mark.parametrize("name", ["thompson", "lookahead", "zeus"])
def test_long_evaluations_make_batch_sizes_with_fewer_epochs_cheaper(name: str) -> None:
    epochs = {16: 6, 32: 8, 64: 10, 128: 14}

    def best(evaluation: Part) -> int | None:
        a_job = job(name)
        history = [
            with_parts(observation(n, b, epochs[b], profiled=n <= 4), evaluation=evaluation)
            for n, b in enumerate([*epochs] * 4, start=1)
        ]
        arms = policy.decide(a_job, policy.fold(a_job, history), ask(99)).reason.arms
        known_arms = [a for a in arms if a.status == "known" and a.expected_cost_j is not None]
        return min(known_arms, key=lambda a: a.expected_cost_j or math.inf).batch_size

    without, with_it = best(Part(1)), best(Part(1, 8_000.0, 60.0))
    assert without is not None
    assert with_it is not None
    assert with_it < without


def test_a_run_in_which_no_limit_may_be_tuned_adds_to_a_profile_instead_of_replacing_it() -> None:
    full = profile(32)
    one = PowerProfile(32, V100, full.measurements[-1:])
    state = policy.fold(job(), [observation(1, 32, 5, profiled=True), observation(2, 32, 5, profile=one)])
    kept = state.profile(32, V100)
    assert kept is not None
    assert {m.setting for m in kept.measurements} == {m.setting for m in full.measurements}


def test_a_state_with_parts_is_read_back_as_it_was_written() -> None:
    a_job = job(host_power_w=None)
    history = [replace(with_parts(observation(n, 32, 5, profiled=n == 1)), host_energy_j=500.0) for n in (1, 2, 3)]
    state = policy.fold(a_job, history)
    data = policy.to_json(state)
    again = policy.from_json(a_job, data)
    assert again is not None
    assert policy.to_json(again) == data
    assert again.host_w(a_job) > 0


def test_what_is_predicted_of_a_run_is_what_it_took() -> None:
    history = [with_parts(observation(n, 32, 10, profiled=n == 1), rest=Part(1, 50.0, 1.0)) for n in range(1, 4)]
    state = policy.fold(job(), history)
    overheads, seen = state.overheads_of(job(), 32, V100.key)
    of = profile(32)
    last = history[-1]
    predicted = run_at(
        of,
        nearest(of, last.setting or 0.0),
        epochs=10,
        evaluations=10,
        samples_per_epoch=SAMPLES,
        overheads=overheads,
    )
    assert seen
    assert (predicted.energy_j, predicted.time_s) == pytest.approx((last.energy_j, last.time_s))


def evaluated_history(evaluation: Part, recurrences: int = 30) -> list[Observation]:
    return [
        replace(with_parts(observation(n, 32, 10, profiled=n == 1), evaluation=evaluation), setting_before=250.0)
        for n in range(1, recurrences + 1)
    ]


def test_the_budget_s_default_pays_for_its_evaluations_too() -> None:
    a_job = job(exploration_budget=0.05)

    def left(evaluation: Part) -> float:
        state = policy.fold(a_job, evaluated_history(evaluation))
        found = budget_left(a_job, state, ask(31), best_cost_j=0.0)
        assert found is not None
        return found

    steps, whole = left(Part(1)), left(Part(1, 50_000.0, 300.0))
    assert steps > 0
    assert whole > steps, "what evaluation costs is on both sides"


def test_a_deadline_counts_the_evaluations_of_the_run_that_may_have_to_follow() -> None:
    evaluation = Part(1, 30_000.0, 300.0)
    history = evaluated_history(evaluation)
    one_run_s = history[-1].time_s
    free, late = (
        [
            policy.decide(a_job, policy.fold(a_job, history), ask(r)).explores
            for r in range(31, 61)
            for a_job in [job("zeus", deadline_s=deadline)]
        ]
        for deadline in (20 * one_run_s, 1.1 * one_run_s)
    )
    assert any(free)
    assert not any(late)


def test_evaluation_seen_on_another_gpu_is_believed_here_in_the_ratio_of_the_gpus() -> None:
    a_job, other = job(), Gpu("P100", 1, 250.0)
    history = [with_parts(observation(n, b, 10, profiled=True)) for n, b in enumerate((16, 32, 64), start=1)]
    slow = PowerProfile(
        32, other, tuple(replace(m, samples_per_s=m.samples_per_s / 2) for m in profile(32).measurements)
    )
    history.append(observation(4, 32, 10, gpu=other, profile=slow, profiling_time_s=1.0))
    costs = arm_costs(a_job, policy.fold(a_job, history), ask(5, gpu=other))
    here = arm_costs(a_job, policy.fold(a_job, history), ask(5))
    assert costs.beside[16] == pytest.approx(2 * here.beside[16], rel=0.3)
    assert costs.doubt[16] > 0
