"""The front of looks: each setting is measured with its own constants, and the default with those that are there."""

from __future__ import annotations

import pytest
import regret_front
from regret_front import DEFAULT, SETTINGS, setting, show, summary

from tests.benchmarks.test_regret_sources import result
from zeus_flows.core.policy import trials


def test_a_setting_holds_while_it_is_measured_and_no_longer() -> None:
    before = trials.ALLOWANCE
    with setting(SETTINGS["no looks"]):
        assert trials.ALLOWANCE == 0.0
    assert before == trials.ALLOWANCE


def test_every_setting_changes_constants_that_looks_have() -> None:
    for name, constants in SETTINGS.items():
        assert bool(constants) == (name != DEFAULT)
        assert all(getattr(trials, constant) != value for constant, value in constants.items()), name


def test_the_front_tells_ratios_and_plain_regret_of_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    peer = [result("a", "zeus-paper", 2.0), result("b", "zeus-paper", 1.0)]
    frugal = [result("a", "thompson", 0.5), result("b", "thompson", 4.0)]
    careful = [result("a", "thompson", 1.0), result("b", "thompson", 1.0)]
    found = summary({"no looks": [*peer, *frugal], DEFAULT: [*peer, *careful]})
    made = {name: front["at"][50]["made"] for name, front in found.items()}
    assert made["no looks"]["mean"] == pytest.approx(1.0)
    assert (made["no looks"]["worst"], made["no looks"]["regret"]) == (4.0, 2.25)
    assert (made[DEFAULT]["worst"], made[DEFAULT]["above_1.1"], made[DEFAULT]["regret"]) == (1.0, 0.0, 1.0)
    show(found, seeds=1)
    assert f"| no looks | 1.00; 4.00; 50 %; 2.2 | {'1.00; 4.00; 50 %; 2.2'} |" in capsys.readouterr().out
    assert regret_front.AT == (50, 200)
