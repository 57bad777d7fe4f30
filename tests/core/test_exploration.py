from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zeus_flows.core.exploration import PublishedPruning, next_in_round

ARMS = (8, 16, 32, 64, 128)


@given(st.sets(st.sampled_from(ARMS)), st.sampled_from(ARMS), st.integers(1, 2))
def test_a_round_never_loops(good: set[int], start: int, round_number: int) -> None:
    runs = dict.fromkeys(ARMS, 0)
    for _ in range(round_number * len(ARMS)):
        arm = next_in_round(
            ARMS, start=start, round_number=round_number, runs=lambda b: runs[b], converged=lambda b: b in good
        )
        if arm is None:
            return
        runs[arm] += 1
    assert (
        next_in_round(
            ARMS, start=start, round_number=round_number, runs=lambda b: runs[b], converged=lambda b: b in good
        )
        is None
    )


def test_a_round_goes_down_until_a_failure_then_up() -> None:
    good = {64, 32, 128}
    tried: list[int] = []
    while True:
        arm = next_in_round(ARMS, start=64, round_number=1, runs=tried.count, converged=lambda b: b in good)
        if arm is None:
            break
        tried.append(arm)
    assert tried == [64, 32, 16, 128]


def test_arms_below_a_default_that_failed_are_tried_all_the_same() -> None:
    tried = [32]
    assert next_in_round(ARMS, start=32, round_number=1, runs=tried.count, converged=lambda b: False) == 16


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
