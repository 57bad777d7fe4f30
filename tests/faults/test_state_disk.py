"""The state directory fills up, becomes read-only or goes away in mid-run: what training brought goes to MLflow."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.builders import JOB, decision, observation
from tests.ledger import brief
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import StoreUnavailable
from zeus_flows.ledger import delivery
from zeus_flows.ledger.durable import DurableLedger
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct, open_durable
from zeus_flows.recurrence.loop import run_recurrence

pytestmark = pytest.mark.slow

Break = Callable[[DurableLedger, Path], None]


def _from_now_on(ledger: DurableLedger, pragma: str) -> None:
    """Make every connection to an outbox say something first."""
    outbox = ledger._outbox
    connect = outbox._connect

    def connected() -> sqlite3.Connection:
        connection = connect()
        connection.execute(pragma)
        return connection

    outbox._connect = connected  # type: ignore[method-assign]
    outbox._disconnect()


def full(ledger: DurableLedger, state: Path) -> None:
    """Fill the file system with a file, which takes root for a small one, or else the database up to a bound."""
    if state.is_mount():
        with (state / "somebody else's").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            _for_ever(lambda: file.write(b"x" * 512))
        return
    _from_now_on(ledger, "pragma max_page_count = 30")
    for row in (
        "runs values (hex(randomblob(16)), hex(randomblob(500)))",
        "items values (null, 'x', '', '', '', '', 0)",
    ):

        def insert(row: str = row) -> None:
            with ledger._outbox._transaction() as connection:
                connection.execute(f"insert into {row}")

        with pytest.raises(sqlite3.OperationalError, match="full"):
            _for_ever(insert)


def _for_ever(write: Callable[[], object]) -> None:
    while True:
        write()


def read_only(ledger: DurableLedger, _state: Path) -> None:
    """Refuse every write, as a disk does that was mounted again after an error."""
    _from_now_on(ledger, "pragma query_only = 1")


def gone(_ledger: DurableLedger, state: Path) -> None:
    """Delete the state directory."""
    shutil.rmtree(state)


def gone_and_nothing_is_open(ledger: DurableLedger, state: Path) -> None:
    """Delete the state directory after what was open there was closed, as a storm of connections would."""
    with ledger._outbox._disk:  # so that the delivering thread opens nothing meanwhile
        ledger._outbox._disconnect()
        shutil.rmtree(state)


@pytest.fixture(params=["a bounded database", "a small file system"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A state directory; also on a file system of its own where this process may mount one."""
    folder = tmp_path / "state"
    folder.mkdir()
    if request.param == "a bounded database":
        yield folder
        return
    mount = shutil.which("mount")
    made = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=512k", "zf", folder], capture_output=True)
    if not made or made.returncode:
        pytest.skip("mounting a file system takes root; a bounded database stands in for it")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def opened(uri: str, state: Path) -> DurableLedger:
    return open_durable(JOB, tracking_uri=uri, energy_source=EnergySource.SIMULATED, state_dir=state)


def direct(uri: str) -> MlflowLedger:
    return open_direct(JOB, tracking_uri=uri, energy_source=EnergySource.SIMULATED)


def train_while(break_it: Break, uri: str, state: Path, tmp_path: Path) -> None:
    """Run a recurrence of three epochs; after the first the disk breaks."""
    with closing(opened(uri, state)) as ledger:
        ledger.sweep()

        def between(epoch: int) -> None:
            if epoch == 2:
                break_it(ledger, state)

        trainer = brief.BriefTrainer(energy_j=7776.0, between=between)
        done = run_recurrence(JOB, brief.RecordingSteps(JOB, ledger, trainer, tmp_path / "acknowledged"))
        assert done.converged


def check_nothing_is_lost(uri: str) -> None:
    ledger = direct(uri)
    assert [o.energy_j for o in ledger.observations()] == [7777.0]
    assert ledger.open_claims() == {}
    assert ledger.verify() == (True, 1)
    (run,) = MlflowClient(tracking_uri=uri).search_runs([ledger.experiment_id], "tags.`zf.kind` = 'attempt'")
    assert run.info.status == "FINISHED"
    epochs = MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, "zf.epoch/energy_j")
    assert [m.step for m in epochs] == [1, 2, 3]


def test_what_training_brought_is_in_mlflow_though_the_disk_is_full(
    sqlite_uri: str, state: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_while(full, sqlite_uri, state, tmp_path)
    assert "database or disk is full" in caplog.text
    assert caplog.text.count("kept in memory") == 1
    check_nothing_is_lost(sqlite_uri)


@pytest.mark.parametrize("break_it", [read_only, gone, gone_and_nothing_is_open], ids=lambda f: f.__name__)
def test_what_training_brought_is_in_mlflow_though_the_disk_is(
    break_it: Break, sqlite_uri: str, tmp_path: Path
) -> None:
    train_while(break_it, sqlite_uri, tmp_path / "state", tmp_path)
    check_nothing_is_lost(sqlite_uri)
    shutil.rmtree(tmp_path / "state", ignore_errors=True)
    assert brief.recur(sqlite_uri, tmp_path).number == 2
    assert direct(sqlite_uri).verify() == (True, 2)


@pytest.mark.parametrize("break_it", [full, read_only, gone, gone_and_nothing_is_open], ids=lambda f: f.__name__)
def test_a_decision_that_waited_on_a_disk_that_broke_gets_its_number_all_the_same(
    break_it: Break, sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief.recur(sqlite_uri, tmp_path, energy_j=4999.0)
    brief.impatient(monkeypatch)
    away, answered = True, Store._call

    def call(self: Store, function: Callable[[], object]) -> object:
        if away:
            raise StoreUnavailable("MLflow: away for a test")
        return answered(self, function)

    monkeypatch.setattr(Store, "_call", call)
    with closing(opened(sqlite_uri, tmp_path / "state")) as ledger:
        number = ledger.begin()
        attempt = ledger.decided(decision(number), {})
        ledger.epoch(attempt, EpochReport(1, energy_j=1.0, time_s=1.0))
        break_it(ledger, tmp_path / "state")
        away = False
        ledger.epoch(attempt, EpochReport(2, energy_j=2.0, time_s=2.0))
        ledger.observed(attempt, observation(number, energy_j=7777.0))
        ledger.ended(number, [observation(number, energy_j=7777.0)])
    read = direct(sqlite_uri)
    assert [o.energy_j for o in read.observations()] == [5000.0, 7777.0]
    assert read.open_claims() == {}
    assert read.verify() == (True, 2)


def test_what_neither_mlflow_nor_the_disk_takes_is_said_to_be_lost(
    sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brief.impatient(monkeypatch)
    monkeypatch.setattr(delivery, "UNKEPT_S", 0.2)
    ledger = opened(sqlite_uri, tmp_path / "state")
    attempt = ledger.decided(decision(ledger.begin()), {})

    def call(*_: object) -> object:
        raise StoreUnavailable("MLflow: away for a test")

    monkeypatch.setattr(Store, "_call", call)
    read_only(ledger, tmp_path)
    ledger.observed(attempt, observation(1))
    assert "in memory only" in caplog.text
    ledger.close()
    assert [r.message for r in caplog.records if r.levelno == logging.ERROR] == [
        "1 records are lost: neither MLflow nor the state directory took them"
    ]


def test_what_was_delivered_and_could_not_be_removed_is_delivered_once_more_and_changes_nothing(
    sqlite_uri: str, tmp_path: Path
) -> None:
    train_while(read_only, sqlite_uri, tmp_path / "state", tmp_path)
    brief.recur(sqlite_uri, tmp_path)
    assert [o.energy_j for o in direct(sqlite_uri).observations()] == [7777.0, 5001.0]
    assert direct(sqlite_uri).verify() == (True, 2)
