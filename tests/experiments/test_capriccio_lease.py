"""The lease of an experiment: one process at a time, on whichever machine, and the next when that one is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.experiments.capriccio_builders import start_together, write_experiment
from zeus_flows.errors import ConfigError, DeclaredDead, StoreUnavailable
from zeus_flows.experiments.capriccio import experiment_lease as capriccio_lease
from zeus_flows.experiments.capriccio.experiment_lease import Lease, leased
from zeus_flows.ledger.lease import DEAD_AFTER_S, Holder, read_holder, this_process
from zeus_flows.ledger.mlflow.client import Store


class Clock:
    """A clock that goes on when somebody sleeps, and calls back at each sleep."""

    def __init__(self, while_asleep: Callable[[], None] = lambda: None) -> None:
        self.now_s, self._while_asleep = 0.0, while_asleep

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self._while_asleep()


@pytest.fixture
def run_id(sqlite_uri: str) -> str:
    """The run of an experiment."""
    return str(MlflowClient(tracking_uri=sqlite_uri).create_run("0").info.run_id)


def on(machine: str) -> Holder:
    """Return a process of another machine."""
    return replace(this_process(), host=machine, machine=machine, boot=machine)


def lease_of(uri: str, run_id: str, holder: Holder | None = None, clock: Clock | None = None) -> Lease:
    clock = clock or Clock()
    return Lease(Store(uri), run_id, "small", holder=holder, clock=clock, sleep=clock.sleep)


def ended_process() -> Holder:
    """Return a process of this machine that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return replace(this_process(), pid=child.pid, started=1)


def test_what_was_let_go_is_taken_at_once(sqlite_uri: str, run_id: str) -> None:
    clock = Clock()
    first = lease_of(sqlite_uri, run_id, on("one"))
    first.take()
    first.release()

    second = lease_of(sqlite_uri, run_id, on("two"), clock)
    second.take()

    assert (first.number, second.number) == (1, 2)
    assert clock.now_s == 0


def test_while_another_machine_beats_the_experiment_is_refused(sqlite_uri: str, run_id: str) -> None:
    first = lease_of(sqlite_uri, run_id, on("one"))
    first.take()
    clock = Clock(while_asleep=lambda: first.beat(Store(sqlite_uri)))
    told: list[str] = []
    second = lease_of(sqlite_uri, run_id, on("two"), clock)

    refusal = rf"small is being run by process {os.getpid()} on one; wait for it, or give this one another name"
    with pytest.raises(ConfigError, match=refusal):
        second.take(told.append)

    assert second.number == 0
    assert clock.now_s < 60
    assert told == [f"looking for five minutes whether process {os.getpid()} on one is still at it"]
    first.check()


def test_a_machine_that_falls_silent_is_succeeded_after_five_minutes_and_finds_out(
    sqlite_uri: str, run_id: str
) -> None:
    clock = Clock()
    first, second = lease_of(sqlite_uri, run_id, on("one")), lease_of(sqlite_uri, run_id, on("two"), clock)
    first.take()
    first.beat(Store(sqlite_uri))

    second.take()

    assert DEAD_AFTER_S <= clock.now_s < DEAD_AFTER_S + 10
    second.check()
    with pytest.raises(DeclaredDead, match=rf"taken over by process {os.getpid()} on two"):
        first.check()


def test_a_machine_that_lets_go_meanwhile_is_succeeded_then(sqlite_uri: str, run_id: str) -> None:
    first = lease_of(sqlite_uri, run_id, on("one"))
    first.take()
    clock = Clock(while_asleep=first.release)
    second = lease_of(sqlite_uri, run_id, on("two"), clock)

    second.take()

    assert second.number == 2
    assert clock.now_s < 60


def test_a_killed_process_of_this_machine_is_succeeded_at_once(sqlite_uri: str, run_id: str) -> None:
    clock = Clock()
    lease_of(sqlite_uri, run_id, ended_process()).take()

    lease_of(sqlite_uri, run_id, clock=clock).take()

    assert clock.now_s == 0


def test_a_process_of_this_machine_that_is_there_keeps_it(sqlite_uri: str, run_id: str) -> None:
    clock = Clock()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ticks = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        lease_of(sqlite_uri, run_id, replace(this_process(), pid=child.pid, started=int(ticks))).take()

        with pytest.raises(ConfigError, match=f"is being run by process {child.pid} on"):
            lease_of(sqlite_uri, run_id, clock=clock).take()
        child.kill()

    assert clock.now_s == 0


def test_what_this_process_could_not_let_go_of_does_not_stand_in_its_way(
    sqlite_uri: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_lease: Lease) -> None:
        raise StoreUnavailable("MLflow is away")

    with monkeypatch.context() as patched:
        patched.setattr(Lease, "release", away)
        with leased(sqlite_uri, run_id, "small"):
            pass

    with leased(sqlite_uri, run_id, "small") as lease:
        assert lease.number == 2


def test_of_many_that_want_it_at_once_one_gets_it(
    sqlite_uri: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 4
    together, set_once = threading.Barrier(many), Store.set_once

    def at_once(self: Store, *written: str) -> str:
        together.wait(timeout=60)
        return set_once(self, *written)

    monkeypatch.setattr(Store, "set_once", at_once)
    beating = threading.Lock()

    def attempt(number: int) -> bool:
        def while_asleep() -> None:
            with beating:  # whoever has it
                MlflowClient(tracking_uri=sqlite_uri).set_tag(run_id, "zf.lease", holder_of(sqlite_uri, run_id).dump())

        try:
            lease_of(sqlite_uri, run_id, on(f"machine-{number}"), Clock(while_asleep)).take()
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(many) as pool:
        got = list(pool.map(attempt, range(many)))

    assert sorted(got) == [False, False, False, True]
    params = MlflowClient(tracking_uri=sqlite_uri).get_run(run_id).data.params
    assert [name for name in params if name.startswith("zf.holder.")] == ["zf.holder.1"]


def holder_of(uri: str, run_id: str) -> Holder:
    """Return the first holder, a beat later than it last said."""
    data = MlflowClient(tracking_uri=uri).get_run(run_id).data
    holder, said = read_holder(data.params["zf.holder.1"]), read_holder(data.tags.get("zf.lease", ""))
    assert holder is not None
    return replace(holder, beat=(said.beat if said else 0) + 1)


def test_a_holder_says_again_and_again_that_it_is_there(
    sqlite_uri: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_saying_so = capriccio_lease._keep_saying_so
    monkeypatch.setattr(
        capriccio_lease, "_keep_saying_so", lambda lease, store, over: keep_saying_so(lease, store, over, 0.01)
    )
    client = MlflowClient(tracking_uri=sqlite_uri)
    give_up = time.monotonic() + 60

    with leased(sqlite_uri, run_id, "small"):
        beat = 0
        while beat < 3 and time.monotonic() < give_up:
            said = read_holder(client.get_run(run_id).data.tags["zf.lease"])
            beat = said.beat if said else 0

    assert beat >= 3
    assert client.get_run(run_id).data.params["zf.released.1"] == "released"


MACHINE = """
import sys
from pathlib import Path
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.experiment_lease import leased
from zeus_flows.experiments.capriccio.contenders import open_experiment
from zeus_flows.settings import read_settings
path, uri = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
experiment = open_experiment(path, data=None, tracking_uri=uri, settings=read_settings())
try:
    with leased(uri, experiment.tracking.run_id, "small") as lease:
        for part in experiment.slices:
            lease.check()
            experiment.run_slice(part)
        sys.stdin.readline()
    print("done")
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_two_that_do_not_share_a_lock_do_not_take_slices_from_each_other(tmp_path: Path, sqlite_uri: str) -> None:
    path = write_experiment(tmp_path, slices={"days": 5, "most": 3})
    folders = [{"STATE": tmp_path / f"state-{n}", "CACHE": tmp_path / f"cache-{n}"} for n in range(2)]
    both = start_together(MACHINE, str(path), sqlite_uri, folders=folders)
    give_up = time.monotonic() + 120  # the one that is refused ends, the other one waits
    while all(process.poll() is None for process in both) and time.monotonic() < give_up:
        time.sleep(0.05)
    for process in both:
        if process.poll() is None:
            process.say("end")

    assert [process.wait(timeout=120) for process in both] == [0, 0]
    said = [process.stdout for process in both]
    assert sum(text == "ready\ndone\n" for text in said) == 1
    assert sum("small is being run by process" in text for text in said) == 1
    client = MlflowClient(tracking_uri=sqlite_uri)
    for job in ("small.window-4", "small.drift-reset"):
        experiment = client.get_experiment_by_name(job)
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'")
        assert {int(run.data.tags["zf.recurrence"]) for run in runs} == {1, 2, 3}
        assert {run.info.status for run in runs} == {"FINISHED"}
