"""A drift gate in MLflow: its own kind of run, the series, and what is left when whoever asks it dies."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.builders import JOB, decision, gate_check, observation
from tests.ledger import brief
from zeus_flows.core.drift_windows import fold_windows
from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger import delivery, janitor
from zeus_flows.ledger.janitor import sweep, sweep_orphans
from zeus_flows.ledger.lease import Holder, this_process
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.outbox import Outbox


def open_ledger(uri: str, job: Job = JOB, holder: Holder | None = None) -> MlflowLedger:
    return MlflowLedger(job, Store(uri), EnergySource.SIMULATED, holder=holder)


def trained(ledger: MlflowLedger) -> None:
    number = ledger.begin()
    ledger.observed(ledger.decided(decision(number), {}), observation(number))
    ledger.ended(number, [observation(number)])


def skipped(ledger: MlflowLedger) -> None:
    number = ledger.begin()
    ledger.gated(ledger.asked(number, {}), gate_check(number, skips=True))


def runs(uri: str, kind: str) -> list[Run]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(JOB.name)
    assert experiment is not None
    query = f"tags.`zf.kind` = '{kind}'"
    return list(client.search_runs([experiment.experiment_id], query, order_by=["start_time ASC"]))


def test_every_check_is_a_run_of_its_own_kind_and_a_point_of_the_series(sqlite_uri: str) -> None:
    ledger = open_ledger(sqlite_uri)
    trained(ledger)
    skipped(ledger)
    number = ledger.begin()
    ledger.gated(ledger.asked(number, {"zf.note": "n"}), gate_check(number, skips=False, value=0.8))
    first, second = runs(sqlite_uri, "gate")
    assert [r.data.tags["zf.gate"] for r in (first, second)] == ["skip", "retrain"]
    assert [r.info.run_name for r in (first, second)] == ["2 · gate: skip", "3 · gate: retrain"]
    assert (first.data.tags["zf.recurrence"], first.data.tags["zf.trained_in"]) == ("2", "1")
    assert (first.info.status, first.data.tags["zf.energy_source"]) == ("FINISHED", "simulated")
    assert first.data.metrics["zf.gate/value"] == 0.91
    assert first.data.metrics["zf.gate/f1"] == 0.5
    assert first.data.metrics["zf.gate/time_s"] == 2.0
    assert second.data.tags["zf.note"] == "n"
    (window,) = runs(sqlite_uri, "drift-window")
    assert {r.data.tags["zf.drift_window"] for r in (first, second)} == {window.info.run_id}
    client = MlflowClient(tracking_uri=sqlite_uri)
    series = client.get_metric_history(window.info.run_id, "zf.gate/value")
    assert [(p.step, p.value) for p in series] == [(2, 0.91), (3, 0.8)]
    assert [p.step for p in client.get_metric_history(window.info.run_id, "zf.cost_j")] == [1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_whatever_scores_are_called_and_are_the_recurrence_is_skipped(sqlite_uri: str, value: float) -> None:
    ledger = open_ledger(sqlite_uri)
    number = ledger.begin()
    scores = {
        "accuracy": 0.95,
        "f1@5 / macro": value,
        "../..": value,
        "": value,
        "x" * 1000: value,
        "Genauigkeit ä": 1.0,
    }
    ledger.gated(ledger.asked(number, {}), replace(gate_check(number, skips=True), scores=scores))
    (run,) = runs(sqlite_uri, "gate")
    assert (run.info.status, run.data.tags["zf.gate"]) == ("FINISHED", "skip")
    assert {"zf.gate/accuracy", "zf.gate/f1_5_macro", "zf.gate/Genauigkeit_"} <= set(run.data.metrics)
    assert ledger.open_claims() == {}


def test_an_evaluation_that_broke_has_no_value(sqlite_uri: str) -> None:
    ledger = open_ledger(sqlite_uri)
    number = ledger.begin()
    ledger.gated(ledger.asked(number, {}), replace(gate_check(number, skips=False, value=None), scores={}))
    (run,) = runs(sqlite_uri, "gate")
    assert "zf.gate/value" not in run.data.metrics
    assert run.data.tags["zf.detail"] == "because"


def test_skipped_recurrences_do_not_fill_a_window(sqlite_uri: str) -> None:
    job = replace(JOB, window=3)
    ledger = open_ledger(sqlite_uri, job)
    for record in (trained, skipped, trained, skipped, skipped, trained, trained):
        record(ledger)
    windows = runs(sqlite_uri, "drift-window")
    assert [w.data.params["zf.first_recurrence"] for w in windows] == ["1", "7"]
    folded = fold_windows(job, open_ledger(sqlite_uri, job).observations())
    assert [(w.first, w.last) for w in folded] == [(1, 6), (7, 7)]


def test_snapshots_go_on_over_skipped_recurrences(sqlite_uri: str) -> None:
    ledger = open_ledger(sqlite_uri)
    trained(ledger)
    for _ in range(12):
        skipped(ledger)
        ledger.history()
    trained(ledger)
    assert any("zf.snapshot" in w.data.tags for w in runs(sqlite_uri, "drift-window"))
    again = open_ledger(sqlite_uri)
    assert again.verify() == (True, 2)
    assert again.history().state.newest_model == (14, 1, 64)


def test_whoever_dies_while_asking_is_buried_and_the_gate_s_run_ends(sqlite_uri: str, tmp_path: Path) -> None:
    theirs = open_ledger(sqlite_uri, holder=replace(this_process(), started=1))
    theirs.asked(theirs.begin(), {})
    outbox = Outbox(tmp_path / "state")
    (buried,) = sweep(open_ledger(sqlite_uri), outbox).buried
    outbox.close()
    assert (buried.recurrence, buried.attempts) == (1, 0)
    assert [run.info.status for run in runs(sqlite_uri, "gate")] == ["KILLED"]


def test_a_long_evaluation_elsewhere_is_alive_while_it_says_so(
    sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = replace(this_process(), host="elsewhere")
    theirs, mine, outbox = open_ledger(sqlite_uri, holder=there), open_ledger(sqlite_uri), Outbox(tmp_path / "state")
    asked = theirs.asked(theirs.begin(), {})
    now = 1000.0
    monkeypatch.setattr(janitor, "monotonic_s", lambda: now)
    for _ in range(3):
        assert sweep(mine, outbox).buried == ()
        now += 299.0
        theirs.heartbeat(asked, there := there.next())
    assert sweep(mine, outbox).buried == ()
    now += 301.0
    assert len(sweep(mine, outbox).buried) == 1
    outbox.close()


def test_asking_says_that_one_is_alive(sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr(delivery, "_RETRY_S", 0.02)
    with brief.opened(sqlite_uri, tmp_path) as ledger:
        asked = ledger.asked(ledger.begin(), {})
        client, give_up = MlflowClient(tracking_uri=sqlite_uri), time.monotonic() + 20
        lease = client.get_run(asked).data.tags["zf.lease"]
        while client.get_run(asked).data.tags["zf.lease"] == lease and time.monotonic() < give_up:
            time.sleep(0.05)
        assert client.get_run(asked).data.tags["zf.lease"] != lease


def test_a_run_that_was_never_linked_is_discarded_and_a_linked_one_is_not(sqlite_uri: str) -> None:
    ledger = open_ledger(sqlite_uri)
    linked = ledger.asked(ledger.begin(), {})
    tags = dict(MlflowClient(tracking_uri=sqlite_uri).get_run(linked).data.tags)
    lost = Store(sqlite_uri).create_run(ledger.experiment_id, name="1 · gate", tags=tags)
    assert sweep_orphans(ledger, now_s=time.time() + 2 * 86_400) == [lost]


def test_what_was_observed_of_a_recurrence_whose_end_is_lost_makes_its_boundary(
    sqlite_uri: str, tmp_path: Path
) -> None:
    job = replace(JOB, window=2)
    trained(open_ledger(sqlite_uri, job))
    theirs = open_ledger(sqlite_uri, job, replace(this_process(), started=1))
    number = theirs.begin()
    theirs.observed(theirs.decided(decision(number), {}), observation(number))  # and then nothing was heard
    outbox = Outbox(tmp_path / "state")
    sweep(open_ledger(sqlite_uri, job), outbox)
    outbox.close()
    first, second = runs(sqlite_uri, "drift-window")
    assert first.data.tags["zf.ended_by"] == "full"
    assert second.data.params["zf.first_recurrence"] == "3"
    series = MlflowClient(tracking_uri=sqlite_uri).get_metric_history(first.info.run_id, "zf.cost_j")
    assert [p.step for p in series] == [1, 2]


def test_while_mlflow_is_away_nothing_is_asked_and_the_recurrence_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief.impatient(monkeypatch)
    asked = brief.gate_that_finds(0.95)
    monkeypatch.setattr(asked, "check", lambda *_: pytest.fail("it was asked"))
    done = brief.recur("http://127.0.0.1:9", tmp_path, gate=asked)
    assert (done.skipped, len(done.attempts)) == (False, 1)
