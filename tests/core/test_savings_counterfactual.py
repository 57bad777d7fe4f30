"""Savings against a counterfactual: simulated histories, with the same random epochs run once more at the default."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from tests.core.savings_world import History, World, live
from zeus_flows.core.savings import BATCH_SIZE, LEARNING, LUCK, POWER_LIMIT, POWER_ONLY, TOTAL, Compared, Line

HISTORIES = 500
FIGURES = ("energy_j", "time_s", "cost_j")
NARROW = 2e-4  # a share of the baseline: an interval that says nothing was in doubt
EXACT = 2e-3


@pytest.fixture(scope="module")
def histories() -> list[History]:
    return [history for seed in range(HISTORIES) if (history := live(World.drawn(seed))).saved.so_far is not None]


def told(so_far: Compared) -> tuple[Line, ...]:
    """Everything that has an interval."""
    assert so_far.power_only is not None
    return (*so_far.lines, so_far.total, so_far.power_only)


@pytest.mark.slow
@pytest.mark.xdist_group("counterfactual")
def test_every_line_and_the_total_lie_within_their_interval_nine_times_in_ten(histories: list[History]) -> None:
    """A line that is exact (nothing to be saved by it, say) does not count as a hit, only as a miss."""
    hits: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    for history in histories:
        so_far, truth = history.saved.so_far, history.truth
        assert so_far is not None
        for line in told(so_far):
            for i, figure in enumerate(FIGURES):
                low, high, whole = (getattr(a, figure) for a in (line.low, line.high, so_far.baseline))
                true = float(truth[line.name][i])
                if high - low > NARROW * whole or abs(true - low) > EXACT * whole:
                    hits[line.name, figure].append(low <= true <= high)
    coverage = {key: (round(float(np.mean(hit)), 3), len(hit)) for key, hit in hits.items()}
    assert {name for name, _ in coverage} == {POWER_LIMIT, BATCH_SIZE, LEARNING, LUCK, TOTAL, POWER_ONLY}
    assert all(0.85 <= share <= 0.95 and number > 200 for share, number in coverage.values()), coverage


@pytest.mark.slow
@pytest.mark.xdist_group("counterfactual")
def test_luck_is_zero_on_average_and_no_line_leans_to_one_side(histories: list[History]) -> None:
    luck, errors = [], defaultdict(list)
    for history in histories:
        so_far, truth = history.saved.so_far, history.truth
        assert so_far is not None
        whole = so_far.baseline.cost_j
        luck.append(float(truth[LUCK][2]) / whole)
        for line in told(so_far):
            errors[line.name].append((line.amount.cost_j - float(truth[line.name][2])) / whole)
    assert abs(np.mean(luck)) < 3 * np.std(luck) / len(luck) ** 0.5
    leans = {name: round(float(np.mean(values)), 4) for name, values in errors.items()}
    assert abs(leans[LUCK]) < 0.002, leans
    assert all(abs(lean) < 0.01 for lean in leans.values()), leans


def test_a_history_in_which_nothing_was_changed_saves_nothing() -> None:
    for seed in range(10):
        world = replace(World.drawn(seed), policy="default", drift_at=None)
        so_far = live(world).saved.so_far
        assert so_far is not None
        for line in (so_far.total, so_far.power_only):
            assert line is not None
            assert line.amount.cost_j == line.low.cost_j == line.high.cost_j == 0.0


def test_a_job_that_tunes_the_power_limit_alone_saves_nothing_against_doing_just_that() -> None:
    for seed in range(10):
        world = replace(World.drawn(seed), policy="power", drift_at=None, failures=0.0, control=None)
        so_far = live(world).saved.so_far
        assert so_far is not None
        learning = so_far.line(LEARNING)
        assert so_far.power_only is not None
        assert learning is not None
        assert so_far.power_only.amount.cost_j == pytest.approx(learning.amount.cost_j)  # what profiling took
        assert so_far.total.amount.cost_j >= so_far.power_only.amount.cost_j


def test_control_runs_are_measured_against() -> None:
    world = replace(World.drawn(7), control=5, failures=0.0, recurrences=40)
    plain, controlled = live(replace(world, control=None)).saved, live(world).saved
    assert controlled.default.controls == 8
    assert plain.so_far is not None
    assert controlled.so_far is not None
    widths = [s.total.high.cost_j - s.total.low.cost_j for s in (plain.so_far, controlled.so_far)]
    assert widths[1] < widths[0]
