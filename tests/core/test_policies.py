"""What holds for every policy behind the front door."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.builders import (
    ARMS,
    GPUS,
    HISTORIES,
    P100,
    READINGS,
    SAMPLES,
    V100,
    ask,
    cost_of_epoch,
    decide,
    job,
    observation,
    wild_observations,
)
from zeus_flows.core import policy
from zeus_flows.core.early_stop import NoCut, epochs_allowed
from zeus_flows.core.job import Drift, Mode, WindowOf
from zeus_flows.core.json import jsonable
from zeus_flows.core.policy import POLICIES
from zeus_flows.core.power_profile import Gpu, PowerProfile, SettingMeasurement
from zeus_flows.core.records import Decision, InFlight, Observation, Outcome
from zeus_flows.errors import ConfigError, MeasurementError

LEARNING = ["thompson", "lookahead", "zeus"]
EVERY = pytest.mark.parametrize("name", list(POLICIES))
EVERY_LEARNER = pytest.mark.parametrize("name", LEARNING)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def settled(name: str = "thompson") -> list[Observation]:
    """A history in which every arm ran and 64 is the cheapest."""
    a_job = job(name)
    epochs = {8: 20, 16: 16, 32: 14, 64: 11, 128: 20}
    order = [32, 64, 16, 128, 8, 64, 32, 16, 128, 8, 64, 64]
    return [
        observation(i, b, epochs[b] + i % 2, profiled=b not in order[: i - 1], for_job=a_job)
        for i, b in enumerate(order, 1)
    ]


@EVERY
@quick
@given(history=HISTORIES, seed=st.integers(0, 2**63 - 1), attempt=st.integers(1, 6), gpu=st.one_of(st.none(), GPUS))
def test_no_history_makes_a_policy_raise(
    name: str, history: list[Observation], seed: int, attempt: int, gpu: Gpu | None
) -> None:
    bounds = {"exploration_budget": 0.05, "deadline_s": 100.0, "prior": (1e4, 1e6)}
    of_job = job(name, window=3, window_of=WindowOf.JOB)
    for a_job in (job(name), job(name, window=2, **bounds), of_job, job(name, drift=Drift.DISCOUNT)):
        decision = decide(a_job, history, ask(attempt=attempt, seed=seed, gpu=gpu))
        assert decision.batch_size in ARMS
        assert decision.reason.text
        assert 0 <= epochs_allowed(decision.cut, epoch_cost_j=10.0, max_epochs=50) <= 50
        json.dumps(jsonable(decision), allow_nan=False)


@EVERY
@quick
@given(history=HISTORIES, window=st.sampled_from([None, 2]), window_of=st.sampled_from(WindowOf))
def test_a_snapshot_is_the_state(
    name: str, history: list[Observation], window: int | None, window_of: WindowOf
) -> None:
    a_job = job(name, window=window, window_of=window_of)
    state = policy.fold(a_job, history)
    assert policy.from_json(a_job, json.loads(json.dumps(policy.to_json(state)))) == state


@EVERY
def test_a_snapshot_does_not_grow_with_the_history(name: str) -> None:
    a_job = job(name)
    state = policy.fold(a_job, settled(name))
    for i in range(100, 400):
        if i == 200:
            after_hundred = len(json.dumps(policy.to_json(state)))
        state = policy.advance(a_job, state, observation(i, 64, 10 + i % 3))
    assert len(json.dumps(policy.to_json(state))) < after_hundred + 100


def test_a_snapshot_made_under_other_settings_is_refused() -> None:
    snapshot = policy.to_json(policy.fold(job(), settled()))
    assert policy.from_json(job(eta=0.9), snapshot) is None
    assert policy.from_json(job("zeus"), snapshot) is None
    assert policy.from_json(job(window_of=WindowOf.JOB), snapshot) is None
    assert policy.from_json(job(max_attempts=9), snapshot) is not None


@EVERY
@quick
@given(history=HISTORIES, data=st.data())
def test_the_order_of_arrival_does_not_matter(name: str, history: list[Observation], data: st.DataObject) -> None:
    unique = list({o.order: o for o in history}.values())
    shuffled = data.draw(st.permutations(unique))
    assert decide(job(name), unique) == decide(job(name), shuffled)


def decisions_as_text() -> str:
    return json.dumps([jsonable(decide(job(name), settled(name))) for name in POLICIES])


@pytest.mark.slow
def test_the_same_history_and_seed_give_the_same_decision_in_another_process() -> None:
    script = "from tests.core.test_policies import decisions_as_text; print(decisions_as_text())"
    root = Path(__file__).parents[2]
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert there.stdout.strip() == decisions_as_text()


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(which=st.integers(0, len(READINGS) ** 5 - 1))
def test_no_unbelievable_reading_reaches_a_belief(which: int) -> None:
    energy, time, power, throughput, max_power = (
        READINGS[which // len(READINGS) ** i % len(READINGS)] for i in range(5)
    )
    b = ARMS[which % len(ARMS)]
    gpu = Gpu("V100", 1, max_power)
    try:
        measured = SettingMeasurement(200.0, power, throughput)
        seen = observation(
            1, b, 5, energy_j=energy, time_s=time, profile=PowerProfile(b, gpu, (measured,)), profiling_time_s=1.0
        )
    except MeasurementError:
        return
    seen = replace(seen, gpu=gpu)
    a_job = job("zeus-paper")
    state = policy.advance(a_job, policy.initial(a_job), seen)
    json.dumps(asdict(state.belief), allow_nan=False)
    for costs in state.belief.costs.values():
        assert math.isfinite(costs.mean)
        assert costs.mean >= 0
    for costs_of_gpu in state.sample_costs.values():
        assert all(math.isfinite(cost) and cost > 0 for cost in costs_of_gpu.values())


@EVERY_LEARNER
@quick
@given(seen=wild_observations(recurrence=100, attempt=1))
def test_a_failure_teaches_nothing(name: str, seen: Observation) -> None:
    a_job = job(name)
    state = policy.fold(a_job, settled(name))
    for broken in (replace(seen, outcome=Outcome.FAILED), replace(seen, energy_complete=False)):
        assert policy.advance(a_job, state, broken).belief == state.belief


@EVERY
@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE, Mode.POWER])
def test_only_full_mode_changes_the_batch_size(name: str, mode: Mode) -> None:
    decision = decide(job(name, mode=mode), settled(name))
    assert (decision.batch_size, decision.explores) == (32, False)
    if name != "grid":
        assert decision.tune_power == (mode is Mode.POWER)


@EVERY
def test_a_job_with_one_batch_size_runs_it_to_the_end(name: str) -> None:
    a_job = job(name, batch_sizes=(32,))
    decision = decide(a_job, [observation(1, 32, 10, profiled=True)])
    assert (decision.batch_size, decision.reason.kind, decision.cut) == (32, "only-arm", NoCut())


@EVERY
def test_the_first_run_is_the_default_batch_size_uncut(name: str) -> None:
    decision = decide(job(name), [])
    assert (decision.batch_size, decision.cut, decision.explores) == (32, NoCut(), False)


@EVERY
def test_a_batch_size_that_does_not_fit_is_not_tried_again(name: str) -> None:
    full = observation(1, 64, 0, outcome=Outcome.OUT_OF_MEMORY)
    for recurrence in range(2, 40):
        decision = decide(job(name), [full, observation(2, 32, 10, profiled=True)], ask(recurrence))
        assert decision.batch_size < 64


@EVERY
def test_a_batch_size_that_does_not_fit_one_gpu_may_fit_another(name: str) -> None:
    a_job = job(name)
    full = observation(1, 8, 0, outcome=Outcome.OUT_OF_MEMORY, gpu=P100)
    state = policy.fold(a_job, [full])
    assert policy.decide(a_job, state, ask(gpu=P100)).batch_size == 8, "the smallest is all that is left"
    assert policy.decide(a_job, state, ask(gpu=V100)).batch_size == 32


def test_running_out_of_memory_once_does_not_condemn_a_batch_size_that_has_trained() -> None:
    history = [observation(1, 32, 10, profiled=True), observation(2, 32, 0, outcome=Outcome.OUT_OF_MEMORY)]
    state = policy.fold(job(), history)
    assert state.too_large(V100, 3) is None


def ran_out_of_memory(recurrence: int) -> Observation:
    """Batch size 64, in an evaluation after its first epochs."""
    return observation(recurrence, 64, 3, outcome=Outcome.OUT_OF_MEMORY, profiled=True)


def test_memory_that_runs_out_after_a_profile_retires_a_batch_size_and_larger_ones_after_two_recurrences() -> None:
    history = [observation(1, 32, 10, profiled=True), ran_out_of_memory(2), ran_out_of_memory(3)]
    state = policy.fold(job(), history)
    assert state.too_large(V100, 4) == 64
    assert state.too_large(P100, 4) is None
    arms = policy.decide(job(), state, ask(4)).reason.arms
    assert [a.batch_size for a in arms if a.status == "infeasible"] == [64, 128]


def test_a_batch_size_that_was_retired_is_looked_at_again_only_rarely() -> None:
    twice = [ran_out_of_memory(n) for n in (1, 2)]
    state = policy.fold(job(), twice)
    assert [state.too_large(V100, n) for n in (3, 51, 52)] == [64, 64, None]
    again = policy.advance(job(), state, ran_out_of_memory(52))
    assert [again.too_large(V100, n) for n in (53, 151, 152)] == [64, 64, None], "twice as long"
    fits = policy.advance(job(), again, observation(152, 64, 3))
    assert fits.too_large(V100, 153) is None


def test_a_batch_size_that_ran_out_of_memory_is_not_tried_again_in_that_recurrence() -> None:
    history = [observation(n, 64, 5, profiled=True) for n in range(1, 6)]
    ran_out = observation(6, 64, 2, outcome=Outcome.OUT_OF_MEMORY)
    state = policy.fold(job(default_batch_size=64), [*history, ran_out])
    again = policy.decide(job(default_batch_size=64), state, ask(6, 2, tried=(64,), out_of_memory=(64,)))
    assert again.batch_size < 64


@EVERY_LEARNER
def test_a_changed_list_of_batch_sizes_filters_arms(name: str) -> None:
    decision = decide(job(name, batch_sizes=(16, 32, 48, 128)), settled(name))
    assert decision.batch_size in (16, 32, 48, 128)


@pytest.mark.parametrize("name", ["thompson", "lookahead", "zeus", "grid"])
def test_while_an_exploration_is_in_flight_others_run_the_best_known_arm(name: str) -> None:
    history = [observation(1, 32, 10, profiled=True)]
    alone = [decide(job(name), history, ask(r)) for r in range(2, 30)]
    assert any(d.explores for d in alone)
    flying = (InFlight(2, 1, 64, explores=True),)
    for r in range(3, 30):
        decision = decide(job(name), history, ask(r, in_flight=flying))
        assert (decision.batch_size, decision.explores) == (32, False)


@EVERY_LEARNER
def test_an_exploration_that_was_killed_does_not_stop_exploring(name: str) -> None:
    killed = observation(2, 64, 1, outcome=Outcome.FAILED)
    history = [observation(1, 32, 10, profiled=True), killed]
    assert any(decide(job(name), history, ask(r)).explores for r in range(3, 40))


@EVERY_LEARNER
def test_epochs_learnt_on_one_gpu_serve_on_another(name: str) -> None:
    a_job = job(name)
    state = policy.fold(a_job, settled(name))
    chosen = [policy.decide(a_job, state, ask(r, gpu=P100)).batch_size for r in range(100, 130)]
    assert chosen.count(64) > 15


@EVERY_LEARNER
def test_a_growing_data_set_is_no_drift(name: str) -> None:
    a_job = job(name)
    history = [observation(i, 32, 10, profiled=i == 1, samples=SAMPLES * i) for i in range(1, 12)]
    state = policy.fold(a_job, history)
    decision = policy.decide(a_job, state, ask(samples_per_epoch=12 * SAMPLES, attempt=2, tried=(32,)))
    expected = {a.batch_size: a.expected_cost_j for a in decision.reason.arms}[32]
    first = {a.batch_size: a.expected_cost_j for a in decide(a_job, history[:3]).reason.arms}[32]
    assert expected is not None
    assert first is not None
    assert expected == pytest.approx(12 * first, rel=0.05)


@EVERY_LEARNER
def test_profiling_is_booked_apart(name: str) -> None:
    plain = observation(1, 32, 10, profiled=True)
    dear = replace(plain, energy_j=plain.energy_j * 1.3, time_s=plain.time_s * 1.3)

    def expected(first: Observation) -> float | None:
        decision = decide(job(name), [first, observation(2, 64, 9, profiled=True)])
        return {a.batch_size: a.expected_cost_j for a in decision.reason.arms}[32]

    assert expected(plain) == expected(dear)


@EVERY_LEARNER
def test_a_run_without_a_profile_is_worth_what_it_cost(name: str) -> None:
    history = [observation(i, 32, 10) for i in range(1, 4)]
    decision = decide(job(name), history)
    arm = next(a for a in decision.reason.arms if a.batch_size == 32)
    assert arm.expected_cost_j is not None
    energy_time = 0.5 * history[0].energy_j + 0.5 * V100.max_power_w * history[0].time_s
    assert arm.expected_cost_j == pytest.approx(energy_time, rel=0.02)


@EVERY_LEARNER
def test_a_default_that_fails_its_first_run_is_not_fatal(name: str) -> None:
    for outcome in (Outcome.EXHAUSTED, Outcome.DIVERGED):
        history = [observation(1, 32, 50, outcome=outcome, profiled=True)]
        retry = decide(job(name), history, ask(1, 2, tried=(32,)))
        assert retry.batch_size != 32
        history.append(observation(1, retry.batch_size, 12, attempt=2, profiled=True))
        decide(job(name), history)


@EVERY_LEARNER
def test_all_arms_failing_is_not_fatal(name: str) -> None:
    history = [
        observation(i, b, 50, outcome=Outcome.EXHAUSTED, profiled=True)
        for i, b in enumerate([*ARMS, *ARMS, *ARMS], start=1)
    ]
    decision = decide(job(name), history)
    assert (decision.batch_size in ARMS, decision.cut) == (True, NoCut())


@EVERY_LEARNER
def test_an_exploration_may_be_retried_and_then_the_best_known_arm_runs_to_the_end(name: str) -> None:
    history = [observation(1, 32, 10, profiled=True)]
    for attempt in (1, 2, 3):
        history.append(observation(2, 64, 3, outcome=Outcome.STOPPED, attempt=attempt, profiled=attempt == 1))
    decision = decide(job(name), history, ask(2, 4, tried=(64, 64, 64)))
    assert (decision.batch_size, decision.cut, decision.explores) == (32, NoCut(), False)


@EVERY_LEARNER
def test_every_learner_finds_the_cheapest_arm(name: str) -> None:
    epochs = {8: 30, 16: 22, 32: 18, 64: 12, 128: 30}
    a_job = job(name)
    state = policy.initial(a_job)
    chosen = []
    for recurrence in range(1, 61):
        for attempt in range(1, 5):
            decision = policy.decide(a_job, state, ask(recurrence, attempt))
            seen = train(decision, epochs[decision.batch_size] + recurrence % 2, state)
            state = policy.advance(a_job, state, seen)
            if seen.converged:
                break
        chosen.append(decision.batch_size)
    assert chosen[-10:].count(64) >= 8


def train(decision: Decision, epochs: int, state: policy.State) -> Observation:
    """Run a decision: as many epochs as it takes, or as its cut allows."""
    cost = cost_of_epoch(job(), decision.batch_size)
    allowed = max(epochs_allowed(decision.cut, epoch_cost_j=cost, max_epochs=50), 1)
    return observation(
        decision.recurrence,
        decision.batch_size,
        min(epochs, allowed),
        attempt=decision.attempt,
        outcome=Outcome.CONVERGED if epochs <= allowed else Outcome.STOPPED,
        profiled=state.profile(decision.batch_size, V100) is None,
        epochs_allowed=allowed,
    )


def test_a_policy_that_does_not_exist_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="there is no policy 'zeuss'; there are thompson"):
        policy.initial(job("zeuss"))


@EVERY_LEARNER
def test_a_reason_says_in_words_and_numbers_what_is_believed(name: str) -> None:
    reason = decide(job(name), settled(name)).reason
    assert "batch size" in reason.text
    assert {a.batch_size for a in reason.arms} == set(ARMS)
    assert reason.numbers["best_cost_j"] > 0


@pytest.mark.parametrize("name", ["thompson", "lookahead"])
def test_a_reason_gives_the_chance_of_every_arm_to_be_the_best(name: str) -> None:
    chances = [a.chance_best for a in decide(job(name), settled(name)).reason.arms]
    assert sum(c for c in chances if c is not None) == pytest.approx(1.0)
