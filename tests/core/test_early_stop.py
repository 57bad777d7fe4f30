from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from zeus_flows.core.early_stop import CostCut, NoCut, PlannedCut, epochs_allowed, plan, plan_many

CUTS = st.builds(
    PlannedCut,
    log_epochs=st.floats(0, 5),
    variance=st.floats(1e-4, 4),
    noise=st.floats(1e-4, 1),
    never=st.floats(0, 0.2),
    best_cost_j=st.floats(1, 1e4),
    horizon=st.floats(0, 50),
)


def expected_cost(cut: PlannedCut, k: int, c: float) -> float:
    """J(K), term by term as policy text has it."""
    spread = cut.variance + cut.noise

    def reached(e: int) -> float:
        if e == 0:
            return 0.0
        return (1 - cut.never) * float(ndtr((math.log(e + 0.5) - cut.log_epochs) / math.sqrt(spread)))

    total = (1 - reached(k)) * (k * c + cut.best_cost_j)
    for e in range(1, k + 1):
        after = c * math.exp(cut.log_epochs + cut.variance / spread * (math.log(e) - cut.log_epochs) + 0.5 * cut.noise)
        total += (reached(e) - reached(e - 1)) * (e * c - cut.horizon * max(cut.best_cost_j - after, 0))
    return total


@given(CUTS, st.floats(0.1, 1e3))
def test_the_plan_is_the_least_of_all_cuts_written_out(cut: PlannedCut, epoch_cost_j: float) -> None:
    k, cost = plan(cut, epoch_cost_j=epoch_cost_j, max_epochs=8)
    by_hand = [expected_cost(cut, k, epoch_cost_j) for k in range(1, 9)]
    assert cost == pytest.approx(min(by_hand), rel=1e-9, abs=1e-6)
    assert by_hand[k - 1] == pytest.approx(min(by_hand), rel=1e-9, abs=1e-6)


@given(st.lists(CUTS, min_size=1, max_size=4), st.floats(0.1, 1e3))
def test_planning_many_arms_at_once_is_planning_each(cuts: list[PlannedCut], epoch_cost_j: float) -> None:
    shared = cuts[0]
    costs = plan_many(
        log_epochs=np.array([c.log_epochs for c in cuts]),
        variance=np.array([c.variance for c in cuts]),
        noise=np.array([c.noise for c in cuts]),
        never=np.array([c.never for c in cuts]),
        epoch_cost_j=np.full(len(cuts), epoch_cost_j),
        best_cost_j=shared.best_cost_j,
        horizon=shared.horizon,
        max_epochs=12,
    )
    for i, c in enumerate(cuts):
        alone = PlannedCut(c.log_epochs, c.variance, c.noise, c.never, shared.best_cost_j, shared.horizon)
        _, cost = plan(alone, epoch_cost_j=epoch_cost_j, max_epochs=12)
        assert cost == pytest.approx(costs[i])


@given(CUTS, st.floats(0.1, 1e3), st.integers(1, 40))
def test_a_cut_never_allows_more_than_the_longest_run(cut: PlannedCut, epoch_cost_j: float, max_epochs: int) -> None:
    for rule in (cut, NoCut(), CostCut(1e9), CostCut(math.inf)):
        assert 0 <= epochs_allowed(rule, epoch_cost_j=epoch_cost_j, max_epochs=max_epochs) <= max_epochs


def test_an_arm_that_completed_before_gets_its_usual_epochs() -> None:
    hopeless = PlannedCut(2.0, 0.1, 0.01, 0.0, best_cost_j=1.0, horizon=10.0, at_least=11)
    assert epochs_allowed(hopeless, epoch_cost_j=100.0, max_epochs=50) == 11
