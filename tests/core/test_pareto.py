"""Energy against time: expected energy and time at every batch size and power limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.builders import SAMPLES, job, observation, profile
from zeus_flows.core import policy
from zeus_flows.core.pareto import SettingPoint, _marked, settings_of_runs
from zeus_flows.core.records import Outcome

HISTORY = [
    observation(1, 32, 20, profiled=True),
    observation(2, 32, 24),
    observation(3, 64, 10, profiled=True),
    observation(4, 128, 3, outcome=Outcome.STOPPED, profiled=True),
]


def settings() -> tuple[SettingPoint, ...]:
    state = policy.fold(job(), HISTORY)
    assert state.account is not None
    return settings_of_runs(job(), state.account, profiles=state.profiles, overheads=state.all_overheads(job()))


def test_a_setting_takes_its_mean_epochs_at_what_its_profile_says() -> None:
    found = {(s.batch_size, s.setting): s for s in settings()}
    epochs = {32: 22.0, 64: 10.0}
    assert {b for b, _ in found} == set(epochs), "128 never reached the target"
    for (batch_size, setting), point in found.items():
        at = next(m for m in profile(batch_size).measurements if m.setting == setting)
        time_s = epochs[batch_size] * SAMPLES / at.samples_per_s
        assert point.time_s == pytest.approx(time_s)
        assert point.energy_j == pytest.approx(time_s * at.average_power_w)
        assert point.cost == pytest.approx(0.5 * point.energy_j + 0.5 * 250.0 * time_s)
    (default,) = [s for s in found.values() if s.is_default]
    assert (default.batch_size, default.setting) == (32, 250.0)
    (best,) = [s for s in found.values() if s.is_best]
    assert best.cost == min(s.cost for s in found.values())


@given(st.lists(st.tuples(st.floats(1, 10), st.floats(1, 10)), max_size=12))
def test_nothing_beats_what_is_on_the_front_and_all_else_is_beaten(points: list[tuple[float, float]]) -> None:
    marked = _marked([SettingPoint(i, None, energy, time, energy, 1) for i, (energy, time) in enumerate(points)])
    front = [s for s in marked if s.on_front]
    for setting in marked:
        as_good = [
            s for s in front if s is not setting and s.energy_j <= setting.energy_j and s.time_s <= setting.time_s
        ]
        assert bool(as_good) != setting.on_front
