"""Runs and experiments that people deleted, renamed or changed: named, mended, and never silently begun anew."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Experiment

from tests.builders import JOB, decision, gate_check, observation
from tests.ledger import brief
from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import AlreadyObserved, LedgerDamaged, StoreError, UnknownAttempt
from zeus_flows.ledger.mlflow import names, pages, snapshot
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.repair import repair
from zeus_flows.ledger.open_ledger import open_direct


class Nightly:
    """A job whose ledger is opened anew for everything, as every recurrence opens it."""

    def __init__(self, uri: str) -> None:
        self.uri, self.client = uri, MlflowClient(tracking_uri=uri)

    def ledger(self, job: Job = JOB) -> MlflowLedger:
        return open_direct(job, tracking_uri=self.uri, energy_source=EnergySource.SIMULATED)

    def run(self, times: int = 1, job: Job = JOB) -> None:
        """Run recurrences; each has an energy of its own."""
        for _ in range(times):
            ledger = self.ledger(job)
            number = ledger.begin()
            ledger.history()
            observed = observation(number, energy_j=5000.0 + number, fingerprint=job.fingerprint)
            ledger.observed(ledger.decided(decision(number), {}), observed)
            ledger.ended(number, [observed])

    def attempt(self, recurrence: int) -> str:
        return self.ledger().layout.read_page_of(recurrence).attempts[recurrence, 1]

    def counting(self) -> list[int]:
        """Return what the next decision is taken on, after checking that it is the fold."""
        ledger = self.ledger()
        read = ledger.observations()
        assert ledger.history().state == policy.fold(JOB, read, ledger.gaps())
        assert self.ledger().verify() == (True, len(read))
        return [o.recurrence for o in read]

    def repair(self) -> tuple[list[str], list[str]]:
        said = repair(Store(self.uri), JOB.name)
        return said.done, said.lost

    def remove(self, run_id: str) -> None:
        self.client.delete_run(run_id)

    def remove_for_good(self, run_id: str) -> None:
        """Delete a run as `mlflow gc` does."""
        self.client.delete_run(run_id)
        self.client._tracking_client.store._hard_delete_run(run_id)

    def experiment(self, name: str) -> str:
        return str(self.tagged(name).experiment_id)

    def tagged(self, name: str) -> Experiment:
        found = self.client.get_experiment_by_name(name)
        assert found is not None
        return found


@pytest.fixture
def nightly(sqlite_uri: str) -> Nightly:
    return Nightly(sqlite_uri)


# -- attempts --------------------------------------------------------------------------------------------------------


def test_a_deleted_attempt_no_longer_counts(nightly: Nightly, caplog: pytest.LogCaptureFixture) -> None:
    nightly.run(3)
    gone = nightly.attempt(2)
    nightly.remove(gone)
    assert nightly.counting() == [1, 3]
    assert f"run {gone} of nightly does not count: it was deleted" in caplog.text
    nightly.client.restore_run(gone)
    assert nightly.counting() == [1, 2, 3]


def test_one_that_a_snapshot_has_no_longer_counts_once_the_next_one_is_due(
    nightly: Nightly, caplog: pytest.LogCaptureFixture
) -> None:
    nightly.run(snapshot.EVERY + 1)
    assert snapshot.covers(nightly.ledger().layout.look().tags) == snapshot.EVERY
    gone = nightly.attempt(2)
    nightly.remove(gone)
    assert nightly.ledger().verify()[0] is False
    nightly.run(snapshot.EVERY)
    assert nightly.counting() == [n for n in range(1, 2 * snapshot.EVERY + 2) if n != 2]
    assert "nightly: attempts were deleted, so the history is folded anew" in caplog.text
    nightly.client.restore_run(gone)
    nightly.run(snapshot.EVERY)
    assert nightly.counting() == list(range(1, 3 * snapshot.EVERY + 2))


def test_a_recurrence_decides_at_once_while_a_history_without_the_deleted_is_folded(
    nightly: Nightly, tmp_path: Path
) -> None:
    nightly.run(2 * snapshot.EVERY - 1)
    nightly.remove(nightly.attempt(2))
    with brief.opened(nightly.uri, tmp_path) as ledger:
        ledger.begin()
        nightly.ledger().close(2 * snapshot.EVERY)
        assert ledger.history().state.observations == 2 * snapshot.EVERY - 1, "it serves until that is done"
        assert ledger._refolding.thread is not None
        ledger._refolding.thread.join(60)
        assert ledger.history().state.observations == 2 * snapshot.EVERY - 2
    assert 2 not in nightly.counting()


def test_a_repair_lets_it_no_longer_count_at_once(nightly: Nightly) -> None:
    nightly.run(snapshot.EVERY + 2)
    nightly.remove(nightly.attempt(2))
    nightly.remove_for_good(nightly.attempt(3))
    assert nightly.repair() == ([], [])
    assert nightly.counting() == [1, 4, 5, 6, 7, 8, 9, 10]


def test_an_attempt_that_is_deleted_while_it_trains_is_told_so_and_the_next_one_is_not_disturbed(
    nightly: Nightly, tmp_path: Path
) -> None:
    with brief.opened(nightly.uri, tmp_path) as ledger:
        number = ledger.begin()
        attempt = ledger.decided(decision(number), {})
        nightly.remove(attempt)
        with pytest.raises(UnknownAttempt, match=f"run {attempt} was deleted"):
            ledger.observed(attempt, observation(number))
        ledger.ended(number, ())
    assert brief.recur(nightly.uri, tmp_path).number == 2
    assert nightly.counting() == [2]


def test_an_observation_that_cannot_be_read_is_named_and_set_aside(
    nightly: Nightly, caplog: pytest.LogCaptureFixture
) -> None:
    nightly.run(2)
    ledger = nightly.ledger()
    attempt = ledger.decided(decision(ledger.begin()), {})
    ledger.store.set_once(attempt, names.OBSERVATION, '{"schema":2,"broken')
    ledger.close(3)
    nightly.run(snapshot.EVERY)
    assert nightly.counting() == [n for n in range(1, snapshot.EVERY + 4) if n != 3]
    assert f"run {attempt} of nightly does not count: a stored observation cannot be read" in caplog.text
    with pytest.raises(AlreadyObserved):
        ledger.observed(attempt, observation(3))


def test_one_that_a_newer_version_wrote_is_not_set_aside(nightly: Nightly) -> None:
    nightly.run()
    ledger = nightly.ledger()
    attempt = ledger.decided(decision(ledger.begin()), {})
    ledger.store.set_once(attempt, names.OBSERVATION, '{"schema":4}')
    with pytest.raises(StoreError, match=rf"run {attempt} of nightly: .* install the version that wrote it"):
        nightly.ledger().history()


# -- what holds the ledger together ----------------------------------------------------------------------------------


@pytest.fixture
def long(nightly: Nightly, monkeypatch: pytest.MonkeyPatch) -> Nightly:
    """A history on two pages and in two drift windows, with a skipped recurrence and a dead one."""
    monkeypatch.setattr(pages, "SIZE", 4)
    nightly.run(3)
    ledger = nightly.ledger()
    ledger.begin()
    ledger.gated(ledger.asked(4, {}), gate_check(4, skips=True))
    declare_one_dead(ledger)
    nightly.ledger().reset()
    nightly.run(3)
    return nightly


def declare_one_dead(ledger: MlflowLedger) -> None:
    number = ledger.begin()
    ledger.decided(decision(number), {})
    (attempt,) = ledger.open_attempts()
    ledger.declare_dead(attempt, "for a test")
    ledger.bury(number)


def holders(nightly: Nightly) -> dict[str, str]:
    """Return the runs that hold the ledger together, by what they are."""
    layout = nightly.ledger().layout
    root, second = layout.windows()
    return {"root": root, "window": second} | {f"page {k}": run_id for k, run_id in layout.page_ids().items()}


def use(nightly: Nightly) -> None:
    """Do what recurrences and reports do."""
    ledger = nightly.ledger()
    ledger.history()
    ledger.observations()
    ledger.begin()


MEND = "zeus-flows ledger repair"
WHAT = {
    "root": "drift window 1",
    "window": "drift window 2",
    "page 0": "page 0",
    "page 1": "page 1",
}


@pytest.mark.parametrize("part", WHAT)
def test_a_deleted_part_is_named_and_a_repair_brings_it_back(part: str, long: Nightly) -> None:
    before, run_id = long.ledger().history().state, holders(long)[part]
    long.remove(run_id)
    with pytest.raises(LedgerDamaged, match=rf"{WHAT[part]}.* was deleted \(run {run_id}\)[^`]*`{MEND}`"):
        use(long)
    done, lost = long.repair()
    assert (len(done), lost) == (1, [])
    assert f"had been deleted and is back (run {run_id})" in done[0]
    assert long.ledger().history().state == before
    assert long.ledger().begin() == 9


@pytest.mark.parametrize("part", WHAT)
def test_a_part_that_is_gone_for_good_is_named_and_a_repair_rebuilds_it(part: str, long: Nightly) -> None:
    ledger = long.ledger()
    before, read, run_id = ledger.history().state, ledger.layout.read_pages(0), holders(long)[part]
    gaps = ledger.gaps()
    long.remove_for_good(run_id)
    with pytest.raises(LedgerDamaged, match=rf"is gone for good \(run {run_id}\)[^`]*`{MEND}`"):
        use(long)
    done, _ = long.repair()
    assert len(done) == 1
    assert "gone for good and is rebuilt" in done[0]
    mended = long.ledger()
    assert mended.history().state == before
    assert mended.gaps() == gaps
    now = mended.layout.read_pages(0)
    assert (now.attempts, now.ended, now.gaps, now.gates) == (read.attempts, read.ended, read.gaps, read.gates)
    assert now.claims.keys() == read.claims.keys()
    assert mended.verify() == (True, before.observations)
    assert long.repair() == ([], []), "a second one finds nothing to do"
    long.run()
    assert long.counting() == [6, 7, 8, 9]
    assert len(long.ledger().layout.windows()) == 2


def test_all_of_it_gone_for_good_is_rebuilt_from_the_attempts(long: Nightly) -> None:
    for run_id in holders(long).values():
        long.remove_for_good(run_id)
    long.client.delete_experiment(long.experiment("nightly.ledger"))
    long.client._tracking_client.store._hard_delete_experiment(long.experiment("nightly.ledger"))
    with pytest.raises(LedgerDamaged, match=r"nightly.ledger.* is gone for good[^`]*`zeus-flows ledger repair`"):
        long.ledger().begin()
    done, lost = long.repair()
    assert done[0] == "drift window 1 was gone for good and is rebuilt (run " + long.ledger().layout.windows()[0] + ")"
    assert "the series of drift window 1, which only its run had" in lost
    assert [o.recurrence for o in long.ledger().observations()] == [1, 2, 3, 6, 7, 8], "what was reset is not known"
    assert long.ledger().begin() == 9
    assert long.ledger().verify() == (True, 6)


@pytest.mark.parametrize("calls", [3, 5, 7, 9, 11, 13])
def test_a_repair_that_was_killed_is_done_again(calls: int, long: Nightly, monkeypatch: pytest.MonkeyPatch) -> None:
    before = long.ledger().layout.read_pages(0)
    parts = holders(long)
    for part in ("root", "page 0"):
        long.remove_for_good(parts[part])
    made, answered = 0, Store._call

    def call(self: Store, function: Callable[[], object]) -> object:
        nonlocal made
        made += 1
        if made > calls:
            raise KeyboardInterrupt
        return answered(self, function)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_call", call)
        with pytest.raises(KeyboardInterrupt):
            long.repair()
    long.repair()
    now = long.ledger().layout.read_pages(0)
    assert (now.attempts, now.ended, now.gaps) == (before.attempts, before.ended, before.gaps)
    assert len(long.ledger().layout.windows()) == 2
    assert long.counting() == [6, 7, 8]


def test_a_history_that_was_copied_run_by_run_to_another_server_is_mended(
    long: Nightly, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shutil.copy(request.getfixturevalue("_migrated_database"), tmp_path / "elsewhere.db")
    there, weekly = Nightly(f"sqlite:///{tmp_path / 'elsewhere.db'}"), replace(JOB, name="weekly")
    there.run(1, weekly)  # its experiments have the ids that those of the copied one had
    for name in ("nightly", "nightly.ledger"):
        experiment = long.tagged(name)
        copy = there.client.create_experiment(name, tags=experiment.tags)
        for run in long.client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]):
            tags = {tag: value for tag, value in run.data.tags.items() if not tag.startswith("mlflow.")}
            made = there.client.create_run(copy, run.info.start_time, tags, run.info.run_name).info.run_id
            for param, value in run.data.params.items():
                there.client.log_param(made, param, value)
            for metric, number in run.data.metrics.items():
                there.client.log_metric(made, metric, number)
            there.client.set_terminated(made, run.info.status)
    with pytest.raises(LedgerDamaged):
        there.ledger().begin()
    there.repair()
    assert there.counting() == [6, 7, 8]
    assert [o.energy_j for o in there.ledger().observations()] == [o.energy_j for o in long.ledger().observations()]
    assert there.ledger().gaps() == long.ledger().gaps()
    assert len(there.ledger().layout.windows()) == 2
    there.run()
    assert there.counting() == [6, 7, 8, 9]
    assert there.repair() == ([], [])
    assert [o.recurrence for o in there.ledger(weekly).observations()] == [1]
    assert there.ledger(weekly).begin() == 2


def test_a_job_of_which_nothing_is_there_cannot_be_repaired(nightly: Nightly) -> None:
    with pytest.raises(LedgerDamaged, match="there is no experiment of the job nightly in sqlite"):
        nightly.repair()


def test_what_a_run_brought_while_a_page_was_deleted_is_delivered_after_the_repair(
    nightly: Nightly, tmp_path: Path
) -> None:
    nightly.run()
    page = nightly.ledger().layout.page(0)
    with brief.opened(nightly.uri, tmp_path) as ledger:
        number = ledger.begin()
        attempt = ledger.decided(decision(number), {})
        nightly.remove(page)
        ledger.observed(attempt, observation(number, energy_j=7777.0))
        ledger.ended(number, [observation(number, energy_j=7777.0)])
    with pytest.raises(LedgerDamaged, match="page 0 was deleted"), brief.opened(nightly.uri, tmp_path) as ledger:
        ledger.begin()
    nightly.repair()
    brief.recur(nightly.uri, tmp_path)
    assert [o.energy_j for o in nightly.ledger().observations()] == [5001.0, 7777.0, 5001.0]
    assert nightly.ledger().open_claims() == {}
    assert nightly.counting() == [1, 2, 3]


# -- experiments -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["as it is made now", "as an earlier version made it"])
def renamed(request: pytest.FixtureRequest, nightly: Nightly) -> Nightly:
    """A history of two recurrences; an earlier version's experiments name each other by name only."""
    nightly.run(2)
    if request.param == "as an earlier version made it":
        store = nightly.client._tracking_client.store
        for tag in (names.LEDGER, names.JOB):
            store.delete_experiment_tag(nightly.experiment("nightly"), tag)
    return nightly


def rename(nightly: Nightly, *experiments: str) -> None:
    for name in experiments:
        nightly.client.rename_experiment(nightly.experiment(name), f"{name}-of-last-year")


@pytest.mark.parametrize("name", ["nightly.ledger", "nightly"])
def test_a_renamed_experiment_is_found(renamed: Nightly, name: str, caplog: pytest.LogCaptureFixture) -> None:
    rename(renamed, name)
    renamed.run()
    assert renamed.counting() == [1, 2, 3]
    assert f"the experiment {name} is called {name}-of-last-year now, and goes on" in caplog.text
    assert {e.name for e in renamed.client.search_experiments()} == {
        "Default",
        *({"nightly", "nightly.ledger"} - {name}),
        f"{name}-of-last-year",
    }
    assert renamed.repair() == ([], [])


def test_so_are_both(nightly: Nightly) -> None:
    nightly.run(2)
    rename(nightly, "nightly", "nightly.ledger")
    nightly.run()
    assert nightly.counting() == [1, 2, 3]
    assert nightly.repair() == ([], [])


def test_another_experiment_of_the_ledgers_old_name_is_not_taken_for_it(nightly: Nightly) -> None:
    nightly.run(2)
    rename(nightly, "nightly.ledger")
    nightly.client.create_experiment("nightly.ledger", tags={names.ROOT: "0" * 32})
    nightly.run()
    assert nightly.counting() == [1, 2, 3]


@pytest.mark.parametrize("name", ["nightly.ledger", "nightly"])
def test_a_deleted_experiment_is_named_and_a_repair_brings_it_back(renamed: Nightly, name: str) -> None:
    renamed.client.delete_experiment(renamed.experiment(name))
    with pytest.raises(LedgerDamaged, match=rf"the experiment {name} was deleted\n.*`zeus-flows ledger repair`"):
        renamed.ledger().begin()
    assert renamed.repair()[0][0] == f"the experiment {name} had been deleted and is back"
    renamed.run()
    assert renamed.counting() == [1, 2, 3]


def test_an_earlier_version_s_experiment_is_linked_when_a_recurrence_begins(renamed: Nightly) -> None:
    renamed.ledger().observations()
    renamed.ledger().begin()
    job = renamed.tagged("nightly")
    assert job.tags[names.LEDGER] == renamed.experiment("nightly.ledger")
    assert job.tags[names.JOB] == "nightly"


def test_whoever_only_looks_links_nothing(renamed: Nightly) -> None:
    before = renamed.tagged("nightly").tags
    ledger = renamed.ledger()
    assert ledger.last_recurrence() == 2
    assert ledger.state().observations == 2
    assert renamed.tagged("nightly").tags == before


def test_another_job_in_the_same_store_is_not_touched(nightly: Nightly, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    nightly.run(2)
    other = replace(JOB, name="weekly")
    nightly.run(1, other)
    nightly.remove(nightly.attempt(1))
    assert [o.recurrence for o in nightly.ledger(other).observations()] == [1]
    assert nightly.repair() == ([], [])
    assert nightly.ledger(other).verify() == (True, 1)
