"""Promises 16 and 17: never late, never dear."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.core.builders import LIMITS, SAMPLES, V100, ask, cost_of_epoch, decide, job, observation, profile
from zeus_flows.core import policy
from zeus_flows.core.early_stop import NoCut, PlannedCut, capped, epochs_allowed, expected_excess
from zeus_flows.core.job import Job
from zeus_flows.core.policy.bounds import budget_left
from zeus_flows.core.power import cost_per_sample
from zeus_flows.core.records import Decision, Observation, Outcome

EVERY_LEARNER = pytest.mark.parametrize("name", ["thompson", "lookahead", "zeus"])


def default_cost(a_job: Job, epochs: float) -> float:
    known = profile(32)
    at = next(m for m in known.measurements if m.setting == max(LIMITS))
    return epochs * SAMPLES * cost_per_sample(a_job, known, at)


def long_history(epochs: int = 20) -> list[Observation]:
    return [observation(i, 32, epochs, profiled=i == 1) for i in range(1, 30)]


@EVERY_LEARNER
def test_without_room_in_the_budget_the_best_known_arm_runs(name: str) -> None:
    history = long_history()
    wasted = replace(history[-1], recurrence=30, energy_j=1e9, time_s=1e6)
    free = [decide(job(name), [*history, wasted], ask(r)).explores for r in range(40, 60)]
    held = [decide(job(name, exploration_budget=0.05), [*history, wasted], ask(r)) for r in range(40, 60)]
    assert any(free)
    assert not any(d.explores for d in held)
    assert any(d.reason.kind == "held-back" for d in held)


def history_that_leaves(runs_left: float, budget: float) -> list[Observation]:
    """A long history whose last run wasted so much that the budget leaves what so many runs of the best arm cost."""
    a_job, best_j = job(exploration_budget=budget), 20 * cost_of_epoch(job(), 32)
    *before, last = long_history()
    left_j = budget_left(a_job, policy.fold(a_job, [*before, last]), ask(40), best_cost_j=best_j)
    assert left_j is not None
    return [*before, replace(last, energy_j=last.energy_j + (left_j - runs_left * best_j) / 0.5)]


def greatest_excess(decision: Decision) -> float:
    """Return what an attempt may come to beyond the best known arm, whatever an epoch of its arm turns out to cost.

    That is in expectation where the policy has one. The first epoch, which tells the cost, is not counted.
    """
    greatest, cut = 0.0, decision.cut
    for percent in range(10, 800, 5):
        cost = cost_of_epoch(job(), 32) * percent / 100
        epochs = epochs_allowed(cut, epoch_cost_j=cost, max_epochs=50)
        excess = expected_excess(cut, epochs, epoch_cost_j=cost) if isinstance(cut, PlannedCut) else epochs * cost
        greatest = max(greatest, excess if epochs > 1 else 0.0)
    return greatest


@EVERY_LEARNER
def test_exploration_goes_on_within_what_the_budget_leaves(name: str) -> None:
    history, best_j = history_that_leaves(1.2, budget=0.05), 20 * cost_of_epoch(job(), 32)

    def tries(budget: float | None) -> list[Decision]:
        decisions = [decide(job(name, exploration_budget=budget), history, ask(r)) for r in range(40, 60)]
        return [decision for decision in decisions if decision.explores]

    assert tries(0.05)
    assert all(greatest_excess(decision) <= 0.2 * best_j * 1.001 for decision in tries(0.05))
    assert tries(None)
    assert all(greatest_excess(decision) > 0.2 * best_j for decision in tries(None)), "it is the budget that bounds"


def recurrences_above_the_default(share: float, *, recurrences: int = 200) -> list[Observation]:
    """Return runs of b0 that cost, each, such a share above what the default is estimated to."""
    ran = observation(1, 32, 20)
    cost_j = (1 + share) * default_cost(job(), 20)
    ran = replace(ran, energy_j=(cost_j - 0.5 * V100.max_power_w * ran.time_s) / 0.5)
    return [replace(ran, recurrence=i, profile=profile(32) if i == 1 else None) for i in range(1, recurrences + 1)]


@EVERY_LEARNER
def test_explorations_may_use_four_fifths_of_the_budget(name: str) -> None:
    a_job = job(name, exploration_budget=0.1)
    some_left = [decide(a_job, recurrences_above_the_default(0.07), ask(r)).explores for r in range(300, 310)]
    used_up = [decide(a_job, recurrences_above_the_default(0.085), ask(r)).explores for r in range(300, 310)]
    assert any(some_left)
    assert not any(used_up), "the last fifth is for the estimate of the default being wrong"


def left(history: list[Observation], *, budget: float = 0.1, best_cost_j: float = 1.0) -> float:
    a_job = job(exploration_budget=budget)
    found = budget_left(a_job, policy.fold(a_job, history), ask(), best_cost_j=best_cost_j)
    assert found is not None
    return found


def test_a_greater_budget_leaves_more_and_what_was_spent_leaves_less() -> None:
    *before, last = history = long_history()
    dearer = [*before, replace(last, energy_j=last.energy_j + 1_000.0)]
    assert left(history) - left(dearer) == pytest.approx(500.0), "with eta 0.5, half of what a joule is"
    assert left(history, budget=0.2) > left(history, budget=0.1) > left(history, budget=0.0)


def test_the_first_recurrences_run_ahead_of_their_budget_as_far_as_the_best_arm_makes_up_for_it() -> None:
    history, default_j = long_history(), default_cost(job(), 20)

    def ahead(recurrences: int) -> float:
        """Return how much more is left where the best known arm costs a tenth less than the default."""
        seen = history[:recurrences]
        return left(seen, budget=0.0, best_cost_j=0.9 * default_j) - left(seen, budget=0.0, best_cost_j=default_j)

    assert ahead(1) > ahead(5) > 0
    assert ahead(len(history)) == 0, "later ones have what was saved, not what will be"


def test_nothing_is_left_to_spend_while_the_default_is_unknown() -> None:
    a_job = job(exploration_budget=0.05)
    assert budget_left(a_job, policy.fold(a_job, []), ask(), best_cost_j=1.0) is None
    no_profile = policy.fold(a_job, [observation(1, 32, 10)])
    assert budget_left(a_job, no_profile, ask(), best_cost_j=1.0) is None


@EVERY_LEARNER
def test_an_exploration_that_would_make_a_recurrence_late_is_not_begun(name: str) -> None:
    history = long_history()
    run_s = history[0].time_s
    late = [decide(job(name, deadline_s=1.01 * run_s), history, ask(r)) for r in range(40, 60)]
    assert not any(d.explores for d in late)
    in_time = [decide(job(name, deadline_s=10 * run_s), history, ask(r)) for r in range(40, 60)]
    assert any(d.explores for d in in_time)


def test_time_already_spent_in_a_recurrence_counts_against_its_deadline() -> None:
    history = long_history()
    run_s = history[0].time_s
    a_job = job("lookahead", deadline_s=4 * run_s)
    assert decide(a_job, history, ask(60)).explores
    stopped = observation(60, 64, 5, outcome=Outcome.STOPPED, profiled=True)
    stopped = replace(stopped, time_s=2.9 * run_s)
    assert not decide(a_job, [*history, stopped], ask(60, 2, tried=(64,))).explores


def test_an_exploration_with_its_following_run_fits_the_deadline() -> None:
    history = long_history()
    run_s = history[0].time_s
    a_job = job("lookahead", deadline_s=2.5 * run_s)
    decision = decide(a_job, history, ask(60))
    assert decision.explores
    cost = cost_of_epoch(a_job, decision.batch_size)
    epochs = epochs_allowed(decision.cut, epoch_cost_j=cost, max_epochs=50)
    tried = observation(60, decision.batch_size, epochs)
    assert tried.time_s + run_s <= 2.5 * run_s


def test_the_published_policy_knows_no_budget() -> None:
    history = [observation(1, 32, 10, profiled=True)]
    assert decide(job("zeus-paper", exploration_budget=0.0, deadline_s=0.0), history).explores


@EVERY_LEARNER
def test_before_anything_has_converged_whatever_runs_is_a_try(name: str) -> None:
    failed = observation(1, 32, 50, outcome=Outcome.EXHAUSTED, profiled=True)
    decision = decide(job(name, exploration_budget=0.0), [failed], ask(1, 2, tried=(32,)))
    assert decision.batch_size != 32


def test_a_bounded_attempt_that_may_well_fail_stops_after_its_profile() -> None:
    cut = PlannedCut(3.0, 0.02, 0.01, 0.05, best_cost_j=1e4, horizon=10.0)
    bounded = capped(cut, at_most_j=500.0)
    assert epochs_allowed(bounded, epoch_cost_j=100.0, max_epochs=50) == 1
    assert epochs_allowed(bounded, epoch_cost_j=20.0, max_epochs=50) > 20
    assert epochs_allowed(capped(NoCut(), at_most_j=500.0, saved_j=1e3), epoch_cost_j=100.0, max_epochs=50) == 5


def test_savings_cover_what_an_attempt_is_expected_to_cost_beyond_the_best_known_arm() -> None:
    cut = PlannedCut(3.0, 0.1, 0.01, 0.05, best_cost_j=1e3, horizon=20.0)
    planned = epochs_allowed(cut, epoch_cost_j=48.0, max_epochs=50)
    excess_j = expected_excess(cut, planned, epoch_cost_j=48.0)
    assert 0 < excess_j < 0.5 * 48.0 * planned, "far less than it costs where it fails"
    assert epochs_allowed(capped(cut, saved_j=1.01 * excess_j), epoch_cost_j=48.0, max_epochs=50) == planned
    assert epochs_allowed(capped(cut, saved_j=0.0), epoch_cost_j=48.0, max_epochs=50) == 1
    assert epochs_allowed(capped(cut, saved_j=0.0), epoch_cost_j=24.0, max_epochs=50) > 20, "cheaper at once"


def test_a_deadline_bounds_however_much_was_saved_up() -> None:
    cut = PlannedCut(3.0, 0.02, 0.01, 0.05, best_cost_j=1e4, horizon=10.0)
    assert epochs_allowed(capped(cut, at_most_j=500.0, saved_j=1e9), epoch_cost_j=20.0, max_epochs=50) == 25


@EVERY_LEARNER
def test_what_is_held_back_is_tried_when_the_reason_said(name: str) -> None:
    a_job = job(name, exploration_budget=0.1)
    said: list[tuple[int, int]] = []
    history = recurrences_above_the_default(0.3, recurrences=12)
    for number in range(13, 400):
        decision = decide(a_job, history, ask(number))
        if decision.explores:
            break
        if found := re.search(r"has .*; at \S+ \S+ a recurrence it is tried in about (\d+) rec", decision.reason.text):
            assert decision.reason.kind == "held-back"
            said.append((number, int(found[1])))
        history = [*history, observation(number, 32, 20)]
    assert decision.explores
    assert said, "it was held back at first"
    first, waits = said[0]
    assert number - first == pytest.approx(waits, rel=0.5, abs=3)
    assert said[-1][1] < waits
