"""How a process ends although training does not let it: threads that go on, files that were closed, signals ignored."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

#: Seconds that a process may take to end once it is told to, or its work is done.
GRACE_S: Final = 10.0

_code = 1
_armed: set[str] = set()


def note_exit(code: int) -> None:
    """Remember what the process is about to exit with, should it not come to that by itself."""
    global _code
    _code = code


@contextmanager
def tidied() -> Iterator[None]:
    """Run somebody else's code, and see afterwards to what it left behind.

    A process that it forked and that comes back here ends at once: there is one of us. Standard streams that it closed
    are opened again. Where it left threads, the process ends at most `GRACE_S` after its work is done; where it closed
    all files, at most so long from now: connections to servers are gone, and what was measured waits in the outbox.
    """
    pid = os.getpid()
    before, files = set(threading.enumerate()), OpenFiles()
    streams = [(name, _copy(number)) for name, number in (("stdout", 1), ("stderr", 2))]
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(0)
        for name, copy in streams:
            _reopened(name, copy)
        if files.were_closed():
            _arm("zeus-flows: training closed this process's files; the next recurrence delivers what it brought")
        elif any(not thread.daemon for thread in set(threading.enumerate()) - before):
            _arm("zeus-flows: ended, though training left threads that go on", once_done=True)
        files.close()


class OpenFiles:
    """Tells whether somebody has closed this process's files, all of them, as daemons do."""

    def __init__(self) -> None:
        self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._is = _identity(self._descriptor)

    def were_closed(self) -> bool:
        """Return whether they were."""
        return _identity(self._descriptor) != self._is

    def close(self) -> None:
        """Look no longer."""
        if not self.were_closed():
            os.close(self._descriptor)


def end_when_told() -> None:
    """Let SIGTERM end this process within `GRACE_S`, even if training catches everything or is deep in C.

    What handles the signal does so as ever; this is for the case that nothing comes of it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(reading, True)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        with suppress(OSError):
            while number := os.read(reading, 1):
                if number[0] == signal.SIGTERM:
                    _end_later("zeus-flows: SIGTERM: training did not stop; the next recurrence closes it", 143)

    threading.Thread(target=watch, name="zeus-flows-signals", daemon=True).start()


def _arm(why: str, *, once_done: bool = False) -> None:
    """End the process after `GRACE_S`, from now or once its main thread is through."""
    if why in _armed:
        return
    _armed.add(why)

    def wait() -> None:
        if once_done:
            threading.main_thread().join()
        _end_later(why, None)

    threading.Thread(target=wait, name="zeus-flows-end", daemon=True).start()


def _end_later(why: str, code: int | None) -> NoReturn:
    time.sleep(GRACE_S)
    flushing = threading.Thread(target=logging.shutdown, daemon=True)
    flushing.start()
    flushing.join(GRACE_S / 2)
    with suppress(OSError):
        os.write(2, f"{why}\n".encode())
    os._exit(_code if code is None else code)


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _copy(number: int) -> int | None:
    with suppress(OSError):
        return os.dup(number)
    return None


def _reopened(name: str, copy: int | None) -> None:
    stream = getattr(sys, name)
    if copy is None or _identity(copy) is None:
        return
    if stream is not None and stream.closed:
        setattr(sys, name, os.fdopen(copy, "w", buffering=1, errors="backslashreplace"))
        return
    os.close(copy)
