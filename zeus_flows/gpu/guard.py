"""The power guard: whatever is changed on a GPU is put back.

The previous power limit (not the greatest) returns when the guard is released, when the process exits or raises,
and on SIGTERM, SIGINT and SIGHUP. After SIGKILL, the deletion of a pod or a reboot the journal remembers: the next job
on the machine, or `zeus-flows restore-power`, puts it back. A limit that somebody else has set meanwhile stays.

Clocks that were locked are reset in the same ways. NVML cannot tell whether they were locked before: where that is
known, that lock is put back.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any

from zeus_flows.errors import ConfigError, DeviceError, NotSupported, PowerPermissionError
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.journal import Entry, GpuLock, Journal
from zeus_flows.gpu.putting_back import undo, undo_dead, unlock

log = logging.getLogger(__name__)

#: Ends a process by default, leaves time to put things back, and can be caught.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Obstacle(Enum):
    """What keeps a job from setting power limits and clocks."""

    SHARED = auto()  # others use the GPU at the same time
    ANOTHER_JOB = auto()  # another job controls it
    PERMISSION = auto()  # this process may not
    JOURNAL = auto()  # what is there before cannot be written down
    DEVICE = auto()  # the GPU has no limits, or refuses them


@dataclass(frozen=True, slots=True)
class WhyNot:
    """Why power limits and clocks cannot be set.

    Attributes:
        obstacle: What is in the way.
        text: That, and what to do about it, for people.
    """

    obstacle: Obstacle
    text: str


NO_PERMISSION = WhyNot(
    Obstacle.PERMISSION,
    "this process may not set power limits or clocks: run it as root, give its container `--cap-add=SYS_ADMIN`, "
    "or start the Zeus daemon (zeusd) on the machine",
)


class PowerGuard:
    """Changes power limits and clocks of a job's GPUs, and puts them back.

    Several threads may use it. Signals are handled where the first change is made on the main thread; elsewhere
    Python cannot, and SIGTERM leaves the work to the journal.

    Args:
        devices: The GPUs, all or none of which are changed.
        folder: Where the journal is; None for devices whose limits die with the process.
        locked_before_mhz: The clock that somebody has locked them to, to be put back; None: nobody has.
    """

    def __init__(self, devices: Sequence[Device], folder: Path | None, *, locked_before_mhz: int | None = None) -> None:
        self._devices = tuple(devices)
        self._journal = Journal(folder) if folder else None
        self._locks: list[GpuLock] = []
        self._previous_w: tuple[float, ...] | None = None
        self._ours_w: list[tuple[float, ...]] = [() for _ in devices]
        self._journaled = False
        self._clocks_locked = False
        self._locked_before_mhz = locked_before_mhz
        self._owner = os.getpid()
        self._section = threading.Lock()
        self._main_inside = False
        self._pending: int | None = None
        self._dying = False
        self._handlers: dict[int, Any] = {}

    @property
    def changed(self) -> bool:
        """Whether something is to be put back."""
        return self._previous_w is not None or self._clocks_locked

    def probe(self) -> WhyNot | None:
        """Return what `acquire` would return. The GPUs are not kept, and nothing is put back."""
        why_not = self.acquire(put_back=False)
        self.release()
        return why_not

    def acquire(self, *, put_back: bool = True, limits: bool = True) -> WhyNot | None:
        """Take the GPUs; return why they cannot be controlled, None where they can.

        What a dead process left is put back first. Permission is found out by setting the present limit
        again: the user's id says nothing in a container. Clocks need the same permission, and cannot be tried without
        undoing somebody's lock.

        Args:
            put_back: Whether to put back what a dead process left.
            limits: Whether GPUs without power limits will not do.
        """
        if self._journal is None:
            return None
        for device in self._devices:
            lock = self._journal.lock(device.uuid)
            try:
                taken = _acquire(lock)
            except OSError as error:
                self.release()
                return WhyNot(
                    Obstacle.JOURNAL,
                    f"the journal of power limits cannot be kept in {self._journal.folder} ({error.strerror}): "
                    "set ZEUS_FLOWS_STATE_DIR to a folder that can be written to",
                )
            if not taken:
                self.release()
                text = f"another job controls {device.uuid} (process {lock.holder()})"
                return WhyNot(Obstacle.ANOTHER_JOB, text)
            self._locks.append(lock)
        try:
            for device in self._devices:
                if put_back:
                    undo_dead(self._journal, device)
                if limits or device.has_power_limits:
                    device.set_power_limit_w(device.power_limit_w())
        except PowerPermissionError:
            self.release()
            return NO_PERMISSION
        except (ConfigError, NotSupported) as error:
            self.release()
            return WhyNot(Obstacle.DEVICE, str(error))
        except DeviceError:
            self.release()
            raise
        return None

    def set_power_limit_w(self, watts: float) -> None:
        """Set the power limit of every GPU; where one refuses, put all back and raise."""
        with self._critical():
            try:
                self._remember(limits=True)
                self._about_to_set(watts)
            except OSError as error:
                raise _unwritten(error) from error
            try:
                for i, device in enumerate(self._devices):
                    device.set_power_limit_w(watts)
                    self._ours_w[i] = (watts,)
            except DeviceError:
                self._restore()
                raise

    def lock_clocks_mhz(self, low: int, high: int) -> None:
        """Lock the graphics clocks of every GPU; where one refuses, put all back and raise."""
        with self._critical():
            try:
                self._remember(clocks=True)
            except OSError as error:
                raise _unwritten(error) from error
            try:
                for device in self._devices:
                    device.lock_clocks_mhz(low, high)
            except DeviceError:
                self._restore()
                raise

    def reset_clocks(self) -> None:
        """Undo `lock_clocks_mhz`; power limits stay."""
        with self._critical():
            if self._clocks_locked:
                for device in self._devices:
                    unlock(device, self._locked_before_mhz)

    def restore(self) -> None:
        """Put everything back. Safe to call twice; a GPU that is lost keeps its journal entry."""
        with self._critical():
            self._restore()

    def release(self) -> None:
        """Put everything back and let go of the GPUs. Safe to call twice."""
        self.restore()
        while self._locks:
            self._locks.pop().release()

    def _remember(self, *, limits: bool = False, clocks: bool = False) -> None:
        """Write down, once, how the GPUs are before their limits or clocks are changed."""
        if self._dying:
            raise PowerPermissionError("the process is ending; power limits and clocks were put back")
        known = (self._previous_w is not None or not limits) and (self._clocks_locked or not clocks)
        if known and self._journaled:
            return
        previous_w, clocks = self._previous_w, clocks or self._clocks_locked
        if previous_w is None and limits:
            previous_w = tuple(device.power_limit_w() for device in self._devices)
        if self._journal is not None:
            for entry in self._entries(previous_w, clocks=clocks):
                self._journal.write(entry)
        if not self.changed and self._journal is not None:
            atexit.register(self.release)
            self._handle_signals()
        self._previous_w, self._clocks_locked, self._journaled = previous_w, clocks, True

    def _about_to_set(self, watts: float) -> None:
        """Write down which limits may be ours from now on. Not synced: limits do not outlive a power cut."""
        assert self._previous_w is not None
        self._ours_w = [(*ours_w, watts) for ours_w in self._ours_w]
        if self._journal is not None:
            for entry in self._entries(self._previous_w, clocks=self._clocks_locked):
                self._journal.write(entry, sync=False)

    def _entries(self, previous_w: Sequence[float] | None, *, clocks: bool) -> Iterator[Entry]:
        limits_w: Sequence[float | None] = previous_w or [None] * len(self._devices)
        for device, watts, ours_w in zip(self._devices, limits_w, self._ours_w, strict=True):
            before_mhz = self._locked_before_mhz if clocks else None
            yield Entry(device.uuid, watts, clocks, self._owner, ours_w=ours_w, previous_mhz=before_mhz)

    def _restore(self) -> None:
        if not self.changed or os.getpid() != self._owner:
            return
        entries = tuple(self._entries(self._previous_w, clocks=self._clocks_locked))
        undone = [undo(device, entry) for device, entry in zip(self._devices, entries, strict=True)]
        if self._journal is not None:
            for device, done in zip(self._devices, undone, strict=True):
                if done:
                    with suppress(OSError):
                        self._journal.remove(device.uuid)
        self._journaled = False
        if not all(undone):
            return  # the previous limits stay known: else a later change would take the changed ones for them
        self._previous_w, self._clocks_locked = None, False
        self._ours_w = [() for _ in self._devices]
        if self._journal is not None:
            atexit.unregister(self.release)
            self._leave_signals()

    @contextmanager
    def _critical(self) -> Iterator[None]:
        """Let one thread in. A signal that reaches the main thread inside waits until it is out again."""
        main = threading.current_thread() is threading.main_thread()
        self._main_inside = self._main_inside or main
        try:
            with self._section:
                yield
        finally:
            if main:
                self._main_inside = False
                pending, self._pending = self._pending, None
                if pending is not None:
                    os.kill(os.getpid(), pending)

    def _handle_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.debug("power limits are changed off the main thread: after SIGTERM the journal puts them back")
            return
        for number in _SIGNALS:
            present = signal.getsignal(number)
            if number not in self._handlers and (present is signal.SIG_DFL or callable(present)):
                self._handlers[number] = signal.signal(number, self._on_signal)

    def _leave_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in tuple(self._handlers):
                if signal.getsignal(number) == self._on_signal:  # else another handler still calls ours
                    signal.signal(number, self._handlers.pop(number))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers.get(number, signal.SIG_DFL)
        if os.getpid() == self._owner:
            if self._main_inside:
                self._pending = number
                return
            self._dying = not callable(handler)
            log.info("%s: power limits and clocks are put back", signal.Signals(number).name)
            self.restore()
        if callable(handler):
            handler(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _acquire(lock: GpuLock) -> bool:
    """Return whether the lock is ours; `doctor` and `restore-power` hold it for moments only."""
    for _ in range(3):
        if lock.acquire():
            return True
        time.sleep(0.1)
    return lock.acquire()


def _unwritten(error: OSError) -> DeviceError:
    return DeviceError(f"the journal of power limits and clocks cannot be written ({error.strerror})")
