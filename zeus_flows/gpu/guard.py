"""The power guard: whatever is changed on a GPU is put back.

The previous power limit (not the greatest) returns when the guard is released, when the process exits or raises,
and on SIGTERM, SIGINT and SIGHUP. After SIGKILL, the deletion of a pod or a reboot the journal remembers: the next job
on the machine, or `zeus-flows restore-power`, puts it back. A limit that somebody else has set meanwhile stays.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any

from zeus_flows.errors import ConfigError, DeviceError, DeviceLost, NotSupported, PowerPermissionError
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.journal import Entry, GpuLock, Journal

log = logging.getLogger(__name__)

#: Ends a process by default, leaves time to put things back, and can be caught.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: A driver that is busy answers again soon; five seconds are promised.
_TRIES, _BETWEEN_TRIES_S = 4, 0.25


class Obstacle(Enum):
    """What keeps a job from setting power limits."""

    SHARED = auto()  # others use the GPU at the same time
    ANOTHER_JOB = auto()  # another job controls it
    PERMISSION = auto()  # this process may not
    JOURNAL = auto()  # what is there before cannot be written down
    DEVICE = auto()  # the GPU has no limits, or refuses them


@dataclass(frozen=True, slots=True)
class WhyNot:
    """Why power limits cannot be set.

    Attributes:
        obstacle: What is in the way.
        text: That, and what to do about it, for people.
    """

    obstacle: Obstacle
    text: str


NO_PERMISSION = WhyNot(
    Obstacle.PERMISSION,
    "this process may not set power limits: run it as root, give its container `--cap-add=SYS_ADMIN`, "
    "or start the Zeus daemon (zeusd) on the machine",
)


def journal_folder(state_dir: Path) -> Path:
    """Return where the journal and the locks are."""
    return state_dir / "power"


class PowerGuard:
    """Changes power limits and clocks of a job's GPUs, and puts them back.

    Several threads may use it. Signals are handled where the first change is made on the main thread; elsewhere
    Python cannot, and SIGTERM leaves the work to the journal.

    Args:
        devices: The GPUs, all or none of which are changed.
        folder: Where the journal is; None for devices whose limits die with the process.
    """

    def __init__(self, devices: Sequence[Device], folder: Path | None) -> None:
        self._devices = tuple(devices)
        self._journal = Journal(folder) if folder else None
        self._locks: list[GpuLock] = []
        self._previous_w: tuple[float, ...] | None = None
        self._ours_w: list[tuple[float, ...]] = [() for _ in devices]
        self._journaled = False
        self._clocks_locked = False
        self._owner = os.getpid()
        self._section = threading.Lock()
        self._main_inside = False
        self._pending: int | None = None
        self._dying = False
        self._handlers: dict[int, Any] = {}

    @property
    def changed(self) -> bool:
        """Whether something is to be put back."""
        return self._previous_w is not None

    def probe(self) -> WhyNot | None:
        """Return what `acquire` would return. The GPUs are not kept, and nothing is put back."""
        why_not = self.acquire(put_back=False)
        self.release()
        return why_not

    def acquire(self, *, put_back: bool = True) -> WhyNot | None:
        """Take the GPUs; return why they cannot be controlled, None where they can.

        What a dead process left is put back first. Permission is found out by setting the present limit
        again: the user's id says nothing in a container.
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
                    _put_back(self._journal, device)
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
                self._remember()
                self._about_to_set(watts)
            except OSError as error:
                raise DeviceError(f"the journal of power limits cannot be written ({error.strerror})") from error
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
            self._remember(clocks=True)
            try:
                for device in self._devices:
                    device.lock_clocks_mhz(low, high)
            except DeviceError:
                self._restore()
                raise

    def reset_clocks(self) -> None:
        """Undo `lock_clocks_mhz`; power limits stay."""
        with self._critical():
            for device in self._devices:
                device.reset_clocks()

    def restore(self) -> None:
        """Put everything back. Safe to call twice; a GPU that is lost keeps its journal entry."""
        with self._critical():
            self._restore()

    def release(self) -> None:
        """Put everything back and let go of the GPUs. Safe to call twice."""
        self.restore()
        while self._locks:
            self._locks.pop().release()

    def _remember(self, *, clocks: bool = False) -> None:
        """Write down, once, how the GPUs are before they are changed."""
        if self._dying:
            raise PowerPermissionError("the process is ending; power limits were put back")
        if self._previous_w is not None and self._journaled and (self._clocks_locked or not clocks):
            return
        previous_w = self._previous_w or tuple(device.power_limit_w() for device in self._devices)
        if self._journal is not None:
            for entry in self._entries(previous_w, clocks=clocks or self._clocks_locked):
                self._journal.write(entry)
        if self._previous_w is None and self._journal is not None:
            atexit.register(self.release)
            self._handle_signals()
        self._previous_w, self._clocks_locked, self._journaled = previous_w, clocks or self._clocks_locked, True

    def _about_to_set(self, watts: float) -> None:
        """Write down which limits may be ours from now on. Not synced: limits do not outlive a power cut."""
        assert self._previous_w is not None
        self._ours_w = [(*ours_w, watts) for ours_w in self._ours_w]
        if self._journal is not None:
            for entry in self._entries(self._previous_w, clocks=self._clocks_locked):
                self._journal.write(entry, sync=False)

    def _entries(self, previous_w: Sequence[float], *, clocks: bool) -> Iterator[Entry]:
        for device, watts, ours_w in zip(self._devices, previous_w, self._ours_w, strict=True):
            yield Entry(device.uuid, watts, clocks_locked=clocks, pid=self._owner, ours_w=ours_w)

    def _restore(self) -> None:
        if self._previous_w is None or os.getpid() != self._owner:
            return
        entries = tuple(self._entries(self._previous_w, clocks=self._clocks_locked))
        undone = [_undo(device, entry) for device, entry in zip(self._devices, entries, strict=True)]
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
            log.info("%s: power limits are put back", signal.Signals(number).name)
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


@dataclass(frozen=True, slots=True)
class Restored:
    """What was done with one journal entry.

    Attributes:
        uuid: The GPU.
        done: Whether it is as it was before.
        text: What happened, for people.
        denied: Whether this user may not change it; root may, and the Zeus daemon.
    """

    uuid: str
    done: bool
    text: str
    denied: bool = False


def restore_power(state_dir: Path, find: Callable[[str], Device | None]) -> tuple[Restored, ...]:
    """Put back the power limits that dead processes left. GPUs of running jobs are left alone.

    Args:
        state_dir: Whose journal to read.
        find: Returns the GPU of a UUID, or None where it is not on this machine.
    """
    journal = Journal(journal_folder(state_dir))
    return tuple(_restore_one(journal, uuid, find) for uuid in journal.uuids())


def _restore_one(journal: Journal, uuid: str, find: Callable[[str], Device | None]) -> Restored:
    lock = journal.lock(uuid)
    try:
        if not lock.acquire():
            return Restored(uuid, False, f"a running job (process {lock.holder()}) controls it; left alone")
        device = find(uuid)
        if device is None:
            return Restored(uuid, False, "is not on this machine now; its journal is kept")
        entry = _put_back(journal, device)
        if entry is None:
            return Restored(uuid, True, "was put back by another process meanwhile")
        if not entry.left_alone(limit_w := device.power_limit_w()) and limit_w != entry.previous_w:
            return Restored(uuid, True, f"somebody else has set the power limit to {limit_w:g} W since; it stays so")
        return Restored(uuid, True, f"the power limit is {entry.previous_w:g} W again")
    except PowerPermissionError:
        text = "may not be changed by this user: type `sudo zeus-flows restore-power`"
        return Restored(uuid, False, text, denied=True)
    except (ConfigError, DeviceError) as error:
        return Restored(uuid, False, str(error))
    except OSError as error:
        return Restored(uuid, False, f"its journal cannot be used: {error}")
    finally:
        lock.release()


def _put_back(journal: Journal, device: Device) -> Entry | None:
    """Put back the limit that a dead process left on a GPU. The caller holds its lock. Return the entry, or None."""
    entry = journal.read(device.uuid)
    if entry is None:
        return None
    ours = _put_back_ours(device, entry)
    journal.remove(device.uuid)
    if ours:
        log.warning(
            "%s: process %s ended without putting its power limit back; it is %g W again",
            device.uuid,
            entry.pid,
            entry.previous_w,
        )
    return entry


def _put_back_ours(device: Device, entry: Entry) -> bool:
    """Put back what an entry says, but for a limit that somebody else has set since. Return whether it was ours."""
    limit_w = _limit_or_none(device)
    ours = limit_w is None or entry.left_alone(limit_w)
    if ours:
        device.set_power_limit_w(entry.previous_w)
    elif limit_w != entry.previous_w:
        log.info(
            "%s: the power limit is %g W, not the %g W that was set here: somebody else set it, and it stays",
            device.uuid,
            limit_w,
            entry.ours_w[-1],
        )
    if entry.clocks_locked:
        device.reset_clocks()
    return ours


def _limit_or_none(device: Device) -> float | None:
    """Return the limit in force; None where it cannot be read: then it is put back blindly."""
    try:
        return device.power_limit_w()
    except DeviceLost:
        raise
    except DeviceError:
        return None


def _undo(device: Device, entry: Entry) -> bool:
    """Return whether nothing is left to put back on a GPU."""
    for attempt in range(_TRIES):
        try:
            _put_back_ours(device, entry)
            return True
        except DeviceLost as error:
            log.error("%s; its journal is kept", error)
            return False
        except DeviceError as error:
            if attempt == _TRIES - 1:
                log.error("%s; type `zeus-flows restore-power`", error)
            else:
                time.sleep(_BETWEEN_TRIES_S)
    return False
