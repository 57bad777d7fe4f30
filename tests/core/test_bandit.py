from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeus_flows.core.bandit import LEAST_NOISE, Belief, Runs, learnt_variance, observe, predict, with_stopped

COSTS = st.lists(st.floats(min_value=1.0, max_value=1e6), min_size=1, max_size=20)


def runs_of(costs: list[float], window: int | None = None) -> Runs:
    runs = Runs()
    for cost in costs:
        runs = runs.add(cost, window=window)
    return runs


@given(COSTS, st.floats(1e-3, 1e6), st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_runs_teach_the_same_at_once_as_one_after_the_other(
    costs: list[float], variance: float, mean: float, spread: float
) -> None:
    at_once = observe(runs_of(costs), variance=variance, prior=(mean, spread))
    belief = Belief(mean, spread)
    for cost in costs:
        before, belief = belief, observe(runs_of([cost]), variance=variance, prior=belief)
        assert belief.variance < before.variance
        low, high = sorted((before.mean, cost))
        assert low - 1e-6 <= belief.mean <= high + 1e-6
    assert belief.variance == pytest.approx(at_once.variance, rel=1e-9)
    assert belief.mean == pytest.approx(at_once.mean, rel=1e-6, abs=1e-6)


@given(COSTS, st.floats(1e-3, 1e6))
def test_a_flat_prior_leaves_the_average(costs: list[float], variance: float) -> None:
    belief = observe(runs_of(costs), variance=variance)
    assert belief.mean == pytest.approx(np.mean(costs))
    assert belief.variance == pytest.approx(variance / len(costs))


@given(COSTS)
def test_running_statistics_equal_those_of_all_values(costs: list[float]) -> None:
    runs = runs_of(costs)
    assert runs.mean == pytest.approx(np.mean(costs))
    assert runs.variance == pytest.approx(np.var(costs), rel=1e-6, abs=1e-6 * runs.mean**2)


@given(COSTS, COSTS, st.integers(1, 10))
def test_a_window_forgets(old: list[float], new: list[float], window: int) -> None:
    newest = (new * window)[-window:]
    assert runs_of(old + newest, window) == runs_of(newest, window)


@given(st.floats(1.0, 1e6), st.integers(1, 50))
def test_equal_costs_never_make_an_arm_certain(cost: float, count: int) -> None:
    runs = runs_of([cost] * count)
    assert observe(runs, variance=learnt_variance(runs)).variance > 0
    assert observe(runs, variance=learnt_variance(runs, expecting=LEAST_NOISE)).variance > 0


@given(COSTS, COSTS)
def test_a_stopped_run_only_ever_raises_what_an_arm_costs(costs: list[float], stopped: list[float]) -> None:
    runs, censored = runs_of(costs), runs_of(stopped)
    variance = learnt_variance(runs)
    after = with_stopped(runs, censored, variance=variance)
    assert after.mean >= runs.mean
    assert runs.count <= after.count <= len(costs) + len(stopped) + 1e-9
    farther = with_stopped(runs, runs_of([2 * c for c in stopped]), variance=variance)
    assert farther.mean >= after.mean * (1 - 1e-9)


def test_a_run_stopped_far_below_the_mean_says_nothing_and_one_far_above_is_a_whole_run() -> None:
    runs = runs_of([9.0, 11.0])
    early = with_stopped(runs, runs_of([1.0, 2.0]), variance=1.0)
    assert early.count == pytest.approx(2.0)
    assert early.mean == pytest.approx(10.0)
    late = with_stopped(runs, runs_of([1e3]), variance=1.0)
    assert late.count == pytest.approx(3.0)
    assert late.mean == pytest.approx(1020 / 3)


def test_censored_runs_are_told_from_complete_ones() -> None:
    rng = np.random.default_rng(3)
    drawn = rng.normal(10.0, 1.0, 4_000)
    complete = runs_of([x for x in drawn if x <= 11.0])
    stopped = runs_of([11.0] * int((drawn > 11.0).sum()))
    as_if_complete = (complete.count * complete.mean + stopped.count * stopped.mean) / 4_000
    believed = with_stopped(complete, stopped, variance=1.0).mean
    assert abs(believed - 10.0) < abs(as_if_complete - 10.0) < abs(complete.mean - 10.0)


def test_an_arm_without_runs_or_prior_is_wholly_unknown() -> None:
    assert observe(Runs(), variance=1.0) == Belief(0.0, math.inf)


def test_draws_follow_the_belief() -> None:
    rng = np.random.default_rng(1)
    draws = [predict({1: Belief(10.0, 4.0)}, rng)[1] for _ in range(2_000)]
    assert np.mean(draws) == pytest.approx(10.0, abs=0.2)
    assert np.std(draws) == pytest.approx(2.0, abs=0.2)
