"""Iterations that nobody tells of are counted by the period that the GPUs show."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from zeus_flows.core.power_profile import Knob
from zeus_flows.errors import DeviceError
from zeus_flows.training.forms.iterations import GIVE_UP_S, Iterations

BATCH = 64


class World:
    """A training seen from outside: what it draws, on a clock that the test moves.

    Attributes:
        now_s: The time.
        setting: The clock that the GPU is locked to, of 1380 MHz.
        period_s: What an iteration takes at the full clock; three quarters of it follow the clock.
        start_s: When the training begins.
        done: Iterations that it has really made.
    """

    def __init__(self, period_s: float = 1.0, start_s: float = 0.0, *, knob: Knob = Knob.CLOCKS) -> None:
        self.now_s, self.setting, self.period_s, self.start_s, self.done = 0.0, 1380.0, period_s, start_s, 0.0
        self._noise = random.Random(1)
        self.iterations = Iterations(self.read, lambda: self.setting, knob, lambda: self.now_s)
        self.told = 0.0

    @property
    def takes_s(self) -> float:
        return self.period_s * (0.25 + 0.75 * 1380.0 / self.setting)

    def read(self) -> tuple[float, ...]:
        if self.now_s < self.start_s:
            return 35.0 + self._noise.uniform(0, 2), 0.0, 0.0
        busy = self.done % 1.0 < 0.7
        return (230.0 if busy else 90.0) + self._noise.uniform(-5, 5), 95.0 if busy else 10.0, 40.0 if busy else 5.0

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time go by; stop where there is nothing more to wait for."""
        end_s = self.now_s + seconds
        while self.now_s < end_s and not until():
            self.now_s += 0.1
            if self.now_s >= self.start_s:
                self.done += 0.1 / self.takes_s
            self.iterations.sample()
            self.told += self.iterations.passed(BATCH) / BATCH


@pytest.mark.parametrize("period_s", [0.6, 1.0, 3.0])
def test_iterations_are_counted_from_when_the_gpu_began_to_work(period_s: float) -> None:
    world = World(period_s, start_s=7.0)
    world.run(10 * period_s + 40)
    assert world.iterations.found
    assert world.told == pytest.approx(world.done, abs=1 + 0.03 * world.done)


def test_nothing_is_told_at_another_clock_before_its_own_period_is_known() -> None:
    world = World()
    world.run(30.0)
    told, done = world.told, world.done
    world.setting = 690.0
    world.run(3.0)
    assert world.told == told, "two iterations show no period"
    world.run(40.0)
    assert world.told - told == pytest.approx(world.done - done, abs=2 + 0.03 * (world.done - done))


def test_the_count_holds_over_several_clocks_up_and_down() -> None:
    world = World(0.8)
    for setting in (1380.0, 1200.0, 900.0, 1050.0, 1380.0):
        world.setting = setting
        world.run(30.0)
    assert world.told == pytest.approx(world.done, rel=0.04)


def test_power_limits_are_told_apart_in_the_same_way() -> None:
    world = World(knob=Knob.POWER_LIMIT)
    world.run(30.0)
    world.setting = 1100.0  # stands for the next lower limit
    before = world.told, world.done
    world.run(30.0)
    assert world.told - before[0] == pytest.approx(world.done - before[1], rel=0.06)


def test_what_is_left_of_an_epoch_is_told_at_its_end() -> None:
    world = World()
    world.run(30.0)
    left = world.iterations.rest(BATCH) / BATCH
    assert world.told + left == pytest.approx(world.done, abs=1)
    assert world.iterations.rest(BATCH) == 0


def test_a_training_without_a_period_is_given_up_on_and_never_told_of() -> None:
    world = World(start_s=10 * GIVE_UP_S)
    world.run(GIVE_UP_S + 5)
    assert (world.told, world.iterations.found) == (0, False)
    assert world.iterations.why_not
    assert world.iterations.rest(BATCH) == 0


def test_a_sample_that_fails_is_left_out() -> None:
    world = World()
    fails = iter([DeviceError("busy")] * 20)
    read = world.iterations._read

    def sometimes() -> object:
        if int(world.now_s * 10) % 9 == 0 and (error := next(fails, None)) is not None:
            raise error
        return read()

    world.iterations._read = sometimes  # type: ignore[assignment]
    world.run(40.0)
    assert world.told == pytest.approx(world.done, abs=2)
