"""What stops counting when the fingerprint or the energy source changes is counted, said, and cheap to find."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from mlflow import MlflowClient

from tests.builders import JOB, decision, observation
from tests.ledger import brief
from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource
from zeus_flows.ledger.mlflow import snapshot
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct, open_durable
from zeus_flows.ledger.protocol import SetAside

CHANGED = replace(JOB, fingerprint="3c4d")
BEFORE = {"target": "accuracy >= 0.9", "optimizer": "sgd"}
AFTER = {"target": "accuracy >= 0.92", "optimizer": "sgd"}
WHY = "the fingerprint changed from f0 to 3c4d (target, metric, optimizer, learning-rate rule or version)"


def open_ledger(
    uri: str,
    job: Job = JOB,
    source: EnergySource = EnergySource.SIMULATED,
    comparable: Mapping[str, str] | None = None,
) -> MlflowLedger:
    return open_direct(job, tracking_uri=uri, energy_source=source, comparable=comparable)


def record(ledger: MlflowLedger, job: Job = JOB, source: EnergySource = EnergySource.SIMULATED) -> None:
    number = ledger.begin()
    done = observation(number, fingerprint=job.fingerprint, energy_source=source)
    ledger.history()
    ledger.observed(ledger.decided(decision(number), {}), done)
    ledger.ended(number, [done])


def windows(uri: str) -> int:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(JOB.name)
    assert experiment is not None
    return len(client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'drift-window'"))


def test_a_new_fingerprint_says_how_much_it_sets_aside(sqlite_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(12):
        record(open_ledger(sqlite_uri))
    assert open_ledger(sqlite_uri).history().set_aside is None
    assert "zf.snapshot" in open_ledger(sqlite_uri).layout.look().tags
    assert caplog.records == []
    history = open_ledger(sqlite_uri, CHANGED).history()
    assert history.set_aside == SetAside(12, WHY)
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert said.getMessage() == f"nightly: 12 observations of earlier recurrences do not count: {WHY}"
    record(open_ledger(sqlite_uri, CHANGED), CHANGED)
    assert open_ledger(sqlite_uri, CHANGED).history().set_aside == SetAside(12, WHY), "as long as the window lasts"
    assert len(caplog.records) == 1


def test_a_dry_run_hears_of_it_and_writes_nothing(sqlite_uri: str) -> None:
    assert open_ledger(sqlite_uri).would_set_aside() is None
    assert MlflowClient(tracking_uri=sqlite_uri).get_experiment_by_name(JOB.name) is None
    record(open_ledger(sqlite_uri))
    assert open_ledger(sqlite_uri).would_set_aside() is None
    said = open_ledger(sqlite_uri, CHANGED).would_set_aside()
    assert said == f"1 observation of an earlier recurrence does not count: {WHY}"
    assert windows(sqlite_uri) == 1


def test_another_energy_source_sets_aside_too(sqlite_uri: str) -> None:
    record(open_ledger(sqlite_uri))
    measured = open_ledger(sqlite_uri, source=EnergySource.MEASURED)
    assert measured.history().set_aside == SetAside(1, "the energy source changed from simulated to measured")


def test_what_changed_is_named_where_it_is_known(sqlite_uri: str) -> None:
    record(open_ledger(sqlite_uri, comparable=BEFORE))
    ledger = open_ledger(sqlite_uri, CHANGED, comparable=AFTER)
    why = "the target changed from accuracy >= 0.9 to accuracy >= 0.92"
    assert ledger.would_set_aside() == f"1 observation of an earlier recurrence does not count: {why}"
    assert ledger.history().set_aside == SetAside(1, why)
    before = MlflowClient(tracking_uri=sqlite_uri).get_run(open_ledger(sqlite_uri).layout.windows()[0])
    assert before.data.tags["zf.evidence"] == "target accuracy >= 0.9 became accuracy >= 0.92"
    both = open_ledger(
        *(sqlite_uri, replace(JOB, fingerprint="5e6f"), EnergySource.MEASURED),
        comparable={"target": "accuracy >= 0.92", "learning_rate": "linear"},
    )
    record(ledger, CHANGED)
    assert both.would_set_aside() == (
        "1 observation of an earlier recurrence does not count: the learning rate changed from nothing to linear and "
        "the optimizer changed from sgd to nothing and the energy source changed from simulated to measured"
    )


def test_a_window_of_an_earlier_version_is_told_what_its_recurrences_share(sqlite_uri: str) -> None:
    record(open_ledger(sqlite_uri))
    assert "zf.comparable" not in open_ledger(sqlite_uri).layout.look().tags
    open_ledger(sqlite_uri, comparable=BEFORE).history()
    said = open_ledger(sqlite_uri, CHANGED, comparable=AFTER).would_set_aside()
    assert said is not None
    assert said.endswith("the target changed from accuracy >= 0.9 to accuracy >= 0.92")


def test_words_that_are_too_long_or_were_changed_by_hand_stop_nobody(sqlite_uri: str) -> None:
    ledger = open_ledger(sqlite_uri, comparable={"target": "x" * 9000, "optimizer": "ä" * 9000})
    record(ledger)
    said = open_ledger(sqlite_uri, CHANGED, comparable=AFTER).would_set_aside()
    assert said is not None
    assert "…" in said
    broken = {"zf.comparable": "[1", "zf.set_aside": '{"observations": []}'}
    ledger.store.log(ledger.window().run_id, tags=broken)
    assert open_ledger(sqlite_uri).history().set_aside is None
    said = open_ledger(sqlite_uri, CHANGED, comparable=AFTER).would_set_aside()
    assert said is not None
    assert said.endswith(WHY)


def test_what_was_declared_dead_or_is_open_is_not_counted(sqlite_uri: str) -> None:
    ledger = open_ledger(sqlite_uri)
    record(ledger)
    ledger.decided(decision(ledger.begin()), {})
    ledger.declare_dead(ledger.open_attempts()[0], "a test says so")
    ledger.decided(decision(ledger.begin()), {})
    assert open_ledger(sqlite_uri, CHANGED).history().set_aside == SetAside(1, WHY)


def test_where_nothing_was_observed_nothing_is_set_aside(sqlite_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    open_ledger(sqlite_uri).begin()
    assert open_ledger(sqlite_uri, CHANGED).history().set_aside is None
    assert caplog.records == []


def test_counting_what_is_set_aside_reads_no_more_after_a_long_history(
    sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    call = Store._call

    def counting(self: Store, function: Callable[[], object]) -> object:
        counted["calls"] += 1
        return call(self, function)

    def cost() -> int:
        counted.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Store, "_call", counting)
            assert open_ledger(sqlite_uri, CHANGED).would_set_aside() is not None
        return counted["calls"]

    ledger = open_ledger(sqlite_uri)
    for _ in range(snapshot.EVERY + 2):
        record(ledger)
    early = cost()
    for _ in range(2 * snapshot.EVERY):
        record(ledger)
    assert cost() <= early <= 6


def test_while_mlflow_is_away_nothing_is_known_to_be_under_way_or_set_aside(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief.impatient(monkeypatch)
    ledger = open_durable(
        JOB,
        tracking_uri="http://127.0.0.1:9",
        energy_source=EnergySource.SIMULATED,
        state_dir=tmp_path,  # type: ignore[arg-type]
    )
    try:
        ledger.begin()
        history = ledger.history()
    finally:
        ledger.close(flush_s=0.0)
    assert (history.degraded, history.under_way, history.set_aside) == (True, (), None)
