from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zeus_flows.core.exploration import ROUNDS, PublishedPruning, Step, Tries, next_to_explore, survivors

ARMS = (8, 16, 32, 64, 128)
COSTS = {8: 5.0, 16: 4.0, 32: 3.0, 64: 2.0, 128: 1.0}


class Exploration:
    """Runs what pruning asks for; `fails` names the runs of each arm, counted from 1, that do not reach the target."""

    def __init__(self, fails: dict[int, set[int]], start: int) -> None:
        self.fails, self.start = fails, start
        self.runs: list[int] = []

    def tries(self, arm: int) -> Tries:
        numbers = range(1, self.runs.count(arm) + 1)
        failed = sum(n in self.fails.get(arm, set()) for n in numbers)
        return Tries(len(numbers) - failed, failed)

    @property
    def step(self) -> Step | None:
        reached = [b for b in ARMS if self.tries(b).reached]
        cheapest = min(reached, key=COSTS.__getitem__, default=self.start)
        return next_to_explore(ARMS, default=self.start, cheapest=cheapest, tries=self.tries)

    def go_on(self, most: int = 100) -> list[int]:
        while len(self.runs) < most and (step := self.step) is not None:
            self.runs.append(step.arm)
        return self.runs


FAILS = st.fixed_dictionaries({b: st.sets(st.integers(1, 3)) for b in ARMS})


@given(FAILS, st.sampled_from(ARMS))
def test_pruning_ends_and_runs_no_arm_more_than_twice(fails: dict[int, set[int]], start: int) -> None:
    exploration = Exploration(fails, start)
    runs = exploration.go_on()
    assert exploration.step is None
    assert all(runs.count(b) <= ROUNDS for b in ARMS)


@given(FAILS, st.sampled_from(ARMS))
def test_an_arm_that_failed_is_not_asked_for_again(fails: dict[int, set[int]], start: int) -> None:
    exploration = Exploration(fails, start)
    exploration.go_on()
    for arm in ARMS:
        tries = exploration.tries(arm)
        assert tries.failed <= 1
        assert not tries.failed or tries.reached < ROUNDS


def test_a_round_goes_down_until_a_failure_then_up_and_the_second_begins_at_the_cheapest() -> None:
    fails = {16: {1}}
    assert Exploration(fails, 64).go_on() == [64, 32, 16, 128, 128, 64, 32]


def test_a_failure_in_the_second_round_drops_an_arm_and_those_beyond_it() -> None:
    exploration = Exploration({32: {2}}, 64)
    assert exploration.go_on() == [64, 32, 16, 8, 128, 128, 64, 32]
    assert survivors(ARMS, exploration.tries) == [64, 128]


def test_arms_below_a_default_that_failed_are_tried_all_the_same() -> None:
    assert Exploration({32: {1}}, 32).go_on(most=2) == [32, 16]


def test_where_every_arm_failed_once_those_that_ever_reached_the_target_are_left() -> None:
    seen = {32: Tries(1, 1), 64: Tries(0, 1)}
    assert survivors(ARMS, lambda b: seen.get(b, Tries())) == [32]


def test_a_failure_after_both_rounds_drops_nothing() -> None:
    seen = dict.fromkeys(ARMS, Tries(2, 1))
    assert next_to_explore(ARMS, default=32, cheapest=64, tries=seen.__getitem__) is None
    assert survivors(ARMS, seen.__getitem__) == list(ARMS)


def published(outcomes: dict[int, list[tuple[float, bool]]], start: int) -> tuple[list[int], tuple[int, ...]]:
    """The order and the survivors of the published package's generator, written as its authors wrote it."""
    left, counts = list(ARMS), dict.fromkeys(ARMS, 0)
    order: list[int] = []
    for _ in range(2):
        if start not in left:
            return order, ()
        good: list[int] = []
        index = left.index(start)
        best = np.inf
        for direction in (sorted(left[: index + 1], reverse=True), sorted(left[index + 1 :])):
            for arm in direction:
                order.append(arm)
                cost, ok = outcomes[arm][counts[arm]]
                counts[arm] += 1
                if not ok:
                    break
                if cost < best:
                    best, start = cost, arm
                good.append(arm)
        left = sorted(good)
    return order, tuple(left)


@given(
    st.fixed_dictionaries(
        {b: st.lists(st.tuples(st.floats(1, 100), st.booleans()), min_size=2, max_size=2) for b in ARMS}
    ),
    st.sampled_from(ARMS),
)
def test_the_published_rounds_are_reproduced(outcomes: dict[int, list[tuple[float, bool]]], start: int) -> None:
    order, survivors = published(outcomes, start)
    state, counts, got = PublishedPruning.begin(ARMS, start), dict.fromkeys(ARMS, 0), []
    while (arm := state.expecting) is not None:
        got.append(arm)
        cost, ok = outcomes[arm][counts[arm]]
        counts[arm] += 1
        state = state.report(arm, cost=cost, converged=ok)
    assert got == order
    assert state.arms == survivors
