"""What people open in MLflow: saved views and a description that are brought up to date, and never somebody's own."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Experiment

from tests.builders import JOB, decision, observation
from tests.ledger.test_calls import one_recurrence
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.records import EnergySource, Outcome
from zeus_flows.ledger.mlflow import names, page_state, snapshot, views
from zeus_flows.ledger.mlflow.client import MLFLOW_NOTE
from zeus_flows.ledger.mlflow.job_note import is_ours
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.views import ViewFate, all_views, due, standing
from zeus_flows.ledger.open_ledger import open_direct, open_durable

VIEWS = all_views(joules=True)


def installed() -> dict[str, str]:
    """Return an experiment's tags after its views were written."""
    return due(VIEWS, {}, now_s=1.0)


def opened(uri: str, job: Job = JOB, source: EnergySource = EnergySource.SIMULATED) -> MlflowLedger:
    return open_direct(job, tracking_uri=uri, energy_source=source, comparable={"target": "accuracy >= 0.9"})


def page_of(uri: str, job: Job = JOB) -> Experiment:
    found = MlflowClient(tracking_uri=uri).get_experiment_by_name(job.name)
    assert found is not None
    return found


def recur(uri: str, times: int = 1, job: Job = JOB) -> None:
    for _ in range(times):
        ledger = opened(uri, job)
        number = ledger.begin()
        ledger.history()
        attempt = ledger.decided(decision(number), {})
        done = observation(number, fingerprint=job.fingerprint)
        ledger.observed(attempt, done)
        ledger.ended(number, [done])


# -- the views themselves --------------------------------------------------------------------------------------------


def test_there_are_five_views_and_mlflow_can_read_each() -> None:
    assert [view.name for view in VIEWS] == [
        *("Recurrences", "Over recurrences", "Energy against time", "Drift windows", "Epochs of one recurrence")
    ]
    for view in VIEWS:
        envelope = json.loads(view.text(12.5))
        assert (envelope["name"], envelope["createdAt"], envelope["updatedAt"]) == (view.name, 12500, 12500)
        assert page_state.unpacked(envelope["state"]) == view.state
        assert len(view.text(1e9)) < 5000


def test_the_first_view_has_what_was_chosen_what_it_took_and_why() -> None:
    assert VIEWS[0].state["selectedColumns"] == [
        *("metrics.`zf.batch_size`", "metrics.`zf.power_limit_w`", "metrics.`zf.energy_to_accuracy_j`"),
        *("metrics.`zf.time_to_accuracy_s`", "metrics.`zf.cost_j`", "metrics.`zf.epochs`", "metrics.`zf.saved_j`"),
        *("tags.`zf.outcome`", "tags.`zf.reason`"),
    ]


def test_no_view_speaks_of_joules_where_there_are_none() -> None:
    for view in all_views(joules=False):
        shown = [chart for chart in view.state.pop("compareRunCharts", []) if not chart["deleted"]]
        assert "_j" not in json.dumps([view.state, shown])
        assert "Energy" not in view.name


def test_charts_draw_every_run_and_each_is_in_a_section() -> None:
    for view in (view for view in VIEWS if view.is_charts):
        sections = {section["uuid"] for section in view.state["compareRunSections"]}
        assert {chart["metricSectionId"] for chart in view.state["compareRunCharts"]} <= sections
        ids = [chart["uuid"] for chart in view.state["compareRunCharts"]]
        assert len(set(ids)) == len(ids)
    drawn = {view.name: view.state["runsHiddenMode"] for view in VIEWS if view.is_charts}
    assert {chart["metricKey"] for chart in VIEWS[4].state["compareRunCharts"] if chart["deleted"]} >= {"zf.cost_j"}
    assert drawn["Over recurrences"] == drawn["Energy against time"] == page_state.ALL_RUNS


# -- what becomes of them --------------------------------------------------------------------------------------------


def test_writing_views_again_changes_nothing() -> None:
    assert due(VIEWS, installed()) == {}
    assert {standing(view, installed()) for view in VIEWS} == {ViewFate.CURRENT}


def test_a_view_of_an_earlier_version_is_renewed() -> None:
    tags = installed()
    older = replace(VIEWS[0], name="Runs")
    tags |= {older.key: older.text(1.0)}
    tags[names.VIEWS] = json.dumps(views.written(tags) | {str(older.id): older.digest})
    assert standing(VIEWS[0], tags) is ViewFate.RENEWED
    written = due(VIEWS, tags)
    assert set(written) == {VIEWS[0].key, names.VIEWS}
    assert due(VIEWS, tags | written) == {}


@pytest.mark.parametrize("what", ["name", "state"])
def test_a_view_that_somebody_changed_is_left_alone_unless_asked(what: str) -> None:
    tags = installed()
    changed = json.loads(tags[VIEWS[1].key]) | {what: "mine"}
    tags[VIEWS[1].key] = json.dumps(changed)
    assert standing(VIEWS[1], tags) is ViewFate.CHANGED
    newer = (VIEWS[0], replace(VIEWS[1], about="", name="Newer"), *VIEWS[2:])
    assert VIEWS[1].key not in due(newer, tags)
    assert json.loads(due(VIEWS, tags, anew=True)[VIEWS[1].key])["name"] == "Over recurrences"


def test_a_view_that_somebody_deleted_stays_deleted_unless_asked() -> None:
    tags = installed()
    del tags[VIEWS[2].key]
    assert standing(VIEWS[2], tags) is ViewFate.DELETED
    newer = (replace(VIEWS[0], name="Newer"), *VIEWS[1:])
    assert set(due(newer, tags)) == {VIEWS[0].key, names.VIEWS}
    assert set(due(VIEWS, tags, anew=True)) == {VIEWS[2].key}


@pytest.mark.parametrize("broken", ["", "{", "[1]", '"x"', '{"zf-windows": 3}'])
def test_whatever_the_tag_of_digests_holds_nothing_of_somebody_s_is_written_over(broken: str) -> None:
    mine = {VIEWS[0].key: json.dumps({"name": "mine", "state": "x"}), names.VIEWS: broken}
    assert VIEWS[0].key not in due(VIEWS, mine)


# -- in MLflow -------------------------------------------------------------------------------------------------------


def test_the_first_recurrence_installs_the_views_with_no_call_of_their_own(sqlite_uri: str, tmp_path: Path) -> None:
    calls = one_recurrence(sqlite_uri, tmp_path)
    assert {view.key for view in VIEWS} <= set(page_of(sqlite_uri).tags)
    tagged = [str(call.by_name) for call in calls if call.name == "set_experiment_tag"]
    assert not [call for call in tagged if views.SHARED_VIEW in call]


def test_a_job_that_ran_before_there_were_views_gets_them_once(sqlite_uri: str) -> None:
    recur(sqlite_uri)
    client, experiment = MlflowClient(tracking_uri=sqlite_uri), page_of(sqlite_uri)
    for tag in (names.VIEWS, *(view.key for view in VIEWS)):
        client.delete_experiment_tag(experiment.experiment_id, tag)
    recur(sqlite_uri)
    assert due(VIEWS, page_of(sqlite_uri).tags) == {}


def test_the_description_says_what_the_job_is_what_runs_and_where_to_look(sqlite_uri: str) -> None:
    recur(sqlite_uri)
    experiment = page_of(sqlite_uri)
    note = experiment.tags[MLFLOW_NOTE]
    assert "The job **nightly** trains again and again until accuracy >= 0.9" in note
    assert "zeus_flows chooses the batch size" in note
    for view in VIEWS:
        assert f"[{view.name}]({view.address(experiment.experiment_id)})" in note
    assert is_ours(note)


def test_the_description_follows_the_job_within_as_many_recurrences_as_lie_between_snapshots(sqlite_uri: str) -> None:
    recur(sqlite_uri, snapshot.EVERY + 2)
    note = page_of(sqlite_uri).tags[MLFLOW_NOTE]
    assert "Written after recurrence 1;" not in note
    assert "Batch size 64 at 150 W runs now." in note


def test_a_description_that_somebody_wrote_or_changed_is_left_alone(sqlite_uri: str) -> None:
    recur(sqlite_uri)
    client, experiment = MlflowClient(tracking_uri=sqlite_uri), page_of(sqlite_uri)
    for mine in ("Ours.", experiment.tags[MLFLOW_NOTE].replace("nightly", "mine")):
        client.set_experiment_tag(experiment.experiment_id, MLFLOW_NOTE, mine)
        ledger = opened(sqlite_uri)
        assert ledger.last_recurrence() == 1
        assert not ledger.page.describe(2, None)
        assert page_of(sqlite_uri).tags[MLFLOW_NOTE] == mine
        assert ledger.page.describe(2, None, anew=True)
        assert "Written after recurrence 2;" in page_of(sqlite_uri).tags[MLFLOW_NOTE]


@pytest.mark.parametrize(
    ("mode", "says"), [(Mode.OFF, "changes nothing"), (Mode.OBSERVE, "measures what could"), (Mode.POWER, "stays 32")]
)
def test_the_description_says_how_much_may_be_changed(sqlite_uri: str, mode: Mode, says: str) -> None:
    job = replace(JOB, mode=mode, default_batch_size=32)
    recur(sqlite_uri, job=job)
    assert says in page_of(sqlite_uri).tags[MLFLOW_NOTE]
    assert "**Saved" not in page_of(sqlite_uri).tags[MLFLOW_NOTE]


def test_views_and_description_are_nobody_s_business_where_mlflow_refuses_them(
    sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise PermissionError

    recur(sqlite_uri)
    client, experiment = MlflowClient(tracking_uri=sqlite_uri), page_of(sqlite_uri)
    client.delete_experiment_tag(experiment.experiment_id, names.VIEWS)
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    recur(sqlite_uri)
    source = EnergySource.SIMULATED
    with closing(open_durable(JOB, tracking_uri=sqlite_uri, energy_source=source, state_dir=tmp_path)) as ledger:
        assert ledger.begin() == 3


# -- what an attempt saved -------------------------------------------------------------------------------------------


def saved_of(uri: str) -> dict[str, float | None]:
    """Return what attempts' runs say that they saved, by their names."""
    runs = MlflowClient(tracking_uri=uri).search_runs([page_of(uri).experiment_id], "tags.`zf.kind` = 'attempt'")
    return {run.info.run_name.partition(" ")[0]: run.data.metrics.get("zf.saved_j") for run in runs}


def test_an_attempt_shows_what_it_saved_against_the_default(sqlite_uri: str) -> None:
    b0 = JOB.default_batch_size
    took = [(b0, Outcome.CONVERGED, 9000.0), (b0, Outcome.CONVERGED, 9000.0), (16, Outcome.CONVERGED, 5000.0)]
    for batch_size, outcome, energy_j in (*took, (16, Outcome.STOPPED, 700.0), (16, Outcome.FAILED, 100.0)):
        ledger = opened(sqlite_uri)
        number = ledger.begin()
        ledger.history()
        attempt = ledger.decided(decision(number, batch_size=batch_size), {})
        took_s, limit_w = energy_j / 100, 250.0 if batch_size == b0 else 150.0
        done = observation(
            number,
            batch_size=batch_size,
            outcome=outcome,
            energy_j=energy_j,
            time_s=took_s,
            setting=limit_w,
            setting_before=250.0,
        )
        ledger.observed(attempt, done)
        ledger.ended(number, [done])
    saved = saved_of(sqlite_uri)
    assert saved["#2"] == pytest.approx(0.0, abs=1.0)
    assert saved["#3"] is not None
    assert saved["#3"] > 0
    assert saved["#4"] is not None
    assert saved["#4"] < 0
    assert saved["#5"] is None
