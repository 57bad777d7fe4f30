"""Where a training loop is: which epoch and step, how many samples, and what a step usually takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

#: A step that takes so many times what steps take, and so many seconds more, had something else in it.
LATE, LEAST_LATE_S = 1.5, 0.1


@dataclass(slots=True)
class StepUnderWay:
    """The step that a training loop is at, and what steps usually take.

    Attributes:
        first_done: Whether a first step is done.
        samples: Samples of the step under way; 0 where it was counted already.
        handed_s: When its batch was handed out; None before the first of an epoch.
        usual_s: Seconds per sample of the fastest step so far: what a step takes where nothing else happens in it.
        batches: Batches that an optimizer step takes: more than one where gradients are accumulated.
        gathered: How many of them are done, and their samples.
    """

    first_done: bool = False
    samples: int = 0
    handed_s: float | None = None
    usual_s: float = math.inf
    batches: int = 1
    gathered: tuple[int, int] = (0, 0)

    def gather(self, samples: int) -> int:
        """Note that a batch is done; return the samples of the optimizer step that it ends, 0 where it ends none."""
        batches, before = self.gathered
        if batches + 1 < self.batches:
            self.gathered = (batches + 1, before + samples)
            return 0
        self.gathered = (0, 0)
        return before + samples

    def take(self) -> int:
        """Return the samples of the step under way, which is over now; 0 where it was counted already."""
        samples = self.samples + self.gathered[1]
        self.samples, self.gathered = 0, (0, 0)
        return samples

    def begin(self, samples: int, now_s: float) -> None:
        """Begin a step: its batch is handed out."""
        if self.handed_s is not None:
            per_sample_s = (now_s - self.handed_s) / samples
            if 0 < per_sample_s < self.usual_s:
                self.usual_s = per_sample_s
        self.samples, self.handed_s = samples, now_s

    def ended(self, samples: int, now_s: float) -> None:
        """Note that a step has ended, where nobody told when it began: it began when the one before it ended."""
        self.begin(samples, now_s)
        self.samples = 0

    def overdue(self, now_s: float) -> float | None:
        """Return when the step under way should have ended, where that is long ago; None where it is not."""
        if self.handed_s is None or math.isinf(self.usual_s):
            return None
        if not self.samples:  # it has ended, and was told of then
            return self.handed_s if now_s - self.handed_s > LEAST_LATE_S else None
        step_s = self.usual_s * self.samples
        return self.handed_s + step_s if now_s - self.handed_s > LATE * step_s + LEAST_LATE_S else None


@dataclass(slots=True)
class TrainingLoop:
    """Where a training loop is.

    Attributes:
        begun: `epochs` is in use.
        over: Nothing is measured any more.
        epoch: The epoch under way, or the last one.
        resumed: The epoch that a retry went back to.
        total: Samples per epoch; 0 while that is not known.
        counted: Whether `total` was told by the loader, so that its end is known before it comes.
        steps: Stands for the loop over steps that is under way; None between epochs.
        step: The step that it is at.
        samples: Samples handed out in this epoch.
        left: Samples that this epoch has left.
        evaluating: Within an evaluation.
        evaluated: The model was evaluated since the last step.
        evaluated_once: It was evaluated in this epoch.
        reported: The metric reported in this epoch.
        cut_short: The attempt ended within this epoch's steps, so that they may not tell how long an epoch is.
    """

    begun: bool = False
    over: bool = False
    epoch: int = 0
    resumed: int = 0
    total: int = 0
    counted: bool = False
    steps: object | None = None
    step: StepUnderWay = field(default_factory=StepUnderWay)
    samples: int = 0
    left: int = 0
    evaluating: bool = False
    evaluated: bool = False
    evaluated_once: bool = False
    reported: float | None = None
    cut_short: bool = False

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.samples = 0
        self.evaluated = self.evaluated_once = self.cut_short = False
        self.reported = None

    def hand_out(self, samples: int, now_s: float) -> None:
        """Note that a batch is handed out."""
        self.step.begin(samples, now_s)
        self._count(samples)

    def stepped(self, samples: int, now_s: float) -> None:
        """Note that a step has ended, in a loop that tells of steps when they are over."""
        self.step.ended(samples, now_s)
        self._count(samples)

    def _count(self, samples: int) -> None:
        self.samples += samples
        self.left = max(self.left - samples, 0)
        self.evaluated = False


def batch_size_of(loader: Any, batch: Any) -> int:
    """Return the number of samples in a batch; 0 where neither the batch nor the loader shows it.

    Gradient accumulation goes through smaller batches than the job's; so the batch counts, not the job.
    """
    sized = batch
    while isinstance(sized, list | tuple | Mapping) and sized:
        sized = next(iter(sized.values() if isinstance(sized, Mapping) else sized))
    shape: Any = getattr(sized, "shape", ())
    if len(shape) > 0:
        return int(shape[0])
    stated = getattr(loader, "batch_size", None)
    return stated if isinstance(stated, int) and stated > 0 else 0


def samples_in(loader: Any, batch_size: int) -> int:
    """Return how many samples a loader yields: its data set's size, or whole batches; 0 where it has no length."""
    dataset = getattr(loader, "dataset", None)
    known = []
    if dataset is not None and hasattr(dataset, "__len__"):
        known.append(len(dataset))
    with suppress(TypeError):  # it has no length, or its data set has none
        known.append(len(loader) * batch_size)
    return min(known, default=0)
