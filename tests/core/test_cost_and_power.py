from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.builders import V100, job, profile
from zeus_flows.core.cost import attempt_cost, cost_rate, energy_to_accuracy, epochs_cost
from zeus_flows.core.job import Selector
from zeus_flows.core.power import best_setting, cost_per_sample, epoch_cost
from zeus_flows.core.power_profile import PowerProfile, SettingMeasurement
from zeus_flows.errors import MeasurementError

POSITIVE = st.floats(min_value=1e-3, max_value=1e6)
PROFILES = st.lists(st.tuples(POSITIVE, POSITIVE, POSITIVE), min_size=1, max_size=8).map(
    lambda rows: PowerProfile(32, V100, tuple(SettingMeasurement(*row) for row in rows))
)


@given(POSITIVE, POSITIVE, st.floats(0, 1))
def test_cost_lies_between_pure_energy_and_pure_time(energy_j: float, time_s: float, eta: float) -> None:
    cost = attempt_cost(energy_j=energy_j, time_s=time_s, eta=eta, max_power_w=300.0)
    low, high = sorted((energy_j, 300.0 * time_s))
    assert low * (1 - 1e-12) <= cost <= high * (1 + 1e-12)


@given(POSITIVE, POSITIVE, POSITIVE, st.floats(0, 1))
def test_the_decoupled_cost_equals_the_cost_of_the_whole_run(
    epochs: float, power_w: float, epochs_per_s: float, eta: float
) -> None:
    time_s = epochs / epochs_per_s
    energy_j = energy_to_accuracy(time_to_accuracy_s=time_s, average_power_w=power_w)
    whole = attempt_cost(energy_j=energy_j, time_s=time_s, eta=eta, max_power_w=250.0)
    decoupled = epochs_cost(
        epochs=epochs, average_power_w=power_w, epochs_per_s=epochs_per_s, eta=eta, max_power_w=250.0
    )
    assert whole == pytest.approx(decoupled)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_reading_that_cannot_be_believed_is_refused(bad: float) -> None:
    with pytest.raises(MeasurementError):
        attempt_cost(energy_j=bad, time_s=1.0, eta=0.5, max_power_w=250.0)


@given(PROFILES, st.floats(0, 1))
def test_no_limit_is_cheaper_than_the_best_one(a_profile: PowerProfile, eta: float) -> None:
    a_job = job(eta=eta)
    best = cost_per_sample(a_job, a_profile, best_setting(a_job, a_profile))
    assert all(best <= cost_per_sample(a_job, a_profile, m) for m in a_profile.measurements)
    assert epoch_cost(a_job, a_profile, samples_per_epoch=100) == pytest.approx(100 * best)


@given(PROFILES)
def test_the_time_selector_takes_the_fastest_limit(a_profile: PowerProfile) -> None:
    fastest = max(m.samples_per_s for m in a_profile.measurements)
    chosen = best_setting(job(selector=Selector.TIME), a_profile)
    assert chosen.samples_per_s >= fastest * (1 - 1e-12)


@given(PROFILES, st.floats(1.0, 2.0))
def test_a_bound_on_slowdown_is_kept(a_profile: PowerProfile, slowdown: float) -> None:
    chosen = best_setting(job(selector=Selector.MAX_SLOWDOWN, slowdown=slowdown), a_profile)
    fastest = max(m.samples_per_s for m in a_profile.measurements)
    assert chosen.samples_per_s * slowdown >= fastest
    allowed = [m for m in a_profile.measurements if m.samples_per_s * slowdown >= fastest]
    energy = min(m.average_power_w / m.samples_per_s for m in allowed)
    assert chosen.average_power_w / chosen.samples_per_s == pytest.approx(energy)


@given(PROFILES)
def test_the_energy_selector_takes_the_least_energy(a_profile: PowerProfile) -> None:
    chosen = best_setting(job(selector=Selector.ENERGY), a_profile)
    least = min(m.average_power_w / m.samples_per_s for m in a_profile.measurements)
    assert chosen.average_power_w / chosen.samples_per_s == pytest.approx(least)


def test_ties_go_to_the_greater_limit() -> None:
    even = PowerProfile(32, V100, (SettingMeasurement(100.0, 80.0, 10.0), SettingMeasurement(200.0, 80.0, 10.0)))
    assert best_setting(job(), even).setting == 200.0


def test_a_profile_without_measurements_has_no_best_limit() -> None:
    with pytest.raises(MeasurementError):
        best_setting(job(), PowerProfile(32, V100, ()))


def test_cost_rate_prices_time_at_the_greatest_power() -> None:
    assert cost_rate(average_power_w=100.0, eta=0.25, max_power_w=200.0) == 175.0


def test_larger_batches_of_the_made_up_profile_are_cheaper() -> None:
    costs = [epoch_cost(job(), profile(b), samples_per_epoch=1_000) for b in (8, 32, 128)]
    assert costs == sorted(costs, reverse=True)
