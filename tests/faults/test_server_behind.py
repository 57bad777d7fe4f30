"""A killed `zeus-flows run` or `capriccio` leaves no Prefect server behind: real signals, a real ephemeral server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.experiments.capriccio_builders import write_experiment
from tests.processes import ZEUS_FLOWS, Forked
from tests.training_functions import write_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc"),
]

#: What Prefect tells an ephemeral server, and nobody else.
SERVER = b"PREFECT__SERVER_EPHEMERAL=1"


def servers(home: Path) -> set[int]:
    """Return the ephemeral servers of a Prefect home."""
    mine, found = f"PREFECT_HOME={home}".encode(), set[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            if mine in words and SERVER in words:
                found.add(int(folder.name))
    return found


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Return a Prefect home whose servers are gone after the test, whatever comes of it."""
    home = tmp_path / "prefect"
    yield home
    for pid in servers(home):
        os.kill(pid, signal.SIGKILL)


def wait_for(wanted: bool, home: Path, process: Forked) -> set[int]:
    give_up = time.monotonic() + 120.0
    while bool(found := servers(home)) is not wanted:
        assert time.monotonic() < give_up, process.stderr
        assert not wanted or process.poll() is None, process.stderr
        time.sleep(0.1)
    return found


def start(home: Path, *words: str) -> Forked:
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    env |= {"PREFECT_HOME": str(home), "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true"}
    return Forked(ZEUS_FLOWS, *words, cwd=home.parent, env=env, leads=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_killed_leaves_no_server(
    tmp_path: Path, home: Path, sqlite_uri: str, number: signal.Signals
) -> None:
    write_job(tmp_path / "job.yaml")
    process = start(home, "run", "job.yaml", "--tracking-uri", sqlite_uri)
    try:
        assert len(wait_for(True, home, process)) == 1
        process.send_signal(number)
        process.wait(120.0)
        assert wait_for(False, home, process) == set()
    finally:
        process.kill()


def test_an_experiment_that_is_killed_leaves_no_server(tmp_path: Path, home: Path, sqlite_uri: str) -> None:
    path = write_experiment(tmp_path)
    process = start(home, "capriccio", str(path), "--tracking-uri", sqlite_uri)
    try:
        wait_for(True, home, process)
        process.kill()
        process.wait(120.0)
        assert wait_for(False, home, process) == set()
    finally:
        process.kill()
