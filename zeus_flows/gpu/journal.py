"""What must be put back: one file per GPU that outlives a killed process, and one lock per GPU that does not.

The journal entry is on the disk before the first change and goes when the change is undone. Whoever holds the lock
controls the GPU; the kernel lets go of it when the process dies, however it dies. An entry whose lock is free is
what a dead process left behind.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zeus_flows.core.json import from_text, to_text
from zeus_flows.core.text import one_line
from zeus_flows.errors import ConfigError
from zeus_flows.private_files import open_private, private_folder, read_private
from zeus_flows.process_lock import ProcessLock


@dataclass(frozen=True, slots=True)
class Entry:
    """How a GPU was before it was changed.

    Attributes:
        uuid: The GPU.
        previous_w: Its power limit; None where that was not changed.
        clocks_locked: Whether its graphics clocks were locked by us.
        pid: The process that changed it.
        ours_w: The limits of which one is in force unless somebody else set another since: the one that was set last,
            and the one that was about to be. Empty: that is not known.
        previous_mhz: The clock that they were locked to before, where that is known, for NVML cannot tell; None: they
            were not, as far as is known, and are reset.
    """

    uuid: str
    previous_w: float | None
    clocks_locked: bool
    pid: int
    ours_w: tuple[float, ...] = ()
    previous_mhz: int | None = None

    def left_alone(self, limit_w: float) -> bool:
        """Return whether a limit is one that we set: then nobody else has changed it since."""
        return self.previous_w is not None and (not self.ours_w or is_ours(limit_w, self.ours_w))

    def put_back_text(self, limit_w: float) -> str:
        """Return what is there again, or stays, for people; `limit_w` is the power limit in force."""
        said = []
        if self.previous_w is not None and not self.left_alone(limit_w) and limit_w != self.previous_w:
            said.append(f"somebody else has set the power limit to {limit_w:g} W since; it stays so")
        elif self.previous_w is not None:
            said.append(f"the power limit is {self.previous_w:g} W again")
        if self.clocks_locked:
            again = "not locked any more" if self.previous_mhz is None else f"locked to {self.previous_mhz} MHz again"
            said.append(f"the clocks are {again}")
        return ", ".join(said)


#: Drivers may round a limit that is set.
_ROUNDED_W = 1.0


def is_ours(limit_w: float, ours_w: Iterable[float]) -> bool:
    """Return whether a limit that is read is one of those that we set.

    >>> is_ours(150.0, (175.0, 150.4)), is_ours(200.0, (175.0, 150.0))
    (True, False)
    """
    return any(abs(limit_w - watts) <= _ROUNDED_W for watts in ours_w)


def journal_folder(state_dir: Path) -> Path:
    """Return where the journal and the locks are."""
    return state_dir / "power"


class Journal:
    """Entries in a folder, one file per GPU, written so that a crash leaves the old one or the new one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, entry: Entry, *, sync: bool = True) -> None:
        """Put an entry on the disk: when this returns, it survives a kill, and a power cut where it is synced."""
        private_folder(self.folder)
        path = self._path(entry.uuid)
        draft = path.with_suffix(".draft")
        with os.fdopen(open_private(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            file.write(to_text(entry))
            file.flush()
            if sync:
                os.fsync(file.fileno())
        draft.replace(path)
        if sync:
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
            entry = from_text(Entry, read_private(path))
            told = (entry.previous_w, *entry.ours_w, entry.previous_mhz)
            if not all(value is None or 0 < value < math.inf for value in told):
                raise ValueError("a limit is no number of watts, or a clock none of MHz")
            if entry.previous_w is None and not entry.clocks_locked:
                raise ValueError("it has neither a power limit nor clocks to put back")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}); look at it and delete it") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a journal of power limits ({one_line(str(error))}); look at it and delete it"
            ) from None
        return entry

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
