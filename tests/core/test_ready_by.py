"""A model that must be ready by a time of day: which day, and what runs where it would be late."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.builders import V100, ask, decide, job, observation
from zeus_flows.core import policy
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.power_profile import PowerProfile, SettingMeasurement
from zeus_flows.core.ready_by import read_ready_by
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.core.records import Decision, Observation
from zeus_flows.job_file import parse_job

BERLIN = read_ready_by("06:00 Europe/Berlin")
JOB = job("thompson", eta=1.0, ready_by=BERLIN)
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Pacific/Apia", "Australia/Lord_Howe")


@given(st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1)), st.sampled_from(ZONES), st.integers(0, 1439))
def test_a_recurrence_is_due_at_the_first_such_time_after_its_scheduled_start(
    start: datetime, zone: str, minute: int
) -> None:
    scheduled = start.replace(tzinfo=UTC)
    due = read_ready_by(f"{minute // 60:02}:{minute % 60:02} {zone}").due(scheduled)
    assert scheduled <= due <= scheduled + timedelta(hours=25)


def test_one_that_begins_after_its_time_is_late_and_not_a_day_early() -> None:
    scheduled, began = (datetime(2026, 1, 10, hour, minute, tzinfo=UTC) for hour, minute in ((1, 0), (5, 1)))
    assert (BERLIN.due(scheduled) - began).total_seconds() == -60


@pytest.mark.parametrize("text", ["06:00", "25:00 UTC", "six", "06:00 Mars/Base", "06:00 ../../etc/passwd", ""])
def test_a_time_without_its_time_zone_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as '06:00 Europe/Berlin'"):
        read_ready_by(text)


def test_the_job_file_takes_it_quoted_and_says_so_where_yaml_reads_a_number() -> None:
    base = (
        "name: n\ntrain: {function: m:f}\ntarget: {metric: a, value: 1, better: higher}\n"
        "batch_sizes: [8]\ndefault_batch_size: 8\nmax_epochs: 1\n"
    )
    assert parse_job(base + "ready_by: '6:00 Europe/Berlin'\n").core().ready_by == BERLIN
    with pytest.raises(Exception, match="must be quoted"):
        parse_job(base + "ready_by: 16:00\n")


def ran(recurrence: int, batch_size: int, *, power: float, speed: float) -> Observation:
    """Ten epochs of a batch size that draws some share of the limit and trains so many samples a second."""
    at = [SettingMeasurement(w, power * w, speed * (1 - 20 / w)) for w in (100.0, 175.0, 250.0)]
    found = observation(recurrence, batch_size, 10, profile=PowerProfile(batch_size, V100, tuple(at)))
    time_s = 10 * 1_000 / at[0].samples_per_s
    taken = replace(found, time_s=time_s, energy_j=time_s * at[0].average_power_w, setting=100.0)
    return replace(taken, profiling_time_s=1.0, setting_before=250.0)


#: The default saves energy; 128 is twice as fast and draws almost three times as much.
HISTORY = [
    o for n in range(1, 21, 2) for o in (ran(n, 32, power=0.3, speed=50.0), ran(n + 1, 128, power=0.9, speed=100.0))
]


def decided(a_job: Job, seconds_left: float | None, recurrence: int = 60) -> Decision:
    return decide(a_job, HISTORY, ask(recurrence, seconds_left=seconds_left))


def test_the_fastest_known_arm_runs_at_its_fastest_limit_where_the_best_would_be_late() -> None:
    in_time, late, too_late, over = (decided(JOB, s) for s in (10_000.0, 150.0, 50.0, -60.0))
    assert in_time.reason.kind is not ReasonKind.LATE
    for decision in (late, too_late, over):
        assert (decision.reason.kind, decision.batch_size, decision.setting) == (ReasonKind.LATE, 128, 250.0)
        assert not decision.explores
        assert decision.asked is not None
        assert decision.asked.seconds_left in (150.0, 50.0, -60.0)
    assert late.reason.text.startswith(
        "it must be ready by 06:00 Europe/Berlin, which is in 2.5 min, and batch size 32"
    )
    assert late.reason.text.endswith("128 at 250 W, the fastest known, runs")
    assert "it will be about 58.7 s late" in too_late.reason.text
    assert "which is over since 60 s" in over.reason.text


@pytest.mark.parametrize("mode", [Mode.POWER, Mode.OBSERVE, Mode.OFF])
def test_a_mode_that_keeps_the_batch_size_keeps_it_and_the_reason_says_that_it_will_be_late(mode: Mode) -> None:
    decision = decided(replace(JOB, mode=mode), 50.0)
    assert (decision.reason.kind, decision.batch_size) == (ReasonKind.LATE, 32)
    assert decision.setting == (250.0 if mode is Mode.POWER else None)
    assert decision.tune_power == (mode is Mode.POWER)
    assert "late" in decision.reason.text


def test_an_exploration_leaves_room_for_the_best_known_arm_before_the_time() -> None:
    assert any(decided(JOB, 10_000.0, r).explores for r in range(60, 70))
    assert not any(decided(JOB, 300.0, r).explores for r in range(60, 70))


def test_nothing_is_said_of_time_where_nothing_is_known_or_nothing_was_asked() -> None:
    assert decide(JOB, [], ask(1, seconds_left=1.0)).reason.kind is ReasonKind.FIRST_RUN
    assert decided(JOB, None) == decided(replace(JOB, ready_by=None), None)


def test_the_same_history_and_the_same_seconds_give_the_same_decision() -> None:
    assert decided(JOB, 150.0) == decided(JOB, 150.0)
    assert policy.fold(JOB, HISTORY) == policy.fold(replace(JOB, ready_by=None), HISTORY)
