"""What an attempt's page says: why, how it ended, what was believed, where to go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mlflow import MlflowClient

from tests.builders import JOB, decision, observation
from zeus_flows.core.reasons import ArmBelief, ArmStatus, Reason, ReasonKind
from zeus_flows.core.records import EnergySource, Outcome
from zeus_flows.ledger.mlflow.client import MLFLOW_NOTE
from zeus_flows.ledger.mlflow.run_note import DecisionNote, linked, run_note
from zeus_flows.ledger.open_ledger import open_direct

ARMS = (
    ArmBelief(32, runs=0, status=ArmStatus.UNTRIED),
    ArmBelief(64, runs=3, expected_cost_j=1500.0, spread=0.2, sampled_cost_j=1400.0, status=ArmStatus.KNOWN),
)
DECIDED = decision(7, reason=Reason(ReasonKind.FIRST_RUN, "it drew the least cost", arms=ARMS))


def test_a_decision_s_description_says_why_with_the_arms_as_a_table() -> None:
    text = run_note(JOB, DecisionNote(DECIDED))
    assert text.startswith("**Batch size 64**: it drew the least cost.")
    assert "It has not ended yet." in text
    assert "| **64** | known | 3 | 1.5 kJ ± 20 % | 1.4 kJ |" in text
    assert "| 32 | untried | 0 |  |  |" in text
    assert "`zeus-flows explain JOB.yaml 7`" in text


def test_an_outcome_s_description_says_at_which_limit_and_how_it_ended() -> None:
    done = observation(7, detail="accuracy reached 0.9 in epoch 5")
    text = run_note(JOB, DecisionNote(DECIDED), done)
    assert "**Power limit 150 W**: the least cost by the profile of this batch size, known from earlier runs." in text
    assert "**Converged** after 5 epochs, 5 kJ and 40 s (simulated): accuracy reached 0.9 in epoch 5." in text
    assert "profiled in this run" in run_note(JOB, DecisionNote(DECIDED), replace(done, profiling_time_s=3.0))
    fixed = DecisionNote(replace(DECIDED, setting=150.0))
    assert "**Power limit 150 W**: as decided." in run_note(JOB, fixed, done)
    left = DecisionNote(replace(DECIDED, tune_power=False))
    assert "**Power limit 150 W**: left as it was." in run_note(JOB, left, done)


def test_no_joule_and_no_limit_where_there_is_none() -> None:
    job = replace(JOB, in_seconds=True)
    done = observation(7, setting=None, outcome=Outcome.OUT_OF_MEMORY, epochs=1)
    text = run_note(job, DecisionNote(replace(DECIDED, reason=Reason(ReasonKind.FIRST_RUN, "because"))), done)
    assert "**Out of memory** after 1 epoch, 40 s." in text
    assert "limit" not in text.lower()
    assert "J" not in text.replace("JOB", "")
    assert "believed" not in text


def test_hundreds_of_batch_sizes_fit() -> None:
    many = tuple(ArmBelief(2**k, runs=1, expected_cost_j=1e6, spread=0.1, sampled_cost_j=1e6) for k in range(300))
    note = DecisionNote(replace(DECIDED, reason=Reason(ReasonKind.FIRST_RUN, "because", arms=many)))
    assert "And 270 more." in run_note(JOB, note)
    assert len(run_note(JOB, note, observation(7, detail="x" * 5000))) < 5000


def test_links_lead_to_the_flow_run_the_window_and_the_slice() -> None:
    context = {"zf.prefect.url": "http://p/runs/1", "zf.prefect.flow_run_name": "nightly #7"}
    context["zf.slice_day"] = "2024-05-01"
    links = linked(DECIDED, context, experiment_id="3", window_id="w").links
    assert links == (
        "[Prefect: nightly #7](http://p/runs/1)",
        "[drift window](#/experiments/3/runs/w)",
        "slice of 2024-05-01",
    )


@pytest.mark.parametrize("known", [True, False])
def test_a_run_s_description_follows_it_to_its_outcome(sqlite_uri: str, known: bool) -> None:
    """Another process that delivers the outcome does not know the decision, and asks for nothing more."""
    ledger = open_direct(JOB, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED)
    client, number = MlflowClient(tracking_uri=sqlite_uri), ledger.begin()
    attempt = ledger.decided(decision(number), {})
    tags = client.get_run(attempt).data.tags
    assert "It has not ended yet." in tags[MLFLOW_NOTE]
    assert not {"zf.explores", "zf.degraded"} & set(tags)
    if not known:
        ledger = open_direct(JOB, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED)
    ledger.observed(attempt, observation(number))
    tags = client.get_run(attempt).data.tags
    assert ("**Converged**" in tags[MLFLOW_NOTE]) is known
    assert tags["zf.lease"] == "ended"
