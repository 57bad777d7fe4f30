"""Recurrences without an observation: the fold hears of each one once, in its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import JOB, decision, gate_check, observation
from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.policy import State, engine
from zeus_flows.core.records import EnergySource, Gap
from zeus_flows.ledger.janitor import sweep
from zeus_flows.ledger.lease import Holder, this_process
from zeus_flows.ledger.mlflow import names, pages
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.pages import Page
from zeus_flows.ledger.outbox import Outbox

ALONE = replace(JOB, translate=False)


def open_ledger(uri: str, holder: Holder | None = None, job: Job = ALONE) -> MlflowLedger:
    return MlflowLedger(job, Store(uri), EnergySource.SIMULATED, holder=holder)


def trained(uri: str) -> None:
    ledger = open_ledger(uri)
    number = ledger.begin()
    ledger.observed(ledger.decided(decision(number), {}), observation(number))
    ledger.ended(number, [observation(number)])


def skipped(uri: str) -> None:
    ledger = open_ledger(uri)
    number = ledger.begin()
    ledger.gated(ledger.asked(number, {}), gate_check(number, skips=True))


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Let the state count each gap, where it is kept by snapshots too; note the order in which the fold goes."""
    order: list[tuple[str, int]] = []
    advance = policy.advance

    def pass_over(job: Job, state: State, gap: Gap) -> State:
        order.append(("gap", gap.recurrence))
        times = state.max_power_w.get(name := f"gap {gap.recurrence}", 0.0)
        return replace(state, max_power_w={**state.max_power_w, name: times + 1})

    def noted(job: Job, state: State, observation: object) -> State:
        order.append(("observation", observation.recurrence))  # type: ignore[attr-defined]
        return advance(job, state, observation)  # type: ignore[arg-type]

    for module in (policy, engine):
        monkeypatch.setattr(module, "pass_over", pass_over)
        monkeypatch.setattr(module, "advance", noted)
    return order


def gaps_in(state: State) -> dict[int, float]:
    return {int(n.removeprefix("gap ")): times for n, times in state.max_power_w.items() if n.startswith("gap ")}


def test_the_fold_hears_of_each_skipped_recurrence_once_whatever_snapshots_there_are(sqlite_uri: str) -> None:
    for number in range(1, 21):
        (skipped if number % 3 == 2 else trained)(sqlite_uri)
        open_ledger(sqlite_uri).history()
    ledger = open_ledger(sqlite_uri)
    assert "zf.snapshot" in ledger.layout.look().tags
    assert gaps_in(ledger.history().state) == dict.fromkeys([2, 5, 8, 11, 14, 17, 20], 1.0)
    assert [gap.recurrence for gap in ledger.gaps()] == [2, 5, 8, 11, 14, 17, 20]
    assert ledger.history().state == policy.fold(ALONE, ledger.observations(), ledger.gaps())
    assert ledger.verify() == (True, 13)


def test_gaps_come_in_the_order_of_recurrences(sqlite_uri: str, heard: list[tuple[str, int]]) -> None:
    for step in (trained, skipped, trained, skipped):
        step(sqlite_uri)
    heard.clear()
    open_ledger(sqlite_uri).history()
    assert heard == [("observation", 1), ("gap", 2), ("observation", 3), ("gap", 4)]


def test_a_dead_recurrence_is_a_gap_where_nothing_that_counts_was_observed(sqlite_uri: str, tmp_path: Path) -> None:
    trained(sqlite_uri)
    dead = open_ledger(sqlite_uri, replace(this_process(), started=1))
    dead.begin()  # 2: it never decided
    dead.decided(decision(dead.begin()), {})  # 3: nor observed
    number = dead.begin()  # 4: one attempt was observed, and the next one not
    dead.observed(dead.decided(decision(number), {}), observation(number))
    dead.decided(decision(number, 2), {})
    trained(sqlite_uri)
    outbox = Outbox(tmp_path / "state")
    assert [buried.recurrence for buried in sweep(open_ledger(sqlite_uri), outbox).buried] == [2, 3, 4]
    outbox.close()
    for _ in range(10):
        trained(sqlite_uri)
        open_ledger(sqlite_uri).history()
    ledger = open_ledger(sqlite_uri)
    assert "zf.snapshot" in ledger.layout.look().tags
    assert ledger.gaps() == (Gap(2, skipped=False), Gap(3, skipped=False))
    assert gaps_in(ledger.history().state) == {2: 1.0, 3: 1.0}
    assert ledger.verify() == (True, 13)


def test_a_dead_recurrence_with_an_attempt_that_may_yet_count_is_no_gap_yet(sqlite_uri: str) -> None:
    ledger = open_ledger(sqlite_uri)
    attempt = ledger.decided(decision(ledger.begin()), {})
    ledger.close(1, pages.DEAD)  # by somebody who looked before it was decided
    assert open_ledger(sqlite_uri).gaps() == ()
    assert gaps_in(open_ledger(sqlite_uri).history().state) == {}
    ledger.observed(attempt, observation(1))
    assert open_ledger(sqlite_uri).gaps() == ()
    assert open_ledger(sqlite_uri).verify() == (True, 1)


def test_the_boundary_of_a_window_is_looked_for_after_the_gaps(sqlite_uri: str, heard: list[tuple[str, int]]) -> None:
    trained(sqlite_uri)
    skipped(sqlite_uri)
    ledger = open_ledger(sqlite_uri)
    number = ledger.begin()
    ledger.observed(ledger.decided(decision(number), {}), observation(number))
    heard.clear()
    ledger.ended(number, [observation(number)])
    assert heard[:3] == [("observation", 1), ("gap", 2), ("observation", 3)]


def test_after_a_reset_gaps_from_before_are_left_behind(sqlite_uri: str) -> None:
    trained(sqlite_uri)
    skipped(sqlite_uri)
    open_ledger(sqlite_uri).reset()
    skipped(sqlite_uri)
    assert [gap.recurrence for gap in open_ledger(sqlite_uri).gaps()] == [3]
    assert gaps_in(open_ledger(sqlite_uri).history().state) == {3: 1.0}


def test_an_end_says_what_asking_took_and_older_ends_are_read() -> None:
    ends = {
        1: "ended",
        2: "skipped",
        3: "dead",
        4: pages.skipped(time_s=1.25),
        5: pages.skipped(time_s=0.0001, energy_j=30.5),
        6: "skipped for lunch",
        7: "skipped 1.2.3 s",
        8: pages.skipped(time_s=float("nan"), energy_j=float("inf")),
    }
    page = Page().read({names.end(number): how for number, how in ends.items()})
    assert page.ended == set(ends)
    assert list(page.gaps.values()) == [
        Gap(2, skipped=True),
        Gap(3, skipped=False),
        Gap(4, skipped=True, time_s=1.25),
        Gap(5, skipped=True, time_s=0.0001, energy_j=30.5),
        Gap(7, skipped=True),
        Gap(8, skipped=True),
    ]


def test_what_a_gate_took_is_on_the_page(sqlite_uri: str) -> None:
    trained(sqlite_uri)
    skipped(sqlite_uri)
    ledger = open_ledger(sqlite_uri)
    assert ledger.store.params(ledger.layout.page(0))["zf.e.2"] == "skipped 2 s"
    assert ledger.gaps() == (Gap(2, skipped=True, time_s=2.0),)
