"""The janitor: who is dead, who is not, and what is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.builders import JOB, decision, observation
from tests.ledger import brief
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import AlreadyObserved, DeclaredDead, StoreUnavailable
from zeus_flows.ledger import janitor
from zeus_flows.ledger.janitor import Swept, sweep, sweep_orphans
from zeus_flows.ledger.lease import Holder, this_process
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.ledger.outbox import Outbox


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    outbox = Outbox(tmp_path / "state")
    yield outbox
    outbox.close()


@pytest.fixture
def held_by(sqlite_uri: str) -> Callable[[Holder], MlflowLedger]:
    def opened(holder: Holder) -> MlflowLedger:
        return MlflowLedger(JOB, Store(sqlite_uri), EnergySource.SIMULATED, holder=holder)

    return opened


@pytest.fixture
def mine(held_by: Callable[[Holder], MlflowLedger]) -> MlflowLedger:
    return held_by(this_process())


def explore(ledger: MlflowLedger) -> str:
    return ledger.decided(decision(ledger.begin(), batch_size=128, explores=True), {})


Open = Callable[[Holder], MlflowLedger]


def test_a_process_that_ended_on_this_machine_is_buried_at_once(
    held_by: Open, mine: MlflowLedger, outbox: Outbox
) -> None:
    explore(held_by(replace(this_process(), started=1, flow_run_id="flow")))
    told: list[tuple[str, str]] = []
    (buried,) = sweep(mine, outbox, bury_flow_run=lambda run, why: told.append((run, why))).buried
    assert (buried.recurrence, buried.attempts, buried.flow_run_id) == (1, 1, "flow")
    assert "has ended" in buried.why
    assert told == [("flow", buried.why)]
    history = mine.history()
    assert (history.in_flight, history.state.observations) == ((), 0)
    assert mine.open_claims() == {}
    assert sweep(mine, outbox).buried == ()


def test_a_rebooted_machine_s_recurrence_is_buried(
    held_by: Open, mine: MlflowLedger, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeus_flows.ledger.lease._machine_id", lambda: "machine-1")
    held_by(replace(this_process(), boot="before")).begin()  # killed before it decided
    (buried,) = sweep(mine, outbox).buried
    assert (buried.recurrence, buried.attempts) == (1, 0)


def test_another_machine_is_dead_after_five_silent_minutes_whatever_the_wall_clock_says(
    held_by: Open, mine: MlflowLedger, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = replace(this_process(), host="elsewhere")
    theirs = held_by(there)
    attempt = explore(theirs)
    now = 1000.0
    monkeypatch.setattr(janitor, "monotonic_s", lambda: now)
    assert sweep(mine, outbox).buried == ()
    monkeypatch.setattr(time, "time", lambda: 86_400.0)  # a day from the epoch: long ago
    now += 299.0
    assert sweep(mine, outbox).buried == ()
    theirs.heartbeat(attempt, there.next())
    now += 299.0
    assert sweep(mine, outbox).buried == ()
    now += 301.0
    (buried,) = sweep(mine, outbox).buried
    assert "nothing was heard of it for 301 s" in buried.why


def test_on_a_machine_that_tells_no_boot_a_process_is_dead_after_five_silent_minutes_and_not_before(
    held_by: Open, mine: MlflowLedger, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeus_flows.ledger.lease._boot_id", lambda: "")
    explore(held_by(replace(this_process(), started=1)))  # a namesake's: its process is not among those of this machine
    now = 1000.0
    monkeypatch.setattr(janitor, "monotonic_s", lambda: now)
    assert sweep(mine, outbox).buried == ()
    now += 299.0
    assert sweep(mine, outbox).buried == ()
    now += 2.0
    (buried,) = sweep(mine, outbox).buried
    assert "nothing was heard of it for 301 s" in buried.why


def test_a_second_attempt_is_not_mistaken_for_the_first_seen_long_ago(
    held_by: Open, mine: MlflowLedger, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = held_by(replace(this_process(), host="elsewhere"))
    number = theirs.begin()
    now = 1000.0
    monkeypatch.setattr(janitor, "monotonic_s", lambda: now)
    assert sweep(mine, outbox).buried == ()  # seen between its number and its decision
    first = theirs.decided(decision(number), {})
    assert sweep(mine, outbox).buried == ()
    now += 3600.0
    theirs.observed(first, observation(number))
    assert sweep(mine, outbox).buried == ()  # and between its attempts
    theirs.decided(decision(number, 2), {})
    assert sweep(mine, outbox).buried == ()


def test_a_flow_run_that_ended_elsewhere_is_buried(held_by: Open, mine: MlflowLedger, outbox: Outbox) -> None:
    explore(held_by(replace(this_process(), host="elsewhere", flow_run_id="over")))
    explore(held_by(replace(this_process(), host="elsewhere", flow_run_id="running")))
    (buried,) = sweep(mine, outbox, flow_run_ended=lambda run: run == "over").buried
    assert (buried.recurrence, buried.why) == (1, "its flow run has ended")


def test_the_living_are_left_alone(held_by: Open, mine: MlflowLedger, outbox: Outbox) -> None:
    attempt = explore(held_by(replace(this_process(), flow_run_id="flow")))
    assert sweep(mine, outbox, flow_run_ended=lambda _: True).buried == ()
    assert [f.explores for f in mine.history().in_flight] == [True]
    mine.observed(attempt, observation(1, batch_size=128))


def test_a_late_report_of_an_attempt_declared_dead_is_refused_and_changes_nothing(
    held_by: Open, mine: MlflowLedger, outbox: Outbox, sqlite_uri: str
) -> None:
    theirs = held_by(replace(this_process(), started=1))
    attempt = explore(theirs)
    sweep(mine, outbox)
    client = MlflowClient(tracking_uri=sqlite_uri)
    before = client.get_run(attempt).to_dictionary()
    with pytest.raises(AlreadyObserved):
        theirs.observed(attempt, observation(1, batch_size=128))
    with pytest.raises(DeclaredDead):
        theirs.decided(decision(1, 2), {})
    assert client.get_run(attempt).to_dictionary() == before
    assert mine.observations() == ()
    assert mine.history().in_flight == ()
    assert mine.verify() == (True, 0)


def test_a_durable_ledger_hears_that_its_attempt_was_declared_dead(
    sqlite_uri: str, tmp_path: Path, mine: MlflowLedger
) -> None:
    with brief.opened(sqlite_uri, tmp_path) as ledger:
        attempt = ledger.decided(decision(ledger.begin(), explores=True), {})
        (still_open,) = mine.open_attempts()
        assert mine.declare_dead(still_open, "a test says so")
        with pytest.raises(AlreadyObserved):
            ledger.observed(attempt, observation(1))


def test_what_a_dead_process_left_in_the_outbox_goes_before_its_burial(
    held_by: Open, mine: MlflowLedger, outbox: Outbox
) -> None:
    dead = replace(this_process(), started=1)
    attempt = explore(held_by(dead))
    item = outbox.put(mine.key, attempt, "observed", "{}", owner=dead.dump(), wall_s=0.0)
    assert sweep(mine, outbox).buried == ()
    outbox.remove(item)
    assert len(sweep(mine, outbox).buried) == 1


def test_a_number_whose_decision_waits_in_the_outbox_is_not_closed(
    held_by: Open, mine: MlflowLedger, outbox: Outbox
) -> None:
    dead = replace(this_process(), started=1)
    held_by(dead).begin("token.1")
    item = outbox.put(mine.key, "token.1-1", "decided", "{}", owner=dead.dump(), wall_s=0.0)
    assert sweep(mine, outbox).buried == ()
    outbox.remove(item)
    assert len(sweep(mine, outbox).buried) == 1


def test_an_attempt_left_open_when_its_recurrence_ended_is_closed(mine: MlflowLedger, outbox: Outbox) -> None:
    explore(mine)
    mine.ended(1, ())
    assert len(mine.open_attempts()) == 1
    sweep(mine, outbox)
    assert mine.open_attempts() == ()
    assert mine.verify() == (True, 0)


def test_a_sweep_that_runs_out_of_time_says_what_it_closed_and_what_it_did_not_look_at(
    mine: MlflowLedger, held_by: Open, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = held_by(replace(this_process(), started=1))
    for _ in range(4):
        explore(theirs)
    bury = MlflowLedger.bury

    def slow(self: MlflowLedger, recurrence: int) -> None:
        if recurrence == 3:
            raise StoreUnavailable("MLflow took too long")
        bury(self, recurrence)

    monkeypatch.setattr(MlflowLedger, "bury", slow)
    swept = sweep(mine, outbox)
    assert [buried.recurrence for buried in swept.buried] == [1, 2]
    assert (swept.unseen, swept.why) == ((3, 4), "MLflow took too long")
    monkeypatch.setattr(MlflowLedger, "bury", bury)
    again = sweep(mine, outbox)
    assert ([buried.recurrence for buried in again.buried], again.unseen, again.why) == ([3, 4], (), "")

    def away(_self: MlflowLedger) -> None:
        raise StoreUnavailable("MLflow took too long")

    monkeypatch.setattr(MlflowLedger, "unfinished", away)
    assert sweep(mine, outbox) == Swept(why="MLflow took too long")


def test_runs_that_were_never_linked_are_deleted_after_a_day(mine: MlflowLedger, sqlite_uri: str) -> None:
    linked = explore(mine)
    client = MlflowClient(tracking_uri=sqlite_uri)
    tags = {"zf.kind": "attempt", "zf.recurrence": "1", "zf.attempt": "1"}
    orphans = {
        client.create_run(mine.experiment_id, tags=tags).info.run_id,
        client.create_run(mine.experiment_id, tags={"zf.kind": "drift-window"}).info.run_id,
    }
    foreign = client.create_run(mine.experiment_id).info.run_id
    assert sweep_orphans(mine, now_s=time.time()) == []
    assert set(sweep_orphans(mine, now_s=time.time() + 2 * 86_400)) == orphans
    assert {client.get_run(run).info.lifecycle_stage for run in (linked, foreign)} == {"active"}
    assert mine.window().number == 1
    assert open_direct(JOB, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED).begin() == 2
