"""A lock that one process holds at a time, and that the kernel takes away when the process dies, however it dies."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from zeus_flows.errors import WrongPlatform
from zeus_flows.private_files import open_private, private_folder, read_private

try:
    import fcntl
except ModuleNotFoundError:  # Windows has none; the command line refuses it earlier
    raise WrongPlatform from None


class ProcessLock:
    """The right to something, as an exclusive lock (`flock`) on a file, in which the holder writes its process id.

    The file stays when the lock is let go: removing it would let two processes lock two files of one name.

    Args:
        path: The file; it and its folder are made when the lock is first taken.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Return whether the lock is ours now.

        Raises:
            OSError: the folder cannot be written to, or somebody put a link in the file's place.
        """
        private_folder(self._path.parent)
        descriptor = open_private(self._path, os.O_RDWR | os.O_CREAT)
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
            return read_private(self._path).strip() or "unknown"
        except (OSError, UnicodeDecodeError):
            return "unknown"

    def release(self) -> None:
        """Let go. Safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)


#: A forked child, such as a data loader's worker, shares its parent's locks unless it closes them: it must not
#: keep them after the parent was killed.
_held: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
