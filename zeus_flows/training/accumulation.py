"""How an attempt's batches are taken in parts, where they do not fit the GPUs' memory."""

from __future__ import annotations

from dataclasses import dataclass

from zeus_flows.errors import TrainingError


@dataclass(slots=True)
class Accumulation:
    """Gradient accumulation as the job decided it.

    Attributes:
        micro_batch_size: Samples that go through the GPUs at once, over all of them.
        steps: Micro-batches whose gradients are added up to an optimizer step.
        wanted: Whether the job file says `accumulate: true`: then the training has to follow it.
        heeded: Whether the training asked.
    """

    micro_batch_size: int
    steps: int
    wanted: bool
    heeded: bool = False

    @classmethod
    def of(cls, batch_size: int, micro: int, *, wanted: bool) -> Accumulation:
        """Return how a batch size is taken in micro-batches."""
        return cls(micro, batch_size // micro, wanted)

    def check(self) -> None:
        """Make sure that the training follows.

        Raises:
            TrainingError: it never asked: what does not fit would not fit in parts either, or would train wrongly.
        """
        if self.wanted and not self.heeded:
            raise TrainingError(
                "the job file says `accumulate: true`, and the training never asked what goes through at once: give "
                "its loader session.micro_batch_size, and let the optimizer step after session.accumulation_steps "
                "batches; or leave `accumulate` out"
            )
