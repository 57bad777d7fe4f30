"""What must be put back: one file per GPU that outlives a killed process, and one lock per GPU that does not.

The journal entry is on the disk before the first change and goes when the change is undone. Whoever holds the lock
controls the GPU; the kernel lets go of it when the process dies, however it dies. An entry whose lock is free is
what a dead process left behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from zeus_flows.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """How a GPU was before it was changed.

    Attributes:
        uuid: The GPU.
        previous_w: Its power limit.
        clocks_locked: Whether its graphics clocks were locked by us, to be reset.
        pid: The process that changed it.
    """

    uuid: str
    previous_w: float
    clocks_locked: bool
    pid: int


class Journal:
    """Entries in a folder, one file per GPU, written so that a crash leaves the old one or the new one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, entry: Entry) -> None:
        """Put an entry on the disk: when this returns, it survives a power cut."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(entry.uuid)
        draft = path.with_suffix(".draft")
        with draft.open("w") as file:
            json.dump(asdict(entry), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self._sync_folder()

    def remove(self, uuid: str) -> None:
        """Forget an entry."""
        self._path(uuid).unlink(missing_ok=True)
        self._sync_folder()

    def read(self, uuid: str) -> Entry | None:
        """Return a GPU's entry, or None.

        Raises:
            ConfigError: the file is not a journal entry; its path is named.
        """
        path = self._path(uuid)
        try:
            record = json.loads(path.read_text())
            return Entry(str(record["uuid"]), float(record["previous_w"]), bool(record["clocks_locked"]), record["pid"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a journal of power limits ({error}); look at it and delete it") from error

    def uuids(self) -> tuple[str, ...]:
        """Return the GPUs that have an entry."""
        return tuple(sorted(path.stem for path in self.folder.glob("*.json")))

    def lock(self, uuid: str) -> GpuLock:
        """Return the lock of a GPU, not yet held."""
        return GpuLock(self._path(uuid).with_suffix(".lock"))

    def _path(self, uuid: str) -> Path:
        return self.folder / (re.sub(r"[^A-Za-z0-9-]", "_", uuid) + ".json")

    def _sync_folder(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class GpuLock:
    """The right to change one GPU. Held by one process at a time; let go when that process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Return whether the lock is ours now.

        Raises:
            OSError: the folder cannot be written to.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        self._descriptor = descriptor
        _held.add(self)
        return True

    def holder(self) -> str:
        """Return the process id that the holder wrote down, for messages."""
        try:
            return self._path.read_text().strip() or "unknown"
        except OSError:
            return "unknown"

    def release(self) -> None:
        """Let go. Safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)


#: A forked child, such as a data loader's worker, shares its parent's locks unless it closes them: it must not
#: keep a GPU locked after the parent was killed.
_held: weakref.WeakSet[GpuLock] = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
