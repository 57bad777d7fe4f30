"""One Prefect server for a whole test session: whoever needs it first starts it, the session's end ends it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.ledger.servers import free_port

#: Runs a command until it or a process ends: a session that is killed leaves no server behind.
GUARD = """
import os, signal, subprocess, sys, time
command = subprocess.Popen(sys.argv[2:])
while command.poll() is None:
    time.sleep(1)
    try:
        os.kill(int(sys.argv[1]), 0)
    except ProcessLookupError:
        os.killpg(0, signal.SIGKILL)
"""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time through."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def standing_server(folder: Path, *, session: int) -> str:
    """Return the address of the server that a session (a process) keeps in a folder, after starting it if need be."""
    address = folder / "address"
    with locked(folder / "address.lock"):
        if not address.exists():
            address.write_text(_start(folder, session))
    return address.read_text()


def end_server(folder: Path) -> None:
    """End the session's server, where there is one."""
    with suppress(FileNotFoundError, ProcessLookupError):
        os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)


def _start(folder: Path, session: int) -> str:
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    env = os.environ | {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": api,
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # The default is a minute between the scheduler's looks at new deployments.
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
        # The default is half a minute until a run that found no slot asks again.
        "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "3",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-S", "-c", GUARD, str(session), *command]
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    (folder / "pid").write_text(str(server.pid))
    give_up = time.monotonic() + 180
    while not _answers(api):
        if server.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"the Prefect server did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)
    return api


def _answers(api: str) -> bool:
    try:
        return httpx.get(f"{api}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
