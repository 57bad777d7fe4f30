from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.builders import ARMS
from zeus_flows.core.belief import EpochsBelief, Seen, censored
from zeus_flows.core.epoch_costs import epoch_costs
from zeus_flows.core.job import Job
from zeus_flows.core.surprise import Surprises

RUNS = st.lists(st.tuples(st.sampled_from(ARMS), st.integers(5, 9)), max_size=15)


JOB = Job("t", ARMS, 32, 100)
NO_CHANGE = 1e-2  # deviations: a stop is told as a Gaussian, a mixture of laws is none


def believe(runs: list[tuple[int, int]], job: Job = JOB) -> EpochsBelief:
    belief = EpochsBelief.empty(ARMS, 32)
    for batch_size, epochs in runs:
        belief = belief.complete(job, batch_size, epochs)
    return belief


def test_a_run_teaches_about_neighbouring_batch_sizes() -> None:
    before, after = EpochsBelief.empty(ARMS, 32).posterior, believe([(32, 20)]).posterior
    arm = ARMS.index(64)
    assert after.variance[arm] < 0.01 * before.variance[arm]
    assert after.mean[arm] == pytest.approx(math.log(20), abs=0.3)


def test_a_far_arm_is_less_certain_than_a_near_one() -> None:
    variance = believe([(32, 20)]).posterior.variance
    assert variance[ARMS.index(32)] < variance[ARMS.index(64)] < variance[ARMS.index(128)]


def test_many_runs_of_an_arm_win_over_its_neighbours() -> None:
    belief = EpochsBelief.empty(ARMS, 32)
    for epochs, batch_size in [(10, 16), (10, 64)] + [(14, 32)] * 30:
        belief = belief.complete(JOB, batch_size, epochs)
    assert belief.posterior.mean[ARMS.index(32)] == pytest.approx(math.log(14), abs=0.02)


@given(RUNS, st.sampled_from(ARMS), st.integers(1, 50))
def test_a_stopped_run_never_makes_an_arm_look_better(runs: list[tuple[int, int]], arm: int, epochs: int) -> None:
    belief = believe(runs)
    stopped = belief.stop(arm, epochs, max_epochs=100)
    i = ARMS.index(arm)
    assert stopped.posterior.mean[i] >= belief.posterior.mean[i] - NO_CHANGE * math.sqrt(belief.posterior.variance[i])
    if math.log(epochs + 0.5) <= belief.posterior.mean[i]:
        assert stopped.posterior.variance[i] <= 1.05 * belief.posterior.variance[i], "only a surprise may widen it"


@given(RUNS, st.sampled_from(ARMS), st.lists(st.integers(1, 50), min_size=2, max_size=4))
def test_an_arm_that_is_stopped_again_keeps_what_the_stops_before_said(
    runs: list[tuple[int, int]], arm: int, stops: list[int]
) -> None:
    belief, i = believe(runs), ARMS.index(arm)
    for epochs in stops:
        before, belief = belief.posterior, belief.stop(arm, epochs, max_epochs=100)
        assert belief.posterior.mean[i] >= before.mean[i] - NO_CHANGE * math.sqrt(before.variance[i])


@given(st.floats(0.5, 3.5), st.floats(0.05, 0.5), st.floats(0.05, 0.3))
def test_a_stop_matches_the_moments_of_a_truncated_belief(at: float, deviation: float, noise: float) -> None:
    rng = np.random.default_rng(0)
    drawn, believed = rng.normal(2.0, deviation, 200_000), Seen(2.0, deviation**2)
    drawn = drawn[drawn + rng.normal(0, noise, drawn.size) > at]
    believed += censored(at, mean=believed.log_epochs, variance=believed.variance, noise=noise**2)
    if drawn.size < 4_000:
        return
    assert believed.log_epochs == pytest.approx(drawn.mean(), abs=0.05 * deviation)
    assert math.sqrt(believed.variance) == pytest.approx(drawn.std(), rel=0.1)


def test_completing_takes_back_what_a_stop_said() -> None:
    stopped = believe([(32, 8)]).stop(64, 20, max_epochs=50)
    assert stopped.complete(JOB, 64, 9).unfinished[ARMS.index(64)] is None


def test_an_arm_is_dead_only_after_the_longest_run_without_ever_completing() -> None:
    i = ARMS.index(64)
    assert not believe([(32, 8)]).stop(64, 49, max_epochs=50).dead[i]
    assert believe([(32, 8)]).stop(64, 50, max_epochs=50).dead[i]
    assert not believe([(64, 8)]).stop(64, 50, max_epochs=50).dead[i]


def test_two_equal_runs_never_make_an_arm_certain() -> None:
    p = believe([(32, 8)] * 2).posterior
    assert p.noise[ARMS.index(32)] > 0.06**2


def test_a_window_forgets_old_runs() -> None:
    belief = believe([(32, 10), (32, 10), (32, 11), (32, 11)], replace(JOB, window=2))
    assert belief.completed[ARMS.index(32)].count == 2
    assert belief.completed[ARMS.index(32)].mean == pytest.approx(math.log(11))


def test_a_great_surprise_forgets_epochs() -> None:
    belief = believe([(32, 10)] * 5 + [(64, 12)]).stop(8, 50, max_epochs=50)
    after = belief.complete(JOB, 32, 40)
    assert after.resets == 1
    assert list(after.runs) == [0, 0, 1, 0, 0]
    assert True not in after.dead, "dead is not for ever after a drift"


def test_two_lesser_surprises_in_a_row_forget_and_the_first_is_kept() -> None:
    belief = believe([(32, 20)] * 6)
    once = belief.complete(JOB, 32, 26)
    assert once.resets == 0
    twice = once.complete(JOB, 32, 32)
    assert twice.resets == 1
    assert twice.completed[ARMS.index(32)].count == 2


@given(st.lists(st.integers(19, 21), min_size=1, max_size=30))
def test_ordinary_noise_is_no_drift(epochs: list[int]) -> None:
    assert believe([(32, e) for e in epochs]).resets == 0


@given(st.lists(st.floats(-10, 10), max_size=8))
def test_drift_looks_the_same_in_both_directions(surprises: list[float]) -> None:
    one = two = Surprises()
    for z in surprises:
        one, two = one.add(z), two.add(-z)
    assert one.drifted == two.drifted


def test_small_surprises_that_keep_to_one_side_add_up() -> None:
    surprises, steps = Surprises(), 0
    while not surprises.drifted:
        surprises, steps = surprises.add(1.8), steps + 1
    assert 4 <= steps <= 8


def test_a_measured_epoch_cost_is_believed_and_others_follow_it() -> None:
    mean, covariance = epoch_costs(ARMS, 32, {32: 100.0, 64: 80.0})
    assert math.exp(mean[ARMS.index(64)]) == pytest.approx(80.0, rel=1e-3)
    assert covariance[ARMS.index(64), ARMS.index(64)] < 1e-6
    assert covariance[ARMS.index(128), ARMS.index(128)] > 1e-3
    assert math.exp(mean[ARMS.index(128)]) < 100.0


def test_the_nearest_profiled_arm_stands_in_for_a_default_without_a_profile() -> None:
    mean, covariance = epoch_costs(ARMS, 32, {16: 100.0})
    assert math.exp(mean[ARMS.index(16)]) == pytest.approx(100.0)
    assert covariance[ARMS.index(32), ARMS.index(32)] > 0


def test_costs_of_another_gpu_are_believed_less() -> None:
    mean, covariance = epoch_costs(ARMS, 32, {32: 100.0}, [{32: 50.0, 128: 30.0}])
    i = ARMS.index(128)
    assert math.exp(mean[i]) == pytest.approx(60.0, rel=0.1)
    assert 0.05 < math.sqrt(covariance[i, i]) < 0.2
