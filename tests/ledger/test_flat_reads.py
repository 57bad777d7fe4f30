"""What people look at costs the same however long the history is; what reads all of it says how far it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import column, table, text
from store_calls import recorded

from tests.builders import JOB, decision, observation
from tests.training_functions import write_job
from zeus_flows.core.drift_windows import Cause
from zeus_flows.core.job import Job
from zeus_flows.core.prices import Tariff
from zeus_flows.core.records import EnergySource
from zeus_flows.job_file import load_job
from zeus_flows.ledger.mlflow import names, pages, tables
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.reporting.drift_report import read_drift
from zeus_flows.reporting.job_report import read_report


def opened(uri: str, job: Job = JOB) -> MlflowLedger:
    return open_direct(job, tracking_uri=uri, energy_source=EnergySource.SIMULATED)


def record(uri: str, recurrences: int, job: Job = JOB) -> None:
    ledger = opened(uri, job)
    for _ in range(recurrences):
        number = ledger.begin()
        observed = observation(number, fingerprint=job.fingerprint)
        ledger.observed(ledger.decided(decision(number), {}), observed)
        ledger.ended(number, [observed])
        ledger.history()


def calls_of(look: Callable[[], object]) -> Counter[str]:
    with recorded() as calls:
        look()
    return Counter(call.name for call in calls)


def test_summary_dry_run_drift_and_report_ask_no_more_after_many_pages(
    tmp_path: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SIZE", 10)
    job_file = load_job(write_job(tmp_path / "job.yaml", default_batch_size=64))
    job = job_file.core()

    def look() -> None:
        opened(sqlite_uri, job).state()
        read_drift(job_file, sqlite_uri)
        read_report(
            job_file,
            (job, opened(sqlite_uri, job)),
            uri=sqlite_uri,
            where="here",
            tariff=Tariff(),
            at=datetime(2026, 3, 1, tzinfo=UTC),
            most=8,
        )
        changed = opened(sqlite_uri, replace(job, fingerprint="changed"))
        changed.state()
        assert "8 observations" in (changed.would_set_aside() or "") or number > 8

    number = 8
    record(sqlite_uri, 8, job)
    short = calls_of(look)
    number = 38
    record(sqlite_uri, 30, job)
    assert calls_of(look).total() <= short.total() + 1  # a page that is not the hinted one


def test_a_changed_job_s_state_is_the_one_that_it_would_decide_on(sqlite_uri: str) -> None:
    record(sqlite_uri, 3)
    other = replace(JOB, fingerprint="other")
    assert opened(sqlite_uri, other).state().observations == 0
    record(sqlite_uri, 2, other)
    assert opened(sqlite_uri).state().observations == 3, "the old runs count again when it changes back"
    assert opened(sqlite_uri).history().state.observations == 3


def test_the_newest_drift_windows_are_found_from_the_newest_one(sqlite_uri: str) -> None:
    ledger = opened(sqlite_uri)
    record(sqlite_uri, 1)
    for _ in range(3):
        ledger.layout.open_window(Cause.RESET, evidence="by hand", counts_from=2)
    numbers = [run.data.params[names.WINDOW] for run in opened(sqlite_uri).layout.newest_windows(2)]
    assert numbers == ["3", "4"]
    every = opened(sqlite_uri).layout.newest_windows()
    assert [run.info.run_id for run in every] == list(ledger.layout.windows())


def test_windows_that_an_earlier_version_opened_are_found_too(sqlite_uri: str) -> None:
    ledger = opened(sqlite_uri)
    record(sqlite_uri, 1)
    for _ in range(2):
        ledger.layout.open_window(Cause.RESET, evidence="by hand", counts_from=2)
    for run_id in ledger.layout.windows()[1:]:
        ledger.store.ask(lambda client, r=run_id: client.delete_tag(r, names.PREVIOUS_WINDOW))  # type: ignore[misc]
    found = opened(sqlite_uri).layout.newest_windows()
    assert [run.data.params[names.WINDOW] for run in found] == ["1", "2", "3"]


def test_a_history_read_from_the_tables_is_the_one_that_mlflow_tells(
    sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SIZE", 2)
    record(sqlite_uri, 7)
    ledger = opened(sqlite_uri)
    gone, unreadable = (ledger.layout.read_pages(0).attempts[n, 1] for n in (2, 3))
    ledger.store.delete(gone)
    with ledger.store.client._tracking_client.store.ManagedSessionMaker() as session:
        change = text("update params set value = 'nonsense' where run_uuid = :run and key = 'zf.observation'")
        session.execute(change, {"run": unreadable})
    told: list[tuple[int, int]] = []
    fast = opened(sqlite_uri).observations(lambda done, total: told.append((done, total)))
    assert [o.recurrence for o in fast] == [1, 4, 5, 6, 7]
    assert told[-1] == (7, 7)
    assert told == sorted(told)
    monkeypatch.setattr("zeus_flows.ledger.mlflow.client.read_params", lambda *_: {})
    assert opened(sqlite_uri).observations() == fast


def test_tables_that_are_not_there_are_no_answer(sqlite_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record(sqlite_uri, 1)
    ledger = opened(sqlite_uri)
    (run_id,) = ledger.layout.read_pages(0).attempts.values()
    client = ledger.store.client
    assert set(tables.read_params(client, [run_id], ["zf.seed"])[run_id]) == {"zf.seed"}
    other = table("others", column("run_uuid"), column("key"), column("value"))
    monkeypatch.setattr(tables, "_PARAMS", other)
    assert tables.read_params(client, [run_id]) == {}
    assert len(opened(sqlite_uri).observations()) == 1
