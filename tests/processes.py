"""Child processes that have everything imported already: importing takes seconds, forking does not."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NoReturn

#: What `zeus-flows` does, as a script.
ZEUS_FLOWS = "from zeus_flows.cli import main; main()"
#: What `prefect` does.
PREFECT = "import sys; from prefect.cli import app; sys.argv[0] = 'prefect'; app()"


def fork_server() -> ForkServerContext:
    """Return what starts them; a pytest process has one server for all, so all must ask for the same imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


class Forked:
    """A Python script in a process of its own, as `python -c script words` would be.

    Args:
        script: Its source. It may name the scripts' words as `sys.argv[1:]`.
        words: Of its command line.
        cwd: Where it runs; here, if not said.
        env: Its environment; this process's, if not said.
        leads: Whether it begins a session, so that what it starts can be killed with it.
    """

    def __init__(
        self,
        script: str,
        *words: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        leads: bool = False,
    ) -> None:
        self.words = words
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        reading, self._writing = os.pipe()
        streams = (reading, self._out.fileno(), self._err.fileno())
        place = str(cwd or Path.cwd())
        self._process = fork_server().Process(
            target=_be, args=(script, words, place, dict(env or os.environ), _Passed(*streams), leads)
        )
        self._process.start()
        os.close(reading)
        self._hang_up = weakref.finalize(self, os.close, self._writing)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, or that it goes on."""
        return self._process.exitcode

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        os.write(self._writing, f"{line}\n".encode())

    def wait(self, timeout: float = 300.0) -> int:
        """Return its exit code.

        Raises:
            TimeoutExpired: it goes on.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(list(self.words), timeout, self.stdout, self.stderr)
        self._hang_up()
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    @property
    def stdout(self) -> str:
        """What it has said so far."""
        return _content(self._out)

    @property
    def stderr(self) -> str:
        """What it has complained about so far."""
        return _content(self._err)

    def wait_until_it_says(self, line: str, timeout: float = 120.0) -> None:
        give_up = time.monotonic() + timeout
        while line not in self.stdout.splitlines():
            assert self.poll() is None, self.stderr
            assert time.monotonic() < give_up, self.stderr
            time.sleep(0.02)


def run_forked(
    script: str, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, as `subprocess.run` does."""
    process = Forked(script, *words, cwd=cwd, env=env)
    try:
        code = process.wait(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(words), code, process.stdout, process.stderr)


def _content(file: Any) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


class _Passed:
    """Open files on their way to a child."""

    def __init__(self, *numbers: int) -> None:
        self._numbers: tuple[Any, ...] = numbers

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(DupFd(number) for number in self._numbers)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._numbers = tuple(passed.detach() for passed in state)

    def become_standard(self) -> None:
        """Make them standard input, output and error."""
        for standard, number in enumerate(self._numbers):
            os.dup2(number, standard)
            os.close(number)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _be(script: str, words: tuple[str, ...], cwd: str, env: dict[str, str], streams: _Passed, leads: bool) -> NoReturn:
    """Do in a forked process what an interpreter does from its start to its end."""
    from prefect.context import refresh_global_settings_context

    streams.become_standard()
    if leads:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["zeus-flows", *words]
    sys.path[:0] = [""]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what runs in the background ignore it
    refresh_global_settings_context()
    nvml = Path(env.get("LD_LIBRARY_PATH", "")) / "libnvidia-ml.so.1"
    if nvml.is_file():
        ctypes.CDLL(str(nvml))  # where it is looked for was settled when the parent started; now it is there already
    code = 1
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})  # noqa: S102
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
