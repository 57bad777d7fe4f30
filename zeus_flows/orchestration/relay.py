"""What a run prints reaches its worker as long as there is one; a worker that dies does not take its run along.

A process worker reads what its runs print through a pipe. Once it is gone, whoever prints gets a broken pipe: Prefect's
log lines end the process, and a `print` of the training breaks it. So a run prints into a pipe of its own, from which a
thread passes it on for as long as somebody listens.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_AT_ONCE: Final = 65_536
_STREAMS: Final = (1, 2)  # standard output and error, of this process and of those that it starts


@contextmanager
def outliving_the_worker() -> Iterator[None]:
    """Print through relays until the block ends, and for good where nobody listens by then."""
    relays = [_Relay(stream) for stream in _STREAMS if _is_pipe(stream)]
    try:
        yield
    finally:
        for relay in relays:
            relay.end()


class _Relay:
    """Stands in for a pipe, and passes on what is written to it."""

    def __init__(self, stream: int) -> None:
        self._stream, self._original = stream, os.dup(stream)
        self._reading, writing = os.pipe()
        os.dup2(writing, stream, inheritable=True)
        os.close(writing)
        self._thread = threading.Thread(target=self._pass_on, name=f"zeus-flows-relay-{stream}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the stream be what it was, where somebody listens there."""
        for file in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                file.flush()
        if _has_reader(self._original):
            os.dup2(self._original, self._stream, inheritable=True)
            self._thread.join(timeout=2.0)  # where a process that was started has the pipe too, it goes on

    def _pass_on(self) -> None:
        heard = True
        with suppress(OSError):
            while text := os.read(self._reading, _AT_ONCE):
                while text and heard:
                    try:
                        text = text[os.write(self._original, text) :]
                    except OSError:
                        heard = False


def _is_pipe(stream: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream).st_mode)
    except OSError:
        return False


def _has_reader(pipe: int) -> bool:
    watched = select.poll()
    watched.register(pipe, select.POLLOUT)
    return not any(event & (select.POLLERR | select.POLLNVAL) for _, event in watched.poll(0))
