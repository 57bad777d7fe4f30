"""What runs show: no joule where joules mean nothing, the user's own names, and nothing empty."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.utils.validation import _validate_metric_name

from tests.builders import JOB, decision, observation
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import Part, Parts
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger.mlflow import charts
from zeus_flows.ledger.open_ledger import open_direct

PARTS = Parts(Part(1, 500.0, 4.0), ((150.0, Part(4, 300.0, 2.0)), (250.0, Part(1, 200.0, 1.0))), Part(5, 100.0, 3.0))
REPORT = EpochReport(1, energy_j=10.0, time_s=1.0, setting=150.0, metric=0.5, metric_name="val/acc @ 1")


def recorded(uri: str, job: Job = JOB, source: EnergySource = EnergySource.SIMULATED) -> tuple[Run, Run]:
    """Return the runs of an attempt and of its drift window."""
    ledger = open_direct(job, tracking_uri=uri, energy_source=source)
    number = ledger.begin()
    context = {"zf.learning_rate": "0.05", "zf.note": "n", "zf.prefect.url": "", "zf.code_revision": ""}
    attempt = ledger.decided(decision(number), context)
    ledger.epoch(attempt, REPORT)
    done = observation(number, energy_source=source, parts=PARTS, host_energy_j=44.0)
    ledger.observed(attempt, done)
    ledger.ended(number, [done])
    client = MlflowClient(tracking_uri=uri)
    return client.get_run(attempt), client.get_run(ledger.window().run_id)


def test_an_attempt_shows_what_its_parts_took_and_the_host(sqlite_uri: str) -> None:
    attempt, window = recorded(sqlite_uri)
    shown = attempt.data.metrics
    parts = {name.removeprefix("zf.part/"): value for name, value in shown.items() if name.startswith("zf.part/")}
    assert parts == {
        **{"once_j": 500.0, "evaluation_j": 500.0, "rest_j": 100.0, "training_j": 3900.0},
        **{"once_s": 4.0, "evaluation_s": 3.0, "rest_s": 3.0, "training_s": 30.0},
    }
    assert shown["zf.energy_to_accuracy_j"] == 5000.0
    assert (shown["zf.host_energy_j"], window.data.metrics["zf.host_energy_j"]) == (44.0, 44.0)
    cost = observed_cost(JOB, observation(1, host_energy_j=44.0))
    assert (shown["zf.cost_j"], window.data.metrics["zf.cost_j"]) == (cost, cost)
    assert "zf.cost_s" not in shown


def test_where_no_host_was_counted_and_no_part_measured_none_is_shown() -> None:
    shown = charts.of_attempt(JOB, observation(1))
    assert shown["zf.host_energy_j"] is None
    assert not [name for name in shown if name.startswith("zf.part/")]


@pytest.mark.parametrize(
    ("job", "source"), [(replace(JOB, in_seconds=True), EnergySource.SIMULATED), (JOB, EnergySource.NONE)]
)
def test_no_joule_is_shown_where_joules_mean_nothing(sqlite_uri: str, job: Job, source: EnergySource) -> None:
    for run in recorded(sqlite_uri, job, source):
        names = set(run.data.metrics)
        assert not [name for name in names if name.endswith("_j")]
        assert run.data.metrics["zf.cost_s"] == 40.0
        assert run.data.metrics["zf.time_to_accuracy_s"] == 40.0
    assert {"zf.epoch/time_s", "zf.part/once_s", "zf.part/training_s"} <= set(run_of_attempt(sqlite_uri).data.metrics)


def run_of_attempt(uri: str) -> Run:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(JOB.name)
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'")
    return found


def test_the_metric_is_also_shown_under_the_user_s_own_name(sqlite_uri: str) -> None:
    shown = recorded(sqlite_uri)[0].data.metrics
    assert (shown["val/acc_1"], shown["zf.epoch/metric"]) == (0.5, 0.5)
    assert set(charts.of_epoch(replace(REPORT, metric_name=""))) == {
        *("zf.epoch/energy_j", "zf.epoch/time_s", "zf.epoch/power_limit_w", "zf.epoch/metric")
    }


@given(st.text(max_size=400) | st.sampled_from(["zf.cost_j", "ZF.x", "/zf.epoch/metric", "..", ".zf.x", "a//b/../c"]))
def test_whatever_a_metric_is_called_mlflow_takes_it_and_it_is_none_of_ours(name: str) -> None:
    safe = charts.named(name)
    _validate_metric_name(safe)  # type: ignore[no-untyped-call]
    assert not safe.lower().startswith("zf.")


def test_a_learning_rate_is_a_param_and_what_is_empty_is_not_written(sqlite_uri: str) -> None:
    attempt, _ = recorded(sqlite_uri)
    assert attempt.data.params["zf.learning_rate"] == "0.05"
    assert attempt.data.tags["zf.note"] == "n"
    assert not {"zf.learning_rate", "zf.prefect.url", "zf.code_revision"} & set(attempt.data.tags)


def test_a_gate_s_run_has_no_empty_tags_either(sqlite_uri: str) -> None:
    ledger = open_direct(JOB, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED)
    asked = ledger.asked(ledger.begin(), {"zf.prefect.url": "", "zf.note": "n"})
    tags = MlflowClient(tracking_uri=sqlite_uri).get_run(asked).data.tags
    assert ("zf.prefect.url" in tags, tags["zf.note"]) == (False, "n")


def test_a_run_is_called_by_recurrence_batch_size_and_limit_as_soon_as_they_are_known(sqlite_uri: str) -> None:
    ledger = open_direct(JOB, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED)
    client, number = MlflowClient(tracking_uri=sqlite_uri), ledger.begin()
    first, second = (ledger.decided(decision(number, attempt), {}) for attempt in (1, 2))
    assert [client.get_run(run_id).info.run_name for run_id in (first, second)] == ["#1 · 64", "#1.2 · 64"]
    ledger.observed(first, observation(number))
    ledger.observed(second, observation(number, 2, setting=None))
    assert [client.get_run(run_id).info.run_name for run_id in (first, second)] == ["#1 · 64 · 150 W", "#1.2 · 64"]


def test_a_ledger_s_experiment_says_what_it_is_and_that_it_must_stay(sqlite_uri: str) -> None:
    open_direct(JOB, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED).begin()
    made = MlflowClient(tracking_uri=sqlite_uri).get_experiment_by_name(f"{JOB.name}.ledger")
    assert made is not None
    note = made.tags["mlflow.note.content"]
    assert "The books of the job **nightly**" in note
    assert "Do not delete" in note
    assert "zeus-flows ledger repair" in note
