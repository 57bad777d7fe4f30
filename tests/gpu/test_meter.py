from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.nvml_emulator import Emulator
from zeus_flows.errors import DeviceError, DeviceLost
from zeus_flows.gpu.meter import DeviceCounter, Meter, SampledCounter, update_period_s
from zeus_flows.gpu.nvml import Nvml
from zeus_flows.gpu.simulated import Load, VirtualClock

RESNET = Load(3554.0, 238.0, active=0.92, clock_bound=0.52)


class Scripted:
    """A counter that answers what it is told to, or raises it."""

    faults = 0

    def __init__(self, *answers: float | Exception) -> None:
        self.answers = list(answers)

    def energy_j(self) -> float:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def span_of(*answers: float | Exception, seconds: float = 1.0) -> Any:
    """Return the span from the first to the last answer; those between are read on the way."""
    clock = VirtualClock()
    meter = Meter([Scripted(*answers)], [250.0], clock)
    start = end = meter.mark()
    for _ in answers[1:]:
        clock.advance(seconds)
        end = meter.mark()
    return meter.between(start, end)


def test_a_span_is_a_difference_of_readings() -> None:
    assert span_of(1000.0, 1100.0) == (1.0, 100.0, (100.0,), True)


def test_a_failed_reading_at_the_end_keeps_what_was_known_and_says_so() -> None:
    span = span_of(1000.0, 1100.0, DeviceError("busy"))
    assert span.energy_j == 100.0
    assert span.time_s == 2.0
    assert not span.complete


def test_a_failed_reading_at_the_start_knows_nothing_and_is_no_silent_zero() -> None:
    span = span_of(DeviceError("busy"), 1100.0)
    assert span.per_gpu_j == (None,)
    assert not span.complete


def test_a_failed_reading_between_the_edges_does_no_harm() -> None:
    assert span_of(1000.0, DeviceError("busy"), 1200.0).complete


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_a_reading_that_is_no_energy_makes_the_span_incomplete(bad: float) -> None:
    assert not span_of(1000.0, bad).complete
    assert not span_of(bad, 1000.0).complete


def test_a_counter_that_was_reset_makes_the_span_incomplete_even_after_it_caught_up() -> None:
    assert not span_of(1000.0, 10.0).complete
    assert not span_of(1000.0, 10.0, 1100.0).complete


def test_a_counter_that_stands_still_makes_the_span_incomplete() -> None:
    assert not span_of(1000.0, 1000.0).complete


def test_a_span_shorter_than_a_counters_tick_may_have_no_energy() -> None:
    assert span_of(1000.0, 1000.0, seconds=0.05).complete


def test_more_energy_than_the_gpu_can_draw_is_not_believed() -> None:
    span = span_of(1000.0, 1e9)
    assert span.energy_j == 0.0
    assert not span.complete


def test_a_lost_gpu_is_not_a_failed_reading() -> None:
    with pytest.raises(DeviceLost):
        span_of(1000.0, DeviceLost("gone"))


def test_one_bad_gpu_of_two_leaves_the_other_ones_energy() -> None:
    clock = VirtualClock()
    meter = Meter([Scripted(1.0, 101.0), Scripted(0.0, DeviceError("busy"))], [250.0, 250.0], clock)
    start = meter.mark()
    clock.advance(1.0)
    span = meter.between(start, meter.mark())
    assert span.energy_j == 100.0
    assert span.per_gpu_j == (100.0, None)
    assert not span.complete


def test_without_counters_only_time_is_measured() -> None:
    clock = VirtualClock()
    meter = Meter([], [], clock)
    start = meter.mark()
    clock.advance(3.0)
    assert meter.between(start, meter.mark()) == (3.0, 0.0, (), True)


ODD: list[float | Exception] = [math.nan, math.inf, -math.inf, -1.0, 0.0, DeviceError("busy")]
readings = st.one_of(st.floats(0, 1e6), st.floats(), st.sampled_from(ODD))


@given(st.lists(readings, min_size=2, max_size=6))
def test_no_reading_however_bad_reaches_a_complete_span(answers: list[float | Exception]) -> None:
    check_that_a_complete_span_is_honest(answers)


def a_reading(chance: random.Random) -> float | Exception:
    """Draw one as `readings` does, and such as may pass for good; any 64 bits are a number."""
    match chance.randrange(4):
        case 0:
            return chance.uniform(0, 1e6)
        case 3:
            return chance.uniform(0, 1e3)
        case 1:
            return float(struct.unpack("<d", chance.randbytes(8))[0])
        case _:
            return chance.choice(ODD)


@settings(max_examples=10)
@given(st.integers(0, 2**64 - 1))
def test_no_reading_of_ten_thousand_reaches_a_complete_span(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(1_000):
        check_that_a_complete_span_is_honest([a_reading(chance) for _ in range(chance.randint(2, 6))])


def check_that_a_complete_span_is_honest(answers: list[float | Exception]) -> None:
    span = span_of(*answers)
    assert math.isfinite(span.energy_j)
    assert span.energy_j >= 0
    good = [a for a in answers if not isinstance(a, Exception) and math.isfinite(a) and a >= 0]
    honest = good == sorted(good) and answers[0] in good and answers[-1] in good
    if span.complete:
        assert honest
        assert span.energy_j == pytest.approx(good[-1] - good[0])
        assert 0 < span.energy_j <= 1.5 * 250 * (len(answers) + 1)


class Sensor:
    """A GPU of which only the power is known."""

    def __init__(self, *watts: float | Exception) -> None:
        self.watts = list(watts)

    def power_w(self) -> float:
        watts = self.watts.pop(0) if len(self.watts) > 1 else self.watts[0]
        if isinstance(watts, Exception):
            raise watts
        return watts


def sampled(sensor: Sensor, clock: VirtualClock) -> SampledCounter:
    return SampledCounter(sensor, clock)  # type: ignore[arg-type]


def test_constant_power_integrates_to_its_energy_and_not_to_nothing() -> None:
    clock = VirtualClock()
    counter = sampled(Sensor(100.0), clock)
    start = counter.energy_j()
    for _ in range(10):
        clock.advance(0.05)
        counter.sample()
    assert counter.energy_j() - start == pytest.approx(50.0)


def test_the_last_sample_holds_until_the_edge_of_the_span() -> None:
    clock = VirtualClock()
    counter = sampled(Sensor(100.0, 200.0, 50.0), clock)
    start = counter.energy_j()
    clock.advance(1.0)
    counter.sample()
    clock.advance(2.0)
    assert counter.energy_j() - start == pytest.approx(100.0 + 400.0)


@pytest.mark.parametrize("bad", [DeviceError("busy"), math.nan, 0.0, -5.0])
def test_a_sample_that_failed_makes_spans_across_it_incomplete(bad: float | Exception) -> None:
    clock = VirtualClock()
    counter = sampled(Sensor(100.0, bad, 100.0), clock)
    meter = Meter([counter], [250.0], clock)
    start = meter.mark()
    clock.advance(0.1)
    counter.sample()
    clock.advance(0.1)
    assert not meter.between(start, meter.mark()).complete


def test_a_long_gap_between_samples_makes_spans_across_it_incomplete() -> None:
    clock = VirtualClock()
    meter = Meter([sampled(Sensor(100.0), clock)], [250.0], clock)
    start = meter.mark()
    clock.advance(60.0)
    middle = meter.mark()
    clock.advance(1.0)
    assert not meter.between(start, meter.mark()).complete
    assert meter.between(middle, meter.mark()).complete


def test_a_gpu_lost_between_two_spans_is_told_at_the_next() -> None:
    clock = VirtualClock()
    counter = sampled(Sensor(100.0, DeviceLost("gone"), 100.0), clock)
    counter.sample()
    counter.sample()
    with pytest.raises(DeviceLost):
        counter.energy_j()


def test_the_period_of_a_sensor_is_found_out(emulate: Callable[..., Emulator]) -> None:
    emulator = emulate(NVMLEMU_CLOCK="virtual", NVMLEMU_UPDATE_MS="20")
    device = Nvml().devices()[0]
    assert update_period_s(device.energy_j, emulator.now, emulator.advance) == pytest.approx(0.02, abs=0.002)
    assert update_period_s(device.power_w, emulator.now, emulator.advance) is None


@pytest.mark.parametrize("period_ms", ["20", "100"])
def test_five_second_spans_on_a_slow_counter_err_by_less_than_a_hundredth_on_average(
    emulate: Callable[..., Emulator], period_ms: str
) -> None:
    emulator = emulate(NVMLEMU_CLOCK="virtual", NVMLEMU_UPDATE_MS=period_ms)
    device = Nvml().devices()[0]
    meter = Meter([DeviceCounter(device)], [250.0], emulator.now)
    emulator.load(RESNET)
    errors = []
    for i in range(50):
        emulator.advance(0.0137 * i)
        start, exact = meter.mark(), emulator.joules()
        emulator.advance(5.0)
        span = meter.between(start, meter.mark())
        assert span.complete
        errors.append(abs(span.energy_j / (emulator.joules() - exact) - 1))
    assert sum(errors) / len(errors) < 0.01
