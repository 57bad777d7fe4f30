"""Periods found in made-up traces, and none found where there is none; `benchmarks/clocks.py` has the rates on many."""

from __future__ import annotations

import numpy as np
import pytest
from clock_traces import AIMLESS, SENSORS, Sensor, aimless, periodic
from hypothesis import given
from hypothesis import strategies as st

from zeus_flows.core.period import Aperiodic, GpuTrace, Period, changed, detect_period, evenly, stretched
from zeus_flows.errors import MeasurementError


def found(period_s: float, seed: int, **kinds: object) -> float | None:
    trace, true_s = periodic(period_s, max(40.0, 8 * period_s), np.random.default_rng(seed), **kinds)  # type: ignore[arg-type]
    period = detect_period(trace)
    return period.period_s / true_s if isinstance(period, Period) else None


@pytest.mark.parametrize("sensor", ["quick", "seldom", "100 ms mean"])
@pytest.mark.parametrize("period_s", [0.6, 1.0, 3.0, 10.0])
def test_most_periods_are_found_within_two_per_cent_and_no_wrong_one(period_s: float, sensor: str) -> None:
    ratios = [found(period_s, seed, sensor=SENSORS[sensor]) for seed in range(5)]
    assert all(ratio is None or abs(ratio - 1) < 0.02 for ratio in ratios)
    assert sum(ratio is not None for ratio in ratios) >= 4


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("kind", AIMLESS)
def test_noise_walks_and_drifts_have_no_period(kind: str, alike: bool) -> None:
    traces = [aimless(kind, 300, np.random.default_rng(seed), alike=alike) for seed in range(8)]
    assert all(isinstance(detect_period(trace), Aperiodic) for trace in traces)


def test_a_drift_does_not_hide_a_period() -> None:
    trace, true_s = periodic(2.0, 40.0, np.random.default_rng(0))
    warmer = GpuTrace(trace.step_s, trace.power_w * np.linspace(0.8, 1.2, len(trace.power_w)), trace.others)
    period = detect_period(warmer)
    assert isinstance(period, Period)
    assert period.period_s == pytest.approx(true_s, rel=0.02)


def test_power_alone_and_further_metrics_serve_as_well() -> None:
    trace, true_s = periodic(2.0, 40.0, np.random.default_rng(1))
    against = 100 - trace.others[0]  # a metric that falls when power rises
    for channels in ((), (against,), (*trace.others, against, trace.others[1])):
        period = detect_period(GpuTrace(trace.step_s, trace.power_w, channels))
        assert isinstance(period, Period)
        assert period.period_s == pytest.approx(true_s, rel=0.02)


def test_a_period_that_begins_late_in_the_trace_is_not_stable() -> None:
    before = aimless("noise", 300, np.random.default_rng(2), alike=True)
    after, _ = periodic(1.0, 30.0, np.random.default_rng(2))
    joined = GpuTrace(0.1, np.r_[after.power_w, before.power_w])
    assert isinstance(detect_period(joined), Aperiodic)


def test_a_period_shorter_than_five_updates_of_the_sensor_is_never_reported() -> None:
    for period_s in (0.3, 0.6, 0.9):
        trace, _ = periodic(period_s, 40.0, np.random.default_rng(3), sensor=Sensor(update_s=0.2))
        period = detect_period(trace)
        assert isinstance(period, Aperiodic) or period.period_s >= 5 * 0.2


def test_readings_at_irregular_times_keep_short_iterations_from_showing_a_false_period() -> None:
    regular, irregular = (
        sum(found(period_s, 4, sensor=Sensor(irregular=share)) is not None for period_s in np.linspace(0.06, 0.16, 20))
        for share in (0.0, 0.15)
    )
    assert regular >= 5
    assert irregular <= 1


def test_a_few_samples_are_too_few() -> None:
    why = detect_period(GpuTrace(0.1, np.arange(20.0)))
    assert isinstance(why, Aperiodic)
    assert "too few" in why.why


def test_at_a_slower_clock_the_same_multiple_is_asked_for() -> None:
    slower, true_s = periodic(1.0, 40.0, np.random.default_rng(5))
    period = detect_period(slower, within=stretched(2 * 0.9, clock=1380.0, to=1100.0))  # two iterations of 0.9 s before
    assert isinstance(period, Period)
    assert period.period_s == pytest.approx(2 * true_s, rel=0.02)


@pytest.mark.parametrize(
    ("now", "other_work"),
    [
        (Period(1.05, 0.1, 205.0), False),
        (Period(1.20, 0.1, 200.0), True),
        (Period(0.85, 0.1, 200.0), True),
        (Period(1.0, 0.1, 230.0), True),
        (Aperiodic("no period stands out"), True),
    ],
)
def test_another_period_or_power_means_to_start_over(now: Period | Aperiodic, other_work: bool) -> None:
    assert changed(Period(1.0, 0.1, 200.0), now) == other_work


def test_channels_of_other_lengths_and_readings_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(MeasurementError):
        GpuTrace(0.1, np.zeros(10), (np.zeros(9),))
    with pytest.raises(MeasurementError):
        GpuTrace(0.1, np.array([1.0, np.nan]))
    with pytest.raises(MeasurementError):
        GpuTrace(0.0, np.zeros(10))


@given(st.lists(st.floats(0.0, 1e4), min_size=0, max_size=80), st.floats(0.01, 1.0))
def test_whatever_was_sampled_has_an_answer(power_w: list[float], step_s: float) -> None:
    period = detect_period(GpuTrace(step_s, np.array(power_w)))
    if isinstance(period, Period):
        assert 5 * step_s <= period.period_s * 1.05
        assert 0 <= period.error <= 0.5


def test_nothing_sampled_is_nothing() -> None:
    assert [len(channel) for channel in evenly([], [[], []], step_s=0.1)] == [0, 0]
