from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tests.core.builders import P100, job, observation, profile
from tests.core.test_savings import HISTORY, as_ever, fold, saved
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.records import EnergySource, Outcome
from zeus_flows.core.savings import Savings, killed, savings, skip
from zeus_flows.reporting.console import RunView


def shown(found: Savings | None, a_job: Job | None = None, width: int = 80) -> str:
    """What people see, with its lines joined so that sentences can be looked for."""
    return " ".join(printed(found, a_job, width).split())


def printed(found: Savings | None, a_job: Job | None = None, width: int = 80) -> str:
    out = StringIO()
    source = found.energy_source if found is not None else EnergySource.MEASURED
    view = RunView(Console(file=out, width=width), a_job or job(), total=1, energy_source=source)
    view.summary(found)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_names_the_default_with_its_watts(width: int) -> None:
    text = printed(saved(HISTORY), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "(batch size 32 at 250 W) · SIMULATED" in text
    rows = [row.split("│")[1].strip() for row in text.splitlines() if row.startswith("│")]
    lines = ["by power limit", "by batch size"]
    each = ["each from now on", "of the default's", *lines]
    assert rows == ["3 recurrences so far", "of the default's", *lines, "learning", "luck", *each]
    assert "maximum" not in text


def test_every_figure_has_its_doubt() -> None:
    row = next(row for row in printed(saved(HISTORY)).splitlines() if "3 recurrences so far" in row)
    assert row.count("±") == 3


def test_one_recurrence_is_one_recurrence() -> None:
    text = shown(saved(HISTORY[:1]))
    assert "1 recurrence so far" in text
    assert "estimated from 1 run of that batch size" in text


def test_nothing_prints_as_minus_nothing() -> None:
    history = [as_ever(i, 20) for i in (1, 2)]
    text = shown(saved(history, job("default")), job("default"))
    assert "-0" not in text
    assert "0 J" in text
    assert "0 %" in text


def test_controls_are_named() -> None:
    text = shown(saved([*HISTORY, as_ever(4, 20, control=True)]))
    assert "measured by 1 control run of the same weeks and 2 other runs of that batch size" in text


def test_what_is_in_no_saving_is_told() -> None:
    lost = replace(observation(4, 64, 3), outcome=Outcome.FAILED)
    abroad = observation(5, 64, 10, gpu=P100, profiled=True)
    account, profiles, overheads = fold(job(), [*HISTORY, lost, abroad, observation(6, 64, 10)])
    account = skip(killed(account), time_s=12.0)
    text = shown(savings(job(), account, profiles=profiles, overheads=overheads))
    assert "Lost to failures, kills or a target that was not reached: 2 recurrences (" in text
    assert "Skipped by the drift gate: 1 recurrence; its evaluations took 12 s." in text
    assert "was not measured on their GPU or they were not measured completely: 1 recurrence (" in text


def test_a_baseline_that_is_not_known_is_said_to_be_so() -> None:
    text = shown(saved([*HISTORY, observation(4, 64, 30)], boundaries={4: 1}))
    assert "Since recurrence 4 what was saved is not known: batch size 32 has not reached the target" in text
    assert "each from now on" not in text
    assert "What was saved is not known: batch size 32 has not" in shown(saved([observation(1, 64, 9, profiled=True)]))
    assert "not known yet" in shown(None)


def test_observing_shows_what_looking_cost_and_what_could_be_saved() -> None:
    a_job = job(mode=Mode.OBSERVE)
    looked = as_ever(1, 20, profile=profile(32), profiling_time_s=5.0, mode=Mode.OBSERVE, setting=250.0)
    looked = replace(looked, energy_j=looked.energy_j + 900.0, profiling_energy_j=1_500.0)
    text = printed(saved([looked], a_job), a_job)
    assert "1 recurrence took" in text
    assert next(row for row in text.splitlines() if "of it looking" in row).count("0.9 kJ ± ") == 1
    assert "each could save" in text
    assert "mode observe changes nothing" in text


def test_off_shows_what_was_spent() -> None:
    a_job = job(mode=Mode.OFF)
    text = printed(saved([as_ever(i, 20, mode=Mode.OFF) for i in (1, 2)], a_job), a_job)
    assert "2 recurrences took" in text
    assert "save" not in text.lower()


def test_without_a_sensor_no_joule_is_shown() -> None:
    a_job = job(in_seconds=True)
    changes: dict[str, Any] = {"energy_j": 0.0, "profile": None, "setting": None, "profiling_time_s": 0.0}
    history = [replace(o, energy_source=EnergySource.NONE, **changes) for o in HISTORY]
    text = printed(saved(history, a_job), a_job)
    assert " J" not in text
    assert "kJ" not in text
    assert "energy" not in text.lower()
    assert "time" in text


def test_the_host_is_named() -> None:
    text = shown(saved([replace(o, host_energy_j=50.0 * o.time_s) for o in HISTORY]))
    assert "of the machine beside its GPUs" in text
