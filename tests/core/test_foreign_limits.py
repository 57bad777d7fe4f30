"""An attempt during which somebody else set the power limit: its epochs teach, its joules are only spent."""

from __future__ import annotations

from dataclasses import replace

from tests.core.builders import V100, ask, job, observation
from zeus_flows.core import policy
from zeus_flows.core.power_profile import Part, Parts
from zeus_flows.core.records import Observation

PARTS = Parts(once=Part(1, 100.0, 1.0), rest=Part(9, 900.0, 9.0))


def foreign(observed: Observation, times: float = 3.0) -> Observation:
    """Return an attempt that somebody else's limit made dearer."""
    return replace(observed, energy_j=times * observed.energy_j, time_s=times * observed.time_s, foreign_limit_w=180.0)


def test_its_energy_counts_as_spent_and_not_as_a_cost_of_the_arm() -> None:
    a_job = job("zeus")
    before = [observation(1, 32, 9, profiled=True), observation(2, 32, 9)]
    ours, others = observation(3, 32, 9), foreign(observation(3, 32, 9))
    as_ours, as_others = (policy.fold(a_job, [*before, last]) for last in (ours, others))
    assert as_others.spent[V100.key].energy_j > as_ours.spent[V100.key].energy_j
    assert as_others.sample_costs == as_ours.sample_costs
    drawn = [policy.decide(a_job, state, ask()).reason.arms for state in (as_ours, as_others)]
    costs = [{arm.batch_size: arm.expected_cost_j for arm in arms} for arms in drawn]
    assert costs[0][32] is not None
    assert costs[0][32] == costs[1][32]


def test_an_arm_that_was_never_profiled_learns_no_cost_from_it() -> None:
    a_job = job()
    state = policy.fold(a_job, [foreign(observation(1, 32, 9, parts=PARTS))])
    assert state.arm_costs(a_job, V100.key, 1_000) == {}
    assert state.overheads == {}
    assert state.spent[V100.key].recurrences == 1


def test_what_was_profiled_before_it_is_kept() -> None:
    a_job = job()
    state = policy.fold(a_job, [foreign(observation(1, 32, 9, profiled=True, parts=PARTS))])
    clean = policy.fold(a_job, [observation(1, 32, 9, profiled=True, parts=PARTS)])
    assert state.profiles == clean.profiles
    assert state.default_epochs == clean.default_epochs


def test_it_is_compared_with_nothing_when_savings_are_told() -> None:
    a_job = job()
    runs = [observation(r, 32, 9, profiled=r == 1, setting_before=250.0) for r in range(1, 6)]
    saved = policy.saved(a_job, policy.fold(a_job, [*runs[:4], foreign(runs[4])]))
    assert saved.so_far is not None
    assert saved.so_far.recurrences == 4
