"""The figures of an attempt's run: what they show, and that they are proper SVG."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from tests.builders import JOB, decision, observation, profile
from zeus_flows.core import policy
from zeus_flows.core.reasons import ArmBelief, ArmStatus, Reason, ReasonKind
from zeus_flows.core.records import EnergySource
from zeus_flows.reporting.run_figures import belief_figure, profile_figure, savings_figure

SVG = "{http://www.w3.org/2000/svg}"


def words(figure: str | None) -> dict[str, str]:
    """Return the texts of a figure, each with its weight."""
    assert figure is not None
    found = ElementTree.fromstring(figure).iter(f"{SVG}text")  # noqa: S314
    return {str(text.text): text.attrib["font-weight"] for text in found}


def test_a_profile_shows_each_setting_with_the_chosen_one_marked() -> None:
    shown = words(profile_figure(JOB, observation(1, setting=150.0), None))
    assert (shown["150 W"], shown["250 W"]) == ("600", "400")
    assert any("simulated" in text for text in shown)
    assert "2.11 kJ, 130 W, 90/s" in shown  # (0.5 x 130 W + 0.5 x 250 W) x 1,000 / 90
    assert profile_figure(JOB, observation(1, profile=None), None) is None
    assert profile_figure(JOB, observation(1, profile=None), profile()) is not None


def test_beliefs_show_each_batch_size_with_the_chosen_one_marked() -> None:
    arms = (ArmBelief(32, 0), ArmBelief(64, 3, expected_cost_j=1e3, spread=0.5, status=ArmStatus.KNOWN))
    decided = decision(4, reason=Reason(ReasonKind.FIRST_RUN, "<b>", arms=arms))
    shown = words(belief_figure(JOB, decided, EnergySource.MEASURED))
    assert (shown["64"], shown["32"]) == ("600", "400")
    assert not any("simulated" in text for text in shown)
    assert belief_figure(JOB, decision(4), EnergySource.MEASURED) is None


def test_savings_show_their_lines_and_none_where_nothing_is_known() -> None:
    state = policy.initial(JOB)
    assert savings_figure(JOB, policy.saved(JOB, state)) is None
    for number in (1, 2):
        state = policy.advance(JOB, state, replace(observation(number), setting_before=250.0))
    assert {"total", "by power limit", "learning"} <= set(words(savings_figure(JOB, policy.saved(JOB, state))))
