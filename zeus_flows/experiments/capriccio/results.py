"""What a contender made of a slice."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from zeus_flows.core.cost import observed_cost
from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import Knob
from zeus_flows.core.records import Observation, decision_seed
from zeus_flows.experiments.capriccio.curves import Curves
from zeus_flows.experiments.capriccio.models import Scores
from zeus_flows.ledger.mlflow import names


@dataclass(frozen=True, slots=True)
class SliceOutcome:
    """A slice's recurrence: all attempts together, and the scores the last one ended with.

    `scores` is None where the attempt trained on a real GPU in a process that is gone.
    """

    number: int
    batch_sizes: tuple[int, ...]
    energy_j: float
    time_s: float
    cost_j: float
    converged: bool
    epochs: int
    explored: bool
    power_limit_w: float | None = None
    scores: Scores | None = None

    @property
    def batch_size(self) -> int:
        """The batch size of the last attempt."""
        return self.batch_sizes[-1]

    def measures(self) -> dict[str, float | None]:
        """Return it as metrics, by the names that they have before that of the contender."""
        values: dict[str, float | None] = {
            names.COST_J: self.cost_j,
            names.ENERGY_TO_ACCURACY_J: self.energy_j,
            names.TIME_TO_ACCURACY_S: self.time_s,
            names.BATCH_SIZE: float(self.batch_size),
            names.POWER_LIMIT_W: self.power_limit_w,
            names.EPOCHS: float(self.epochs),
            names.ATTEMPTS: float(len(self.batch_sizes)),
            names.CONVERGED: float(self.converged),
        }
        if self.scores is not None:
            values |= self.scores._asdict()
        return values


def outcomes(job: Job, observations: tuple[Observation, ...], curves: Curves) -> dict[int, SliceOutcome]:
    """Return what a contender made of each slice, by the slice's number."""
    ordered = sorted(observations, key=lambda o: o.order)
    return {
        number: _outcome(job, list(group), curves) for number, group in groupby(ordered, key=lambda o: o.recurrence)
    }


def _outcome(job: Job, attempts: list[Observation], curves: Curves) -> SliceOutcome:
    last = attempts[-1]
    seed = decision_seed(job.seed, last.recurrence, last.attempt) % 2**31  # as the session has it
    return SliceOutcome(
        number=last.recurrence,
        batch_sizes=tuple(o.batch_size for o in attempts),
        energy_j=sum(o.energy_j for o in attempts),
        time_s=sum(o.time_s for o in attempts),
        cost_j=sum(observed_cost(job, o) for o in attempts),
        converged=last.converged,
        epochs=last.epochs,
        explored=any(o.explores for o in attempts),
        power_limit_w=last.setting if last.knob is Knob.POWER_LIMIT else None,
        scores=curves.scores(last.recurrence, last.batch_size, seed, last.epochs),
    )
