"""How often a recurrence asks MLflow, counted where its calls reach the store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from mlflow.store.tracking.rest_store import RestStore
from store_calls import StoreCall, recorded

from tests.builders import GPU, JOB, decision, observation
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger.mlflow import snapshot
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct, open_durable

#: Calls of a recurrence of one epoch, without gate, model or figures.
MOST = 16


def one_recurrence(uri: str, state_dir: Path, *, epochs: int = 1, job: Job = JOB) -> list[StoreCall]:
    """Run a recurrence as production does, without Prefect and training; return what it asked MLflow."""
    source = EnergySource.SIMULATED
    with (
        recorded() as calls,
        closing(open_durable(job, tracking_uri=uri, energy_source=source, state_dir=state_dir)) as ledger,
    ):
        ledger.sweep()
        assert ledger.experiment_id
        number = ledger.begin()
        history = ledger.history()
        assert history.under_way == (number,)
        assert not history.in_flight
        attempt = ledger.decided(decision(number), {"zf.gpu": GPU.key})
        for epoch in range(1, epochs + 1):
            ledger.epoch(attempt, EpochReport(epoch, 0.5, 10.0, 1.0, 150.0))
        observed = observation(number, fingerprint=job.fingerprint)
        ledger.observed(attempt, observed)
        ledger.ended(number, [observed])
        wait_until(lambda: not ledger.left())
    return calls


def wait_until(done: Callable[[], bool]) -> None:
    """Wait for what a busy machine takes longer for."""
    give_up = time.monotonic() + 60
    while not done() and time.monotonic() < give_up:
        time.sleep(0.05)


def opened(uri: str) -> MlflowLedger:
    return open_direct(JOB, tracking_uri=uri, energy_source=EnergySource.SIMULATED)


def test_a_recurrence_asks_mlflow_at_most_sixteen_times_and_reads_nothing_twice(
    sqlite_uri: str, tmp_path: Path
) -> None:
    one_recurrence(sqlite_uri, tmp_path)  # makes the experiments
    for _ in range(snapshot.EVERY + 2):
        calls = one_recurrence(sqlite_uri, tmp_path)
        assert len(calls) <= MOST, Counter(call.name for call in calls)
        by_name = [str(call.by_name) for call in calls if call.name == "get_experiment_by_name"]
        assert len(set(by_name)) == len(by_name) == 2
        read = Counter(call.run_id for call in calls if call.name == "get_run")
        assert set(read.values()) == {1}
    assert snapshot.covers(opened(sqlite_uri).layout.look().tags) >= snapshot.EVERY
    assert opened(sqlite_uri).verify() == (True, snapshot.EVERY + 3)


def test_a_further_epoch_is_one_further_call(sqlite_uri: str, tmp_path: Path) -> None:
    one_recurrence(sqlite_uri, tmp_path)
    short, long = one_recurrence(sqlite_uri, tmp_path), one_recurrence(sqlite_uri, tmp_path, epochs=6)
    assert len(long) == len(short) + 5


def test_later_drift_windows_cost_no_call_more(sqlite_uri: str, tmp_path: Path) -> None:
    one_recurrence(sqlite_uri, tmp_path)
    for version in ("f1", "f2"):
        job = replace(JOB, fingerprint=version)
        one_recurrence(sqlite_uri, tmp_path, job=job)  # opens the window
        for _ in range(2):
            calls = one_recurrence(sqlite_uri, tmp_path, job=job)
            assert len(calls) <= MOST, Counter(call.name for call in calls)
    assert opened(sqlite_uri).layout.look().number == 3


def test_no_call_looks_at_another_job_s_runs(sqlite_uri: str, tmp_path: Path) -> None:
    for k in range(4):
        one_recurrence(sqlite_uri, tmp_path, job=replace(JOB, name=f"other-{k}"))
    one_recurrence(sqlite_uri, tmp_path)
    ledger = opened(sqlite_uri)
    mine = {ledger.experiment_id, ledger.layout.whereabouts().root[0]}
    with recorded() as looked:
        ledger.state()
        ledger.would_set_aside()
        ledger.layout.newest_windows()
        ledger.verify()
    for call in (*looked, *one_recurrence(sqlite_uri, tmp_path)):
        said = call.by_name
        match call.name:
            case "get_experiment_by_name":
                assert said["experiment_name"] in (JOB.name, f"{JOB.name}.ledger")
            case "search_runs":
                assert set(said["experiment_ids"]) <= mine
                assert {run.info.experiment_id for run in call.answer} <= mine
            case "create_run":
                assert said["experiment_id"] in mine
            case _:
                assert ledger.store.client.get_run(call.run_id).info.experiment_id in mine, call.name


def test_a_server_sees_as_few_requests(server_on_sqlite: str, tmp_path: Path) -> None:
    job = replace(JOB, name="asked-over-http")
    one_recurrence(server_on_sqlite, tmp_path, job=job)
    with recorded(RestStore) as requests:
        one_recurrence(server_on_sqlite, tmp_path, job=job)
    assert 0 < len(requests) <= MOST


def test_what_another_process_began_meanwhile_is_seen(sqlite_uri: str, tmp_path: Path) -> None:
    """A sweep's reading is used only where nobody took the number that it says is next."""
    one_recurrence(sqlite_uri, tmp_path)
    source = EnergySource.SIMULATED
    with closing(open_durable(JOB, tracking_uri=sqlite_uri, energy_source=source, state_dir=tmp_path)) as ledger:
        ledger.sweep()
        other = opened(sqlite_uri)
        theirs = other.begin()
        other.decided(decision(theirs), {})
        number = ledger.begin()
        assert number == theirs + 1
        history = ledger.history()
    assert history.under_way == (theirs, number)
    assert [attempt.recurrence for attempt in history.in_flight] == [theirs]


def test_a_window_that_was_reset_while_a_recurrence_trained_stays_as_it_ended(sqlite_uri: str, tmp_path: Path) -> None:
    source = EnergySource.SIMULATED
    one_recurrence(sqlite_uri, tmp_path)
    with closing(open_durable(JOB, tracking_uri=sqlite_uri, energy_source=source, state_dir=tmp_path)) as ledger:
        ledger.sweep()
        number = ledger.begin()
        ledger.history()
        attempt = ledger.decided(decision(number), {})
        assert opened(sqlite_uri).reset() == 2
        observed = observation(number)
        ledger.observed(attempt, observed)
        ledger.ended(number, [observed])
        wait_until(lambda: not ledger.left())
    after = opened(sqlite_uri)
    assert after.window().number == 2
    assert after.state().observations == 0
    first = after.store.run(after.layout.windows()[0])
    assert first.data.tags["zf.ended_by"] == "reset"
    assert first.data.metrics["zf.batch_size"] == observed.batch_size
