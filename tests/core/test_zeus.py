"""Algorithm 3 without its faults, and with them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.builders import ARMS, V100, ask, cost_of_epoch, decide, job, observation
from zeus_flows.core import policy
from zeus_flows.core.early_stop import CostCut, NoCut, epochs_allowed
from zeus_flows.core.job import WindowOf
from zeus_flows.core.records import Decision, InFlight, Observation, Outcome

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


def test_a_batch_size_that_failed_is_dropped_with_those_beyond_it() -> None:
    a_job = job("zeus")
    history = [observation(1, 32, 10, profiled=True), observation(2, 16, 19, outcome=Outcome.STOPPED, profiled=True)]
    history += [observation(3, 64, 9, profiled=True), observation(4, 128, 30, outcome=Outcome.STOPPED, profiled=True)]
    tried = []
    for recurrence in range(5, 40):
        decision = decide(a_job, history, ask(recurrence))
        tried.append(decision.batch_size)
        history.append(observation(recurrence, decision.batch_size, 9 + recurrence % 2, profiled=True))
    assert set(tried) == {32, 64}, "line 6 of Algorithm 3 keeps what reached the target"
    assert {a.batch_size: a.status for a in decision.reason.arms if a.status != "known"} == {
        8: "untried",
        16: "pruned",
        128: "pruned",
    }


def test_all_arms_failing_their_second_round_is_not_fatal() -> None:
    first = [observation(i, b, 10, profiled=True) for i, b in enumerate(ARMS, start=1)]
    second = [observation(i, b, 20, outcome=Outcome.STOPPED) for i, b in enumerate(ARMS, start=6)]
    chosen = {decide(job("zeus"), [*first, *second], ask(r)).batch_size for r in range(20, 60)}
    assert chosen <= set(ARMS)


def after_pruning(epochs: dict[int, int]) -> list[Observation]:
    """Both rounds, all arms reaching the target; each took its epochs and one more."""
    return [
        observation(i, b, epochs[b] + (i > len(ARMS)), profiled=i <= len(ARMS))
        for i, b in enumerate([*ARMS, *ARMS], start=1)
    ]


def expected(decision: Decision, arm: int) -> float:
    cost = next(a.expected_cost_j for a in decision.reason.arms if a.batch_size == arm)
    assert cost is not None
    return cost


def test_a_stopped_run_never_makes_an_arm_look_cheaper() -> None:
    a_job, history = job("zeus"), after_pruning({8: 20, 16: 16, 32: 14, 64: 11, 128: 20})
    before = decide(a_job, history)
    for epochs in (1, 5, 20, 21, 40):
        stopped = observation(11, 128, epochs, outcome=Outcome.STOPPED)
        after = decide(a_job, [*history, stopped])
        assert expected(after, 128) >= expected(before, 128) * (1 - 1e-9)
    assert expected(after, 128) > 1.2 * expected(before, 128), "it took at least twice as long"


def test_where_the_dear_arms_are_stopped_the_best_one_runs_nearly_always() -> None:
    a_job, needs = job("zeus"), {8: 90, 16: 60, 32: 20, 64: 12, 128: 45}
    state, chosen = policy.initial(a_job), []
    for recurrence in range(1, 101):
        for attempt in range(1, a_job.max_attempts + 1):
            decision = policy.decide(a_job, state, ask(recurrence, attempt))
            allowed = epochs_allowed(
                decision.cut, epoch_cost_j=cost_of_epoch(a_job, decision.batch_size), max_epochs=50
            )
            needed = needs[decision.batch_size] + recurrence % 3
            converged = needed <= allowed
            state = policy.advance(
                a_job,
                state,
                observation(
                    recurrence,
                    decision.batch_size,
                    min(needed, max(allowed, 1)),
                    attempt=attempt,
                    outcome=Outcome.CONVERGED if converged else Outcome.STOPPED,
                    profiled=state.profile(decision.batch_size, V100) is None,
                ),
            )
            chosen.append(decision.batch_size)
            if converged:
                break
    assert chosen[20:].count(64) >= 0.98 * len(chosen[20:])


@pytest.mark.parametrize("name", ["zeus", "zeus-paper"])
def test_concurrent_recurrences_draw_once_pruning_is_over(name: str) -> None:
    a_job, history = job(name), list[Observation]()
    while (decision := decide(a_job, history, ask(len(history) + 1))).reason.kind in ("first-run", "pruning"):
        epochs = round(20 * cost_of_epoch(a_job, 128) / cost_of_epoch(a_job, decision.batch_size)) + len(history) // 5
        history.append(observation(len(history) + 1, decision.batch_size, epochs, profiled=len(history) < len(ARMS)))
    flying = (InFlight(11, 1, 8, explores=True),)
    alone = [decide(a_job, history, ask(r)) for r in range(12, 60)]
    beside = [decide(a_job, history, ask(r, in_flight=flying)) for r in range(12, 60)]
    assert [d.batch_size for d in alone] == [d.batch_size for d in beside]
    assert len({d.batch_size for d in beside}) > 1, "section 4.4: they need not all run the same"


@pytest.mark.parametrize("name", ["zeus", "zeus-paper"])
def test_while_one_recurrence_prunes_others_run_the_best_known_batch_size(name: str) -> None:
    history = [observation(1, 32, 10, profiled=True), observation(2, 16, 9, profiled=True)]
    assert decide(job(name), history, ask(4)).explores
    flying = (InFlight(3, 1, 8, explores=True),)
    waiting = decide(job(name), history, ask(4, in_flight=flying))
    least = min((32, 16), key=lambda b: {32: 10, 16: 9}[b] * cost_of_epoch(job(name), b))
    assert (waiting.batch_size, waiting.explores, waiting.reason.kind) == (least, False, "in-flight")


def test_a_window_of_each_batch_size_keeps_its_newest_runs_however_old() -> None:
    a_job = job("zeus", window=2)
    history = after_pruning({8: 20, 16: 16, 32: 14, 64: 11, 128: 20})
    history += [observation(i, 64, 11) for i in range(11, 40)]
    believed = {a.batch_size: a.runs for a in decide(a_job, history).reason.arms}
    assert believed == dict.fromkeys(ARMS, 2)


def test_a_window_of_the_job_forgets_batch_sizes_that_have_not_run_for_long_and_tries_them_again() -> None:
    a_job = job("zeus", window=6, window_of=WindowOf.JOB)
    history = after_pruning({8: 20, 16: 16, 32: 14, 64: 11, 128: 20})
    history += [observation(i, 64, 11) for i in range(11, 17)]
    decisions = [decide(a_job, history, ask(r)) for r in range(17, 60)]
    assert {a.batch_size: a.runs for a in decisions[0].reason.arms} == {8: 0, 16: 0, 32: 0, 64: 6, 128: 0}
    assert {d.batch_size for d in decisions} == set(ARMS)
    assert {d.reason.kind for d in decisions} == {"explore", "exploit"}
    told = next(d for d in decisions if d.explores)
    assert "has no run in the window" in told.reason.text
    known = [decide(job("zeus", window=6), history, ask(r)).batch_size for r in range(17, 60)]
    assert known.count(64) > 40


def test_a_window_of_the_job_does_not_bring_back_what_pruning_dropped() -> None:
    a_job = job("zeus", window=4, window_of=WindowOf.JOB)
    history = [observation(1, 32, 10, profiled=True), observation(2, 16, 19, outcome=Outcome.STOPPED, profiled=True)]
    history += [observation(3, 64, 9, profiled=True), observation(4, 128, 30, outcome=Outcome.STOPPED, profiled=True)]
    tried = set()
    for recurrence in range(5, 40):
        tried.add(decide(a_job, history, ask(recurrence)).batch_size)
        history.append(observation(recurrence, 64 if recurrence % 4 else 32, 9 + recurrence % 2))
    assert tried == {32, 64}


def test_a_snapshot_in_which_stopped_runs_were_complete_ones_is_folded_anew() -> None:
    a_job, history = job("zeus"), after_pruning(dict.fromkeys(ARMS, 10))
    written = policy.to_json(policy.fold(a_job, history)) | {"settings": "750f7d3357f39201"}
    assert policy.from_json(a_job, written) is None


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
