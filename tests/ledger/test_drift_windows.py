"""Drift windows are runs: what ends one, what it leaves, and that the history goes on across it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.builders import JOB, decision, observation
from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct


def open_ledger(uri: str, job: Job = JOB, source: EnergySource = EnergySource.SIMULATED) -> MlflowLedger:
    return open_direct(job, tracking_uri=uri, energy_source=source)


def record(uri: str, job: Job = JOB, *, epochs: int = 5, source: EnergySource = EnergySource.SIMULATED) -> None:
    ledger = open_ledger(uri, job, source)
    number = ledger.begin()
    ledger.history()
    done = observation(number, epochs=epochs, fingerprint=job.fingerprint, energy_source=source)
    ledger.observed(ledger.decided(decision(number), {}), done)
    ledger.ended(number, [done])


def windows(uri: str) -> list[Run]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(JOB.name)
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'drift-window'")
    return sorted(found, key=lambda run: int(run.data.params["zf.window"]))


def believed_of(window: Run) -> set[int]:
    return {arm["batch_size"] for arm in json.loads(window.data.tags["zf.beliefs"])}


def test_a_drift_ends_a_window_with_its_evidence_and_what_was_believed(sqlite_uri: str) -> None:
    for _ in range(6):
        record(sqlite_uri, epochs=5)
    record(sqlite_uri, epochs=19)
    first, second = windows(sqlite_uri)
    assert first.data.tags["zf.ended_by"] == "drift"
    assert "batch size 64 took 19 epochs where about 5" in first.data.tags["zf.evidence"]
    assert first.data.tags["zf.best_batch_size"] == "64"
    assert 64 in believed_of(first)
    assert (second.data.params["zf.opened_by"], second.data.params["zf.first_recurrence"]) == ("drift", "8")
    assert first.info.status == "FINISHED"
    record(sqlite_uri, epochs=19)
    client = MlflowClient(tracking_uri=sqlite_uri)
    steps = [[p.step for p in client.get_metric_history(w.info.run_id, "zf.cost_j")] for w in (first, second)]
    assert steps == [[1, 2, 3, 4, 5, 6, 7], [8]]
    assert open_ledger(sqlite_uri).verify() == (True, 8)


def test_a_full_window_is_followed_by_the_next_and_decisions_go_on(sqlite_uri: str) -> None:
    job = replace(JOB, window=3)
    for _ in range(7):
        record(sqlite_uri, job)
    assert [w.data.params["zf.opened_by"] for w in windows(sqlite_uri)] == ["first", "full", "full"]
    assert [w.data.params["zf.first_recurrence"] for w in windows(sqlite_uri)] == ["1", "4", "7"]
    state = open_ledger(sqlite_uri, job).history().state
    assert state == policy.fold(job, open_ledger(sqlite_uri, job).observations())
    assert state.observations == 7


def test_the_snapshot_goes_with_the_window(sqlite_uri: str) -> None:
    for _ in range(12):
        record(sqlite_uri, epochs=5)
    record(sqlite_uri, epochs=25)
    assert "zf.snapshot" in windows(sqlite_uri)[1].data.tags
    assert open_ledger(sqlite_uri).verify() == (True, 13)


def test_what_was_comparable_before_is_taken_up_again(sqlite_uri: str) -> None:
    for source in (EnergySource.SIMULATED, EnergySource.SIMULATED, EnergySource.MEASURED, EnergySource.SIMULATED):
        record(sqlite_uri, source=source)
    assert [w.data.tags["zf.energy_source"] for w in windows(sqlite_uri)] == ["simulated", "measured", "simulated"]
    assert [o.recurrence for o in open_ledger(sqlite_uri).observations()] == [1, 2, 4]


def test_a_reset_is_not_undone_by_a_change_to_and_fro(sqlite_uri: str) -> None:
    record(sqlite_uri)
    open_ledger(sqlite_uri).reset()
    record(sqlite_uri)
    record(sqlite_uri, source=EnergySource.MEASURED)
    record(sqlite_uri)
    assert [o.recurrence for o in open_ledger(sqlite_uri).observations()] == [2, 4]


def test_a_window_that_is_open_says_what_is_believed_so_far(sqlite_uri: str) -> None:
    record(sqlite_uri)
    (window,) = windows(sqlite_uri)
    assert window.data.tags["zf.best_batch_size"] == "64"
    assert 128 in believed_of(window)
    assert "zf.ended_by" not in window.data.tags


def test_whatever_ends_a_window_its_run_says_so_and_keeps_what_was_believed(sqlite_uri: str) -> None:
    record(sqlite_uri)
    open_ledger(sqlite_uri).reset()
    record(sqlite_uri)
    record(sqlite_uri, replace(JOB, fingerprint="f1"))
    record(sqlite_uri, replace(JOB, fingerprint="f1"), source=EnergySource.MEASURED)
    found = windows(sqlite_uri)
    assert [w.data.tags.get("zf.ended_by") for w in found] == ["reset", "fingerprint", "fingerprint", None]
    assert [w.data.params["zf.opened_by"] for w in found[1:]] == ["reset", "fingerprint", "fingerprint"]
    evidence = [w.data.tags.get("zf.evidence", "") for w in found]
    assert evidence[0].startswith("reset by hand")
    assert evidence[1] == "fingerprint f0 became f1"
    assert evidence[2] == "energy source simulated became measured"
    assert [w.data.tags["zf.best_batch_size"] for w in found] == ["64"] * 4


def test_what_was_saved_is_a_series_of_the_window_over_recurrences(sqlite_uri: str) -> None:
    for _ in range(3):
        record(sqlite_uri, epochs=5)
    client, run_id = MlflowClient(tracking_uri=sqlite_uri), windows(sqlite_uri)[0].info.run_id
    saved = client.get_metric_history(run_id, "zf.saved/cost_j")
    compared = client.get_metric_history(run_id, "zf.saved/recurrences")
    assert [point.step for point in saved] == [1, 2, 3]
    assert [point.value for point in compared] == [1.0, 2.0, 3.0]
    state = open_ledger(sqlite_uri).state()
    so_far = policy.saved(JOB, state).so_far
    assert so_far is not None
    assert saved[-1].value == pytest.approx(so_far.total.amount.cost_j, rel=1e-4), "metrics have five digits"
