"""What a training that broke needs to go on: the user's state on the disk, and how far the books were by then."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeus_flows.core.power_profile import Parts, PowerProfile
from zeus_flows.errors import TrainingError
from zeus_flows.private_files import open_private, private_folder


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an attempt has come, and what its epochs took so far.

    Attributes:
        epoch: Epochs trained.
        energy_j: Their energy.
        time_s: Their time.
        profiling_energy_j: The part of the energy that went into profiling.
        profiling_time_s: The part of the time likewise.
        complete: Whether every reading was good.
        metric: The metric reported last.
        parts: What they took beside training steps.
        host_energy_j: What the machine drew beside its GPUs meanwhile.
        foreign_limit_w: The power limit that somebody else set meanwhile; None where nobody did.
        curve: The learning curve so far.
    """

    epoch: int = 0
    energy_j: float = 0.0
    time_s: float = 0.0
    profiling_energy_j: float = 0.0
    profiling_time_s: float = 0.0
    complete: bool = True
    metric: float | None = None
    parts: Parts = field(default_factory=Parts)
    host_energy_j: float = 0.0
    foreign_limit_w: float | None = None
    curve: tuple[tuple[int, float], ...] = ()


class Checkpoints:
    """One attempt's checkpoint, over all the tries that the attempt takes in this process.

    The folder goes when this does; what a killed process left goes when the next one saves.

    Args:
        folder: Where checkpoints of all attempts are.

    Attributes:
        progress: The books at the last `save`; None before it.
        reached: The books at the epoch that reached the target, where training went on after it.
        reported: The last epoch whose metrics have been written: a retry does not write them again.
        profile: What the tries before this one measured of power limits.
    """

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._lock: Any = None
        self.progress: Progress | None = None
        self.reached: Progress | None = None
        self.reported = 0
        self.profile: PowerProfile | None = None

    def save(self, state: Mapping[str, Any], progress: Progress, reached: Progress | None) -> None:
        """Save a state together with its books. Until both are written, the previous checkpoint stays valid.

        Raises:
            TrainingError: the state holds more than tensors, numbers, strings and containers of them.
        """
        import torch

        first = self._own is None
        path = self._path()
        draft = path.with_suffix(".draft")
        with os.fdopen(open_private(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC), "wb") as file:
            torch.save(dict(state), file)
        if first:
            try:
                torch.load(draft, weights_only=True, mmap=True, map_location="cpu")
            except Exception as error:
                raise TrainingError(
                    "session.save() takes what can be loaded without running code: tensors, numbers, strings, "
                    f"and dicts and lists of them, such as model.state_dict() ({str(error).splitlines()[0]})"
                ) from None
        draft.replace(path)
        self.progress, self.reached = progress, reached

    def load(self) -> dict[str, Any] | None:
        """Return the state saved last, on the CPU; None where there is none."""
        if self.progress is None:
            return None
        import torch

        state: dict[str, Any] = torch.load(self._path(), weights_only=True, map_location="cpu")
        return state

    def close(self) -> None:
        """Forget the checkpoint. Safe to call twice."""
        if self._own is not None:
            self._lock.close()
            self._own.cleanup()
            self._own = None
        self.progress = None

    @property
    def folder(self) -> Path:
        """The folder of this attempt; it goes when the attempt ends."""
        return self._path().parent

    def _path(self) -> Path:
        if self._own is None:
            private_folder(self._root)
            _sweep(self._root)
            self._own = tempfile.TemporaryDirectory(dir=self._root, ignore_cleanup_errors=True)
            self._lock = os.fdopen(open_private(Path(self._own.name) / "lock", os.O_RDWR | os.O_CREAT), "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Path(self._own.name) / "state.pt"


def _sweep(root: Path) -> None:
    """Remove the checkpoints of dead processes: their locks are free."""
    for lock in root.glob("*/lock"):
        with suppress(OSError), os.fdopen(open_private(lock, os.O_RDONLY)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not lock.parent.is_symlink():
                shutil.rmtree(lock.parent, ignore_errors=True)
