"""Algorithm 3 without its faults, and with them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.builders import ARMS, V100, ask, cost_of_epoch, decide, job, observation
from zeus_flows.core import policy
from zeus_flows.core.early_stop import CostCut, NoCut
from zeus_flows.core.records import Decision, Observation, Outcome

RUNS = st.lists(
    st.tuples(st.sampled_from(ARMS), st.integers(1, 49), st.sampled_from([Outcome.CONVERGED, Outcome.STOPPED])),
    min_size=1,
    max_size=20,
)


def history_of(runs: list[tuple[int, int, Outcome]]) -> list[Observation]:
    return [observation(i, b, e, outcome=o, profiled=True) for i, (b, e, o) in enumerate(runs, start=1)]


def threshold(decision: Decision) -> float | None:
    return decision.cut.threshold_j if isinstance(decision.cut, CostCut) else None


@settings(max_examples=40, deadline=None)
@given(runs=RUNS, arm=st.sampled_from(ARMS), data=st.data())
def test_permuting_the_observations_of_one_arm_changes_nothing(
    runs: list[tuple[int, int, Outcome]], arm: int, data: st.DataObject
) -> None:
    places = [i for i, (b, _, _) in enumerate(runs) if b == arm]
    permuted = list(runs)
    for place, other in zip(places, data.draw(st.permutations(places)), strict=True):
        permuted[place] = runs[other]
    one, two = decide(job("zeus"), history_of(runs)), decide(job("zeus"), history_of(permuted))
    assert (one.batch_size, one.explores, one.reason.kind) == (two.batch_size, two.explores, two.reason.kind)
    assert threshold(one) == pytest.approx(threshold(two))


@settings(max_examples=40, deadline=None)
@given(runs=RUNS, arm=st.sampled_from(ARMS), epochs=st.integers(1, 49), window=st.sampled_from([None, 3, 10]))
def test_an_unconverged_run_never_lowers_the_stopping_threshold(
    runs: list[tuple[int, int, Outcome]], arm: int, epochs: int, window: int | None
) -> None:
    a_job = job("zeus", window=window)
    before = policy.fold(a_job, history_of(runs))
    for outcome in (Outcome.STOPPED, Outcome.EXHAUSTED, Outcome.DIVERGED, Outcome.OUT_OF_MEMORY, Outcome.FAILED):
        after = policy.advance(a_job, before, observation(500, arm, epochs, outcome=outcome, profiled=True))
        was, now = (threshold(policy.decide(a_job, s, ask())) for s in (before, after))
        assert now is None or (was is not None and now >= was * (1 - 1e-12))


@settings(max_examples=30, deadline=None)
@given(good=st.sets(st.sampled_from(ARMS)))
def test_exploration_never_loops(good: set[int]) -> None:
    a_job = job("zeus")
    state, pruning = policy.initial(a_job), 0
    for recurrence in range(1, 25):
        decision = policy.decide(a_job, state, ask(recurrence))
        pruning += decision.reason.kind == "pruning"
        outcome = Outcome.CONVERGED if decision.batch_size in good else Outcome.STOPPED
        state = policy.advance(a_job, state, observation(recurrence, decision.batch_size, 9, outcome=outcome))
    assert pruning <= 2 * len(ARMS)
    assert not good or decision.batch_size in good


def test_the_threshold_is_beta_times_the_least_cost() -> None:
    a_job = job("zeus", beta=3.0)
    decision = decide(a_job, [observation(1, 32, 12, profiled=True), observation(2, 32, 10)])
    assert threshold(decision) == pytest.approx(30 * cost_of_epoch(a_job, 32))


def test_the_minimum_cost_respects_the_window() -> None:
    a_job = job("zeus", window=3)
    history = [observation(1, 32, 4, profiled=True)] + [observation(i, 32, 20) for i in range(2, 5)]
    assert threshold(decide(a_job, history)) == pytest.approx(40 * cost_of_epoch(a_job, 32))
    of_all_time = decide(job("zeus"), history)
    assert threshold(of_all_time) == pytest.approx(8 * cost_of_epoch(a_job, 32))


def test_costs_that_rise_above_the_threshold_do_not_stop_every_run_for_ever() -> None:
    a_job = job("zeus")
    state = policy.fold(a_job, [observation(i, 32, 4, profiled=True) for i in range(1, 4)])
    for attempt in range(1, a_job.max_attempts + 1):
        decision = policy.decide(a_job, state, ask(5, attempt))
        if decision.cut == NoCut():
            return
        stopped = observation(5, decision.batch_size, 8, attempt=attempt, outcome=Outcome.STOPPED)
        state = policy.advance(a_job, state, stopped)
    pytest.fail("no attempt of the recurrence was allowed to end")


def test_one_unlucky_run_does_not_discard_the_arms_beyond_it() -> None:
    a_job = job("zeus")
    history = [observation(1, 32, 10, profiled=True), observation(2, 16, 19, outcome=Outcome.STOPPED, profiled=True)]
    history += [observation(3, 64, 9, profiled=True), observation(4, 128, 30, outcome=Outcome.STOPPED, profiled=True)]
    tried = []
    for recurrence in range(5, 15):
        decision = decide(a_job, history, ask(recurrence))
        tried.append(decision.batch_size)
        history.append(observation(recurrence, decision.batch_size, 9, profiled=True))
    assert {16, 8, 128} <= set(tried)


def test_a_retry_takes_another_batch_size() -> None:
    history = [observation(i, b, 10, profiled=True) for i, b in enumerate([32, 16, 64, 128, 8] * 2, start=1)]
    for recurrence in range(20, 40):
        assert decide(job("zeus"), history, ask(recurrence, 2, tried=(64,))).batch_size != 64


def test_a_given_prior_is_used() -> None:
    history = [observation(i, b, 10, profiled=True) for i, b in enumerate([32, 16, 64, 128, 8] * 2, start=1)]
    flat = decide(job("zeus"), history).reason.arms[0].expected_cost_j
    pulled = decide(job("zeus", prior=(1.0, 1e-3)), history).reason.arms[0].expected_cost_j
    assert flat is not None
    assert pulled == pytest.approx(1.0, rel=0.01)
    assert flat > 100


def test_the_published_policy_keeps_its_faults() -> None:
    a_job = job("zeus-paper")
    failed = observation(2, 16, 19, outcome=Outcome.STOPPED, profiled=True)
    history = [observation(1, 32, 10, profiled=True), failed]
    tried = []
    for recurrence in range(3, 30):
        decision = decide(a_job, history, ask(recurrence))
        tried.append(decision.batch_size)
        history.append(observation(recurrence, decision.batch_size, 9 + recurrence % 2))
    assert not {8, 16} & set(tried), "one failure prunes an arm and all beyond it"
    two_attempts = [
        observation(1, 32, 10),
        observation(2, 16, 5, outcome=Outcome.STOPPED),
        observation(2, 64, 2, attempt=2),
    ]
    spent = [0.5 * o.energy_j + 0.5 * V100.max_power_w * o.time_s for o in two_attempts]
    cut = decide(a_job, two_attempts).cut
    assert isinstance(cut, CostCut)
    assert cut.threshold_j == pytest.approx(2 * min(spent[0], spent[1] + spent[2])), "attempts add up"


def test_the_published_policy_punishes_an_arm_that_may_not_train_an_epoch() -> None:
    a_job = job("zeus-paper")
    history = [observation(1, 32, 10), observation(2, 16, 0, outcome=Outcome.STOPPED, epochs_allowed=0)]
    belief = policy.fold(a_job, history).belief
    least = 0.5 * history[0].energy_j + 0.5 * V100.max_power_w * history[0].time_s
    assert belief.costs[16].mean == pytest.approx(200 * least)
