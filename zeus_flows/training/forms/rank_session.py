"""A data-parallel train function, from the side of one rank: `torchrun -m zeus_flows.training.forms.rank_session`.

The attempt's session is in the process that started torchrun: it measures all GPUs from outside and decides. Rank 0
tells it of steps, evaluations and metrics, in order with what is printed. What it answers at the end of an epoch is a
file that all ranks read, so that all of them stop together.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from zeus_flows.core.records import Outcome
from zeus_flows.errors import TrainingError
from zeus_flows.job_file import Target
from zeus_flows.training.accumulation import Accumulation
from zeus_flows.training.forms.launcher import STEP
from zeus_flows.training.keeping import stage
from zeus_flows.training.training_loop import batch_size_of, samples_in

Batch = TypeVar("Batch")

#: Begins a line that is told to the session and not to people.
TOLD: Final = "\x1dzeus_flows "
#: Names the folder in which the session answers, and has what the attempt is.
FOLDER: Final = "ZEUS_FLOWS_RANKS"
_POLL_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class AttemptOfRanks:
    """What every rank is told of the attempt when it starts."""

    function: str
    parameters: Mapping[str, Any]
    batch_size: int
    micro_batch_size: int
    accumulate: bool
    learning_rate: float
    recurrence: int
    attempt: int
    seed: int
    max_epochs: int
    target: Mapping[str, Any]


class RankSession:
    """One attempt, from the side of one rank's training loop; `Session` has the same face for one process.

    Attributes:
        rank: Which of the ranks this is, from 0.
        world_size: How many ranks train together, one for each GPU.
        batch_size: The batch size over all ranks, as the job has it.
        batch_size_per_rank: What this rank's loader is to yield, where gradients are not accumulated.
        learning_rate: The learning rate for `batch_size`, by the job file's rule.
        recurrence: Number of the recurrence, from 1.
        attempt: Number of the attempt within it, from 1.
        seed: For the train function's own randomness; the same on all ranks.
        target: The metric, and when it is good enough.
        max_epochs: Epochs an attempt trains at most.
        outcome: How the attempt ended; None while it has not.
    """

    def __init__(self, task: AttemptOfRanks, folder: Path, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.batch_size, self.batch_size_per_rank = task.batch_size, task.batch_size // world_size
        self.learning_rate, self.seed = task.learning_rate, task.seed
        self.recurrence, self.attempt = task.recurrence, task.attempt
        self.target, self.max_epochs = Target.model_validate(task.target), task.max_epochs
        self.outcome: Outcome | None = None
        self._parts = Accumulation.of(task.batch_size, task.micro_batch_size, wanted=task.accumulate)
        self._loop = _Loop(folder, os.dup(1) if rank == 0 else None)

    @property
    def micro_batch_size_per_rank(self) -> int:
        """What this rank's loader is to yield where the job accumulates gradients; else its share of the batch."""
        self._parts.heeded = True
        return self._parts.micro_batch_size // self.world_size

    @property
    def accumulation_steps(self) -> int:
        """How many of the loader's batches an optimizer step takes; 1 where nothing is accumulated."""
        self._parts.heeded = True
        return self._parts.steps

    @property
    def converged(self) -> bool:
        """Whether the target was reached. Where it is False after the loop, the model is not to be used."""
        return self.outcome is Outcome.CONVERGED

    def epochs(self) -> Iterator[int]:
        """Yield epoch numbers until the session says that the attempt is over; all ranks stop at the same one."""
        while True:
            answer = self._loop.answer()
            if answer != "go":
                self.outcome = Outcome(answer)
                return
            self._loop.epoch += 1
            self._loop.metric = None
            yield self._loop.epoch
            self._loop.tell("epoch", self._loop.metric)

    def steps(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a loader's batches; each, or as many as make up the batch size, is a step of all ranks together."""
        if self._loop.epoch == 0:
            raise TrainingError("session.steps() belongs inside `for epoch in session.epochs()`")
        done, each = 0, 0
        for batch in loader:
            if not each:
                size = batch_size_of(loader, batch) or self.batch_size_per_rank
                each = max(self.batch_size_per_rank // size, 1)
                self._loop.tell("steps", self._samples(loader, size))
            yield batch
            done += 1
            if done % each == 0:
                self._parts.check()
                self._loop.step()
        if each and done % each:
            self._loop.step()
        self._loop.tell("steps end")

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Measure a block as an evaluation of the model."""
        self._loop.tell("evaluation")
        try:
            yield
        finally:
            self._loop.tell("evaluation end")

    def report_metric(self, value: float) -> None:
        """Tell how good the model is after this epoch. Rank 0's word counts: let ranks average before it."""
        self._loop.metric = float(value)

    def save(self, state: Mapping[str, Any]) -> None:
        """Do nothing: an attempt of several ranks that breaks begins anew."""

    def load(self) -> dict[str, Any] | None:
        """Return None: there is never a checkpoint to go on from."""
        return None

    def keep(self, model: object, /, **about: object) -> None:
        """Keep the model that this attempt brings, as `Session.keep` does. Rank 0's counts; the others do nothing."""
        if self.rank == 0 and (self.outcome is None or self.converged):
            stage(model, about, kept_folder(self._loop.folder))

    def returned(self) -> None:
        """Tell that the train function is through, whatever it left running."""
        self._loop.tell("returned")

    def _samples(self, loader: Any, size: int) -> int:
        """Return the samples of an epoch over all ranks; a distributed sampler gives each its share of the data set."""
        batches = samples_in(_LengthAlone(loader), size) * self.world_size
        dataset: Any = getattr(loader, "dataset", None)
        return min(batches, len(dataset)) if batches and hasattr(dataset, "__len__") else batches


class _LengthAlone:
    """A loader's length without its data set, which is that of all ranks."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)


@dataclass(slots=True)
class _Loop:
    """Where a rank is, and how it talks to the session; only rank 0 has a voice."""

    folder: Path
    out: int | None
    epoch: int = 0
    metric: float | None = field(default=None)

    def tell(self, what: str, value: float | None = None) -> None:
        if self.out is not None:
            sys.stdout.flush()
            os.write(self.out, f"\n{TOLD}{json.dumps([what, value])}\n".encode())

    def step(self) -> None:
        if self.out is not None:
            os.write(self.out, STEP)

    def answer(self) -> str:
        """Wait for what the session says about the epoch after this one."""
        path = answer_file(self.folder, self.epoch)
        while not path.exists():
            time.sleep(_POLL_S)
        return path.read_text()


def kept_folder(folder: Path) -> Path:
    """Return where rank 0 leaves its model."""
    return folder / "kept"


def answer_file(folder: Path, epoch: int) -> Path:
    """Return the file that says what comes after an epoch: `go`, or the attempt's outcome."""
    return folder / f"after-{epoch}"


def main() -> None:
    """Run the train function on this rank."""
    from zeus_flows.training.trainer import load_function

    folder = Path(os.environ[FOLDER])
    task = AttemptOfRanks(**json.loads((folder / "task.json").read_text()))
    session = RankSession(task, folder, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    load_function(task.function)(session, **task.parameters)
    session.returned()


if __name__ == "__main__":
    main()
