"""What must be put back: one file per GPU that outlives a killed process, and one lock per GPU that does not.

The journal entry is on the disk before the first change and goes when the change is undone. Whoever holds the lock
controls the GPU; the kernel lets go of it when the process dies, however it dies. An entry whose lock is free is
what a dead process left behind.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from zeus_flows.core.json import from_text, to_text
from zeus_flows.errors import ConfigError
from zeus_flows.process_lock import ProcessLock


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
            file.write(to_text(entry))
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
            return from_text(Entry, path.read_text())
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


class GpuLock(ProcessLock):
    """The right to change one GPU."""
