"""A snapshot that an earlier version wrote: decided on at once, replaced in the background, never written on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.builders import JOB, decision, observation
from tests.ledger import brief
from zeus_flows.core import policy
from zeus_flows.core.drift_windows import Cause
from zeus_flows.core.job import Job
from zeus_flows.core.policy.snapshot import VERSION
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger.mlflow import history as reader
from zeus_flows.ledger.mlflow import pages, snapshot
from zeus_flows.ledger.mlflow.layout import Layout
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.mlflow.snapshot_writer import SnapshotWriter
from zeus_flows.ledger.open_ledger import open_direct

#: What a state of version 2 had.
V2 = (
    *("version", "settings", "observations", "order", "newest_model", "profiles", "spent", "current"),
    *("gpu", "samples_per_epoch", "rates", "max_power_w", "default_epochs", "belief"),
)


def open_ledger(uri: str, job: Job = JOB) -> MlflowLedger:
    return open_direct(job, tracking_uri=uri, energy_source=EnergySource.SIMULATED)


def record(uri: str, times: int = 1) -> None:
    ledger = open_ledger(uri)
    for _ in range(times):
        number = ledger.begin()
        observed = observation(number, energy_j=5000.0 + number)
        ledger.observed(ledger.decided(decision(number), {}), observed)
        ledger.ended(number, [observed])


def plant(uri: str, *, observations: int | None = None) -> None:
    """Put a snapshot of everything so far, as version 2 wrote it, in place of the one that is there."""
    ledger = open_ledger(uri)
    data = policy.to_json(ledger.history().state)
    old = {name: data[name] for name in V2} | {"version": 2, "infeasible": {}}
    if observations is not None:  # so that it can be told who decided on it
        old["observations"] = observations
    body = json.dumps(old)
    head = {"upto": ledger.last_recurrence(), "pieces": 1, "digest": snapshot._digest(body)}
    ledger.store.log(ledger.window().run_id, tags={snapshot.HEAD: json.dumps(head), f"{snapshot.HEAD}.0": body})


def tags(uri: str) -> dict[str, str]:
    return dict(MlflowClient(tracking_uri=uri).get_run(open_ledger(uri).layout.look().run_id).data.tags)


def version(uri: str) -> int:
    read = snapshot._read(tags(uri), snapshot.HEAD)
    assert read is not None
    return int(read[1]["version"])


def eventually(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.fixture
def uri(sqlite_uri: str) -> str:
    record(sqlite_uri, 5)
    plant(sqlite_uri, observations=999)
    return sqlite_uri


def test_it_is_decided_on_at_once_and_replaced_meanwhile(
    uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zeus_flows")
    with brief.opened(uri, tmp_path) as ledger:
        ledger.begin()
        assert ledger.history().state.observations == 999
        eventually(lambda: version(uri) == policy.to_json(policy.initial(JOB))["version"])
        assert ledger.history().state == policy.fold(JOB, ledger.observations())
    said = [r.getMessage() for r in caplog.records if "folded anew" in r.getMessage()]
    assert said == [
        "nightly: an earlier version wrote the snapshot, so the history is folded anew",
        "nightly: the history is folded anew; the snapshot covers 5 recurrences",
    ]
    assert open_ledger(uri).verify() == (True, 5)


def test_no_snapshot_is_written_from_it(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MlflowLedger, "refold", lambda *_: 0)
    before = {name: value for name, value in tags(uri).items() if name.startswith(snapshot.HEAD)}
    for _ in range(2 * snapshot.EVERY):
        brief.recur(uri, tmp_path)
    assert {name: value for name, value in tags(uri).items() if name.startswith(snapshot.HEAD)} == before
    known = snapshot.load(JOB, before)
    assert known is not None
    with pytest.raises(ValueError, match="earlier version"):
        snapshot.dump(known)


def test_a_command_waits_for_it_to_be_folded_anew(uri: str) -> None:
    ledger = open_ledger(uri)
    assert ledger.history().state == policy.fold(JOB, ledger.observations())
    assert version(uri) == VERSION
    plant(uri, observations=999)
    assert open_ledger(uri).verify() == (True, 5)
    assert version(uri) == 2, "who only looks writes nothing"


def test_whatever_goes_wrong_is_said_and_tried_again_in_the_next_recurrence(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def broken(self: MlflowLedger, stopped: Callable[[], bool]) -> int:
        tries.append(stopped())
        raise RuntimeError("for a test")

    monkeypatch.setattr(MlflowLedger, "refold", broken)
    done = [brief.recur(uri, tmp_path) for _ in range(2)]
    assert tries == [False, False], "once in each recurrence"
    assert all(recurrence.converged for recurrence in done)
    assert "RuntimeError; the next recurrence goes on folding the history anew" in caplog.text


def test_closing_does_not_wait_for_the_end_of_it(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def long(self: MlflowLedger, stopped: Callable[[], bool]) -> int:
        while not stopped():
            time.sleep(0.01)
        return 0

    monkeypatch.setattr(MlflowLedger, "refold", long)
    with brief.opened(uri, tmp_path) as ledger:
        ledger.begin()
        ledger.history()
        thread = ledger._refolding.thread
        assert thread is not None
        assert (thread.is_alive(), thread.daemon) == (True, True)
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert not thread.is_alive()


def test_what_was_folded_is_kept_beside_the_one_that_serves(sqlite_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SIZE", 3)
    monkeypatch.setattr(reader, "_STRIDE", 6)
    record(sqlite_uri, 10)
    plant(sqlite_uri)
    asked = iter([False, False, False, True])
    assert open_ledger(sqlite_uri).refold(lambda: next(asked)) == 0
    begun = snapshot.load(JOB, tags(sqlite_uri), head=snapshot.ANEW)
    assert begun is not None
    assert (begun.upto, version(sqlite_uri)) == (9, 2), "the old one serves as long as the new one is not done"
    ledger = open_ledger(sqlite_uri)
    assert ledger.history(wait_for_refold=False).state.observations == 10
    read: list[int] = []
    read_page = Layout.read_page

    def reading(self: Layout, number: int, *, looked: bool = False) -> Page:
        read.append(number)
        return read_page(self, number, looked=looked)

    monkeypatch.setattr(Layout, "read_page", reading)
    assert open_ledger(sqlite_uri).refold() == 10
    assert read == [2, 3], "only the pages from the ninth recurrence on"
    assert snapshot.load(JOB, tags(sqlite_uri), head=snapshot.ANEW) is None
    assert open_ledger(sqlite_uri).verify() == (True, 10)
    assert version(sqlite_uri) == VERSION


def test_progress_is_kept_in_strides(sqlite_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SIZE", 2)
    monkeypatch.setattr(reader, "_STRIDE", 4)
    record(sqlite_uri, 9)
    plant(sqlite_uri)
    kept = []
    keep = SnapshotWriter.keep

    def noting(self: SnapshotWriter, *args: object, **named: object) -> None:
        kept.append((getattr(args[1], "upto", 0), named.get("head", snapshot.HEAD)))
        keep(self, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(SnapshotWriter, "keep", noting)
    open_ledger(sqlite_uri).refold()
    assert kept == [(4, snapshot.ANEW), (8, snapshot.ANEW), (9, snapshot.HEAD)]


def test_a_window_that_begins_meanwhile_gets_the_new_one(uri: str) -> None:
    ledger, other = open_ledger(uri), open_ledger(uri)

    def a_window_begins() -> bool:
        window = other.layout.look()
        if window.number == 1:
            kept = {name: value for name, value in window.tags.items() if name.startswith(snapshot.HEAD)}
            other.layout.open_after(
                window, Cause.DRIFT, evidence="", first=6, counts_from=window.counts_from, tags=kept
            )
        return False

    assert ledger.refold(a_window_begins) == 5
    assert (other.layout.look().number, version(uri)) == (2, VERSION)


def test_a_snapshot_of_other_settings_is_folded_anew_in_place_and_a_long_one_says_so(
    sqlite_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zeus_flows")
    monkeypatch.setattr(pages, "SIZE", 2)
    monkeypatch.setattr(reader, "_WORTH_SAYING", 10)
    record(sqlite_uri, 13)
    open_ledger(sqlite_uri).history()
    caplog.clear()
    changed = replace(JOB, eta=0.9)
    ledger = open_ledger(sqlite_uri, changed)
    assert ledger.history().state == policy.fold(changed, ledger.observations())
    assert [r.getMessage() for r in caplog.records] == [
        "nightly: no snapshot is of use, so 13 recurrences are folded anew"
    ]
    caplog.clear()
    open_ledger(sqlite_uri, changed).history()
    assert caplog.records == []
