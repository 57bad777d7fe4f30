"""What an attempt is to train, and what an epoch of it costs."""

from __future__ import annotations

from dataclasses import dataclass

from zeus_flows.core.cost import price
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import Overheads
from zeus_flows.core.power import epoch_cost
from zeus_flows.core.power_profile import PowerProfile
from zeus_flows.core.records import Decision
from zeus_flows.training.accumulation import Accumulation
from zeus_flows.training.checkpoint import Progress


@dataclass(frozen=True, slots=True)
class AttemptTask:
    """What to train, with what is known of it beforehand.

    Attributes:
        job: The job as decisions see it.
        decision: What was decided.
        overheads: What is known of an epoch beside its steps, from earlier attempts.
        stops_at_target: Whether training ends where the target is reached.
        max_power_w: What the GPUs could draw together.
        accumulation: What of a batch goes through at once.
    """

    job: Job
    decision: Decision
    overheads: Overheads
    stops_at_target: bool
    max_power_w: float
    accumulation: Accumulation

    def overheads_with(self, books: Progress) -> Overheads:
        """Return what an epoch takes beside its steps, by earlier attempts and this one."""
        return self.overheads.add(books.parts) if books.epoch else self.overheads

    def epoch_cost(self, books: Progress, profile: PowerProfile | None, samples_per_epoch: int) -> float | None:
        """Return EpochCost(b) by the profile; by the epochs so far while it is incomplete; None at first."""
        if profile and profile.complete:
            if not samples_per_epoch:
                return None
            overheads = self.overheads_with(books)
            return epoch_cost(self.job, profile, samples_per_epoch=samples_per_epoch, overheads=overheads)
        if not books.epoch:
            return None
        once = books.parts.once
        energy_j = max(books.energy_j + books.host_energy_j - once.energy_j, 0.0)
        return self._price(energy_j, max(books.time_s - once.time_s, 0.0)) / books.epoch or None

    def once_cost(self, books: Progress) -> float:
        """Return what the attempt cost before its first step."""
        once = books.parts.once
        return self._price(once.energy_j + self.overheads.host_w * once.time_s, once.time_s)

    def _price(self, energy_j: float, time_s: float) -> float:
        return price(self.job, self.max_power_w).of(energy_j, time_s)
