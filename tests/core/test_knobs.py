"""Two knobs in one history: profiles and savings are each knob's own, epochs and memory are shared."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.core.builders import SAMPLES, V100, ask, job, observation, profile
from zeus_flows.core import policy
from zeus_flows.core.json import from_plain, jsonable
from zeus_flows.core.overheads import nearest
from zeus_flows.core.power_profile import Gpu, Knob, Part, Parts, PowerProfile, SettingMeasurement, knob_of
from zeus_flows.core.records import Observation, Outcome

BY_CLOCKS = replace(V100, knob=Knob.CLOCKS)
CLOCKS = (1380.0, 1200.0, 1000.0)


def by_clocks(recurrence: int, batch_size: int = 32, *, setting: float = 1200.0, epochs: int = 10) -> Observation:
    """An attempt that profiled clocks and settled on one."""
    rows = tuple(SettingMeasurement(mhz, 230.0 * (mhz / 1380) ** 2, 60.0 * (mhz / 1380) ** 0.5) for mhz in CLOCKS)
    measured = PowerProfile(batch_size, BY_CLOCKS, rows)
    at = next(m for m in rows if m.setting == setting)
    time_s = epochs * SAMPLES / at.samples_per_s
    return observation(
        recurrence,
        batch_size,
        epochs,
        gpu=BY_CLOCKS,
        energy_j=time_s * at.average_power_w,
        time_s=time_s,
        setting=setting,
        setting_before=1380.0,
        profile=measured,
        profiling_time_s=1.0,
    )


def by_limits(recurrence: int, batch_size: int = 32, *, epochs: int = 10) -> Observation:
    """An attempt that profiled power limits and settled on one."""
    return observation(recurrence, batch_size, epochs, profiled=True, setting_before=250.0)


def test_a_profile_of_one_knob_is_not_one_of_the_other() -> None:
    state = policy.fold(job(), [by_limits(1), by_clocks(2)])
    limits, clocks = state.profile(32, V100), state.profile(32, BY_CLOCKS)
    assert limits is not None
    assert clocks is not None
    assert [m.setting for m in limits.measurements] == [100.0, 175.0, 250.0]
    assert [m.setting for m in clocks.measurements] == [*CLOCKS]


def test_changing_the_knob_keeps_what_is_known_of_epochs() -> None:
    state = policy.fold(job(), [by_limits(n, b, epochs=8) for n, b in enumerate((32, 16, 64, 32), start=1)])
    known = policy.decide(job(), state, ask(5, gpu=V100)).reason.arms
    changed = policy.decide(job(), state, ask(5, gpu=BY_CLOCKS)).reason.arms
    runs = {arm.batch_size: arm.runs for arm in known}
    assert {arm.batch_size: arm.runs for arm in changed} == runs
    assert runs[32] == pytest.approx(2, abs=0.5)


def test_a_batch_size_that_does_not_fit_does_not_fit_by_another_knob() -> None:
    state = policy.fold(job(), [observation(1, 128, 0, outcome=Outcome.OUT_OF_MEMORY, energy_j=0.0, time_s=0.0)])
    assert state.too_large(BY_CLOCKS, 2) == 128


def test_what_clocks_save_has_a_line_of_its_own_and_lines_sum_up() -> None:
    state = policy.fold(job(), [by_limits(1), by_limits(2), by_clocks(3), by_clocks(4)])
    saved = policy.saved(job(), state)
    assert saved is not None
    assert saved.so_far is not None
    lines = {line.name: line.amount for line in saved.so_far.lines}
    assert lines["clocks"].energy_j > 0
    assert lines["power limit"].energy_j > 0
    assert sum(amount.energy_j for amount in lines.values()) == pytest.approx(saved.so_far.total.amount.energy_j)
    assert (saved.default.knob, saved.default.setting) == (Knob.CLOCKS, 1380.0)


def test_an_evaluation_seen_at_a_power_limit_is_not_taken_for_one_at_a_clock() -> None:
    evaluated = Parts(evaluation=((100.0, Part(10, 1000.0, 20.0)),), rest=Part(10, 10.0, 1.0))
    state = policy.fold(job(), [replace(by_limits(1), parts=evaluated), by_clocks(2)])
    clocks = state.profile(32, BY_CLOCKS)
    assert clocks is not None
    known, own = state.overheads_of(job(), 32, BY_CLOCKS.key)
    assert not own
    assert known.evaluation_at(1380.0, clocks).time_s == pytest.approx(2.0)
    slower = nearest(clocks, 1380.0).samples_per_s / nearest(clocks, 1000.0).samples_per_s
    assert 2.0 < known.evaluation_at(1000.0, clocks).time_s <= 2.0 * slower


def test_a_state_of_two_knobs_is_read_as_it_was_written() -> None:
    state = policy.fold(job(), [by_limits(1), by_clocks(2), by_clocks(3, 64)])
    again = policy.from_json(job(), json.loads(json.dumps(policy.to_json(state))))
    assert again is not None
    assert again == state


def test_a_state_of_a_version_that_knew_power_limits_only_is_read() -> None:
    state = policy.fold(job(), [by_limits(1), by_limits(2, 64)])
    text = json.dumps(policy.to_json(state))
    renamed = {
        "setting": "power_limit_w",
        "stale": "stale_w",
        "settings_before": "limits_before_w",
        "before": "before_w",
    }
    data = json.loads(text, object_hook=lambda plain: {renamed.get(k, k): v for k, v in plain.items() if k != "knob"})
    for plain in (*data["account"]["era"]["ran"].values(), data["account"]["newest"]["ran"]):
        plain["limit_w"] = plain.pop("power_limit_w")
    assert "setting" not in json.dumps(data).replace('"settings"', "")
    assert policy.from_json(job(), data) == state


def test_a_profile_of_before_is_read_with_the_names_it_had() -> None:
    old = {"power_limit_w": 150.0, "average_power_w": 130.0, "samples_per_s": 90.0}
    assert from_plain(SettingMeasurement, old) == SettingMeasurement(150.0, 130.0, 90.0)
    assert from_plain(PowerProfile, jsonable(profile(32))) == profile(32)


@pytest.mark.parametrize("knob", Knob)
def test_the_key_of_a_gpu_tells_its_knob(knob: Knob) -> None:
    assert knob_of(Gpu("Tesla V100", 2, 500.0, knob).key) is knob
