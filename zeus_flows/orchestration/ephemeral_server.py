"""Prefect's ephemeral server, which ends with the process that it was started for, however that ends.

Where no PREFECT_API_URL is set, Prefect starts a server as a child process and ends it at exit. A process that is
killed has no exit. So the server runs behind this module, which looks once a second whether its parent is still
there; a kernel's parent-death signal would not do, as it comes with the end of the thread that started the child.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

#: How often the server looks for its parent, and how long it may take to end by itself.
LOOK_S: Final = 1.0
GRACE_S: Final = 5.0

_UVICORN: Final = ["-m", "uvicorn"]


def end_server_with_us() -> None:
    """Let the ephemeral server of this process end with it; nothing where flow runs report to a standing one.

    Call it before the first flow runs, or Prefect's API is asked.
    """
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value() is not None:
        return
    server: Any = import_module("prefect.server.api.server")
    server.subprocess = _Subprocess()


def start_server() -> Callable[[], None]:
    """Begin to start the ephemeral server; return what waits until it answers.

    It takes seconds on another core, in which the caller can import what it needs. Prefect starts none beside it. Where
    flow runs report to a standing server, or Prefect may start none, nothing is started.
    """
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE

    end_server_with_us()
    if PREFECT_API_URL.value() is not None or not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        return lambda: None
    server: Any = import_module("prefect.server.api.server").SubprocessASGIServer()

    def start() -> None:
        with suppress(Exception):  # whoever asks it first tries again, and says why it does not start
            server.start()

    thread = threading.Thread(target=start, name="zeus-flows-prefect-start", daemon=True)
    thread.start()
    return thread.join


class _Subprocess:
    """The module `subprocess` for Prefect, but that a server is started behind this module."""

    def __getattr__(self, name: str) -> object:
        return getattr(subprocess, name)

    @staticmethod
    def Popen(args: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: N802
        """Start a process."""
        return subprocess.Popen(_behind_us(args), **options)  # noqa: S603


def _behind_us(args: Sequence[str]) -> list[str]:
    """Return a command; where it is uvicorn's, behind this module.

    >>> _behind_us(["python", "-m", "uvicorn", "--port", "8000"])[3:] == [str(os.getpid()), "--port", "8000"]
    True
    >>> _behind_us(["ls", "-l", "/"])
    ['ls', '-l', '/']
    """
    if list(args[1:3]) != _UVICORN:
        return list(args)
    return [args[0], "-m", __name__, str(os.getpid()), *args[3:]]


def main() -> None:
    """Be uvicorn until the parent ends: `python -m ... <parent's process id> <uvicorn's words>`."""
    threading.Thread(target=_watch, args=(int(sys.argv[1]),), name="zeus-flows-parent-watch", daemon=True).start()
    sys.argv[:] = ["uvicorn", *sys.argv[2:]]
    runpy.run_module("uvicorn", run_name="__main__", alter_sys=True)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
