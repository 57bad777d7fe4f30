"""An old decision is taken again from the page that it is on, however long the history is."""

from __future__ import annotations

import random

import pytest
from store_calls import recorded

from tests.core.builders import V100, job, observation
from zeus_flows.core import policy
from zeus_flows.core.explaining import explain
from zeus_flows.core.job import Job
from zeus_flows.core.records import Ask, Decision, EnergySource, decision_seed
from zeus_flows.errors import ConfigError
from zeus_flows.ledger.mlflow import names, pages
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.reporting.explain_report import explain_document, explain_recurrence

pytestmark = pytest.mark.slow


def opened(uri: str, a_job: Job) -> MlflowLedger:
    return open_direct(a_job, tracking_uri=uri, energy_source=EnergySource.SIMULATED)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SIZE", 6)


def run(ledger: MlflowLedger, a_job: Job, recurrences: int, seed: int = 0) -> list[Decision]:
    chance, decided = random.Random(seed), []
    for _ in range(recurrences):
        number, history = ledger.begin(), ledger.history()
        under_way = tuple(r for r in history.under_way if r != number)
        ask = Ask(number, 1, decision_seed(a_job.seed, number, 1), V100, under_way=under_way)
        decision = policy.decide(a_job, history.state, ask)
        epochs = round(10 + abs(decision.batch_size - 64) / 8 + chance.uniform(-2, 2))
        seen = observation(number, decision.batch_size, epochs, profiled=True, for_job=a_job)
        ledger.observed(ledger.decided(decision, {}), seen)
        ledger.ended(number, [seen])
        decided.append(decision)
    return decided


def test_every_recurrence_is_explained_as_it_was_decided(sqlite_uri: str, small_pages: None) -> None:
    a_job = job()
    decided = run(opened(sqlite_uri, a_job), a_job, 20)
    ledger = opened(sqlite_uri, a_job)
    for decision in decided:
        explained = explain_recurrence(a_job, ledger, decision.recurrence)
        (attempt,) = explained.attempts
        assert attempt.told.same, attempt.told.differences
        assert attempt.told.decided.batch_size == decision.batch_size
        assert explain_document(explained)["attempts"][0]["same"] is True


def test_a_full_page_keeps_the_fold_at_its_end_and_explaining_reads_one_page_of_attempts(
    sqlite_uri: str, small_pages: None
) -> None:
    a_job = job()
    run(opened(sqlite_uri, a_job), a_job, 20)
    ledger = opened(sqlite_uri, a_job)
    window = ledger.layout.look()
    kept = [ledger.layout.read_page(n).kept for n in ledger.layout.known_pages()]
    assert [list(of) for of in kept] == [[0], [1], [2], []]
    read = list[int]()
    (attempt,) = ledger.attempts_of(20)
    _, states = ledger.folded_before(attempt, lambda _, total: read.append(total))
    assert next(states).observations == 19
    assert max(read) <= pages.SIZE
    ledger.layout.tag_page(2, {names.SNAPSHOT_OF: "of another"})
    read.clear()
    _, states = ledger.folded_before(attempt, lambda _, total: read.append(total))
    assert next(states).observations == 19, "an earlier page's serves"
    assert max(read) == 8
    assert window.number == 1


def test_decisions_before_a_reset_and_of_another_fingerprint_are_explained_too(sqlite_uri: str) -> None:
    a_job, other = job(), job(fingerprint="other")
    run(opened(sqlite_uri, a_job), a_job, 3)
    opened(sqlite_uri, a_job).reset()
    run(opened(sqlite_uri, a_job), a_job, 2)
    ledger = opened(sqlite_uri, other)
    ledger.history()
    for number in range(1, 6):
        (attempt,) = ledger.attempts_of(number)
        then, states = ledger.folded_before(attempt)
        assert then.fingerprint == a_job.fingerprint
        assert explain(then, states, attempt.decision, changes=False).same


def test_a_deleted_run_is_named_as_a_difference(sqlite_uri: str) -> None:
    a_job = job()
    run(opened(sqlite_uri, a_job), a_job, 4)
    ledger = opened(sqlite_uri, a_job)
    ledger.store.delete(ledger.attempts_of(2)[0].run_id)
    (attempt,) = explain_recurrence(a_job, opened(sqlite_uri, a_job), 4).attempts
    assert not attempt.told.same
    assert "3 observations had been folded, and 2 are there now" in attempt.told.differences


def test_explaining_writes_nothing_and_unknown_recurrences_are_refused(sqlite_uri: str) -> None:
    a_job = job()
    run(opened(sqlite_uri, a_job), a_job, 2)
    ledger = opened(sqlite_uri, a_job)
    with recorded() as calls:
        explain_recurrence(a_job, ledger, None)
    assert not [call.name for call in calls if not call.name.startswith(("get", "search", "read"))]
    with pytest.raises(ConfigError, match="its newest is 2"):
        explain_recurrence(a_job, ledger, 3)
