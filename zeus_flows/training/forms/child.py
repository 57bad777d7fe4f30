"""A training command as a process: started, read while it runs, and ended with all that it has started."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Final

from zeus_flows.ledger.lease import is_gone, read_holder, this_process
from zeus_flows.masking import masked
from zeus_flows.training.forms.launcher import PASS, STEP

log = logging.getLogger(__name__)
#: The output's own log: the flow shows it in Prefect.
output_log = logging.getLogger("zeus_flows.output")

#: What is kept of the output: this many bytes from its beginning, and its last lines.
MOST_KEPT: Final = 10_000_000
LAST_LINES: Final = 200
#: Lines shown in the log; a progress bar writes thousands.
MOST_SHOWN: Final = 1_000
#: A line is cut here: a pattern does not need more.
LONGEST_LINE: Final = 10_000
#: Names the processes of an attempt, wherever they have gone.
MARK: Final = "ZEUS_FLOWS_ATTEMPT"
_MARKED: Final = f"{MARK}=".encode()
_TICK_S: Final = 0.2
#: How long processes that were killed are waited for, and how often they are looked for.
_DYING_S: Final = 5.0
_POLL_S: Final = 0.01


class Told(Enum):
    """What a launcher tells beside lines."""

    STEP = STEP  # a step has ended
    PASS = PASS  # the training's loader begins anew


_TOLD: Final = re.compile(b"([" + STEP + PASS + b"])")


class Child:
    """One run of a command in a process group of its own.

    Args:
        argv: The command; no shell sees it.
        folder: Where it runs.
        environment: All of its environment.
        mark: Names the attempt, unlike any other; its processes are found by it.
        output: The file that keeps its output.
        grace_s: How long it may take to end after SIGTERM.

    Attributes:
        last_lines: The end of its output.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        mark: str,
        output: Path,
        grace_s: float,
    ) -> None:
        end_orphans()
        self._mark, self._grace_s = mark, grace_s
        self._kept = output.open("wb")
        self._left_out = self._shown = 0
        self._line = bytearray()
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._read, write = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603
                argv,
                cwd=folder,
                env={**environment, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._read)
            self._kept.close()
            raise
        finally:
            os.close(write)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def read(self) -> Iterator[Told | str | None]:
        """Yield what is told and lines as they come, and None now and then while nothing does; ends with the process.

        A process that it left behind may hold its output open: the end of the process counts, not that of the output.
        """
        while True:
            ended = self._process.poll() is not None
            ready, _, _ = select.select([self._read], [], [], 0 if ended else _TICK_S)
            if not ready:
                if ended:
                    break
                yield None
                continue
            data = os.read(self._read, 65_536)
            if not data:  # it closed its output, and may train on
                while self._process.poll() is None:
                    time.sleep(_TICK_S)
                    yield None
                break
            yield from self._parts(data)
        if self._line:
            yield self._end_line()

    @property
    def exit_code(self) -> int | None:
        """What the process ended with; minus the signal's number where one ended it; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End the process and all that it has started: SIGTERM, some time, SIGKILL. Safe to call twice."""
        if self._kept.closed:
            return
        try:
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                until_s = time.monotonic() + self._grace_s
                for _ in self.read():  # a process that cannot write does not end
                    if time.monotonic() > until_s:
                        break
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            until_s = time.monotonic() + _DYING_S
            while (left := left_behind(self._mark)) and time.monotonic() < until_s:
                for pid in left:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(_POLL_S)
            os.close(self._read)
            if self._left_out:
                self._kept.write(f"\n… {self._left_out} bytes left out; the last lines:\n".encode())
                self._kept.write("\n".join(self.last_lines).encode())
            self._kept.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _parts(self, data: bytes) -> Iterator[Told | str]:
        for index, piece in enumerate(_TOLD.split(data)):
            if index % 2:
                yield Told(piece)
                continue
            for number, part in enumerate(piece.replace(b"\r", b"\n").split(b"\n")):
                if number:
                    yield self._end_line()
                if len(self._line) < LONGEST_LINE:
                    self._line += part[: LONGEST_LINE - len(self._line)]

    def _end_line(self) -> str:
        line = self._line.decode(errors="replace")
        self._line.clear()
        shown = masked(line)
        self.last_lines.append(shown)
        encoded = f"{shown}\n".encode()
        if self._kept.tell() + len(encoded) <= MOST_KEPT:
            self._kept.write(encoded)
        else:
            self._left_out += len(encoded)
        self._shown += 1
        if self._shown <= MOST_SHOWN:
            output_log.info("%s", shown)
        elif self._shown == MOST_SHOWN + 1:
            output_log.info("… more lines are in the artifact %s only", Path(self._kept.name).name)
        return line


def new_mark() -> str:
    """Return what names an attempt of this process, unlike any other, and tells later whether this process is there."""
    return this_process().dump()


def left_behind(mark: str) -> list[int]:
    """Return the processes of an attempt that are still there, whatever group they are in; none but on Linux."""
    return [pid for pid, found in _marked() if found == mark]


def end_orphans() -> None:
    """End what trains for a process that was killed: it got SIGTERM then, and nobody was left to follow that up."""
    for pid, mark in _marked():
        holder = read_holder(mark)
        if holder is not None and is_gone(holder) and pid != os.getpid():
            log.warning("process %d trains for a process that is gone: it is ended", pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _marked() -> Iterator[tuple[int, str]]:
    """Yield the processes of attempts, with their marks."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for word in (folder / "environ").read_bytes().split(b"\0"):
                if word.startswith(_MARKED):
                    yield int(folder.name), word.removeprefix(_MARKED).decode(errors="replace")
