"""One recurrence: decide, train, observe; again at another batch size where an attempt did not converge.

A drift gate, where the job has one, is asked before that whether anything needs to be trained.

No Prefect in here: production (`zeus_flows.orchestration`) and trace replay (`zeus_flows.experiments`) share this loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.micro_batch import least
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power_profile import Gpu, PowerProfile
from zeus_flows.core.records import Decision, EnergySource, Observation, Outcome
from zeus_flows.core.rollout import in_force
from zeus_flows.killpoints import reached

log = logging.getLogger(__name__)


class Trainer(Protocol):
    """What trains an attempt: a train function in production, a trace in replay."""

    @property
    def gpu(self) -> Gpu:
        """What it trains on; known before the decision."""

    @property
    def energy_source(self) -> EnergySource:
        """Where its joules come from."""

    @property
    def power_limits_w(self) -> tuple[float, ...]:
        """The power limits the GPUs offer, each; greatest first."""

    def train(
        self,
        job: Job,
        decision: Decision,
        profile: PowerProfile | None,
        report: Callable[[EpochReport], None],
        *,
        overheads: Overheads = NOTHING,
        attempt_id: str = "",
    ) -> Observation:
        """Train as decided.

        Args:
            job: The job as decisions see it.
            decision: What to train, and when to stop.
            profile: What earlier attempts measured at this batch size.
            report: Called with every epoch.
            overheads: What is known of an epoch beside its steps.
            attempt_id: What the ledger calls the attempt.
        """


@dataclass(frozen=True, slots=True)
class Attempt:
    """A decision that has been written, with what training it needs."""

    id: str
    decision: Decision
    profile: PowerProfile | None = None
    overheads: Overheads = NOTHING


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurrence that has ended.

    Attributes:
        number: Which.
        attempts: Its attempts, each with how it went; none where it was skipped.
        check: What its drift gate found; None where none was asked.
    """

    number: int
    attempts: tuple[tuple[Attempt, Observation], ...]
    check: GateCheck | None = None

    @property
    def skipped(self) -> bool:
        """Whether its drift gate found that nothing needs to be trained."""
        return self.check is not None and self.check.skips

    @property
    def converged(self) -> bool:
        """Whether its last attempt reached the target, or it was skipped because the newest model still does."""
        return self.skipped or self.attempts[-1][1].converged

    @property
    def energy_j(self) -> float:
        """Energy of all its attempts."""
        return sum(observation.energy_j for _, observation in self.attempts)

    @property
    def host_energy_j(self) -> float:
        """What the machine drew beside its GPUs meanwhile."""
        return sum(observation.host_energy_j for _, observation in self.attempts)

    @property
    def time_s(self) -> float:
        """Training time of all its attempts."""
        return sum(observation.time_s for _, observation in self.attempts)

    def cost_j(self, job: Job) -> float:
        """Cost of all its attempts, by the job's objective."""
        return sum(observed_cost(job, observation) for _, observation in self.attempts)


class Steps(Protocol):
    """The steps of a recurrence; Prefect wraps those that take long in tasks."""

    def begin(self) -> int:
        """Take the next recurrence number."""

    def gate(self, recurrence: int) -> GateCheck | None:
        """Ask the drift gate whether training is needed; None where the job has no gate."""

    def decide(self, recurrence: int, earlier: tuple[Observation, ...]) -> Attempt:
        """Choose a batch size and write the decision."""

    def train(self, attempt: Attempt) -> Observation:
        """Train it."""

    def observe(self, attempt: Attempt, observation: Observation) -> None:
        """Write how it went."""

    def end(self, recurrence: int, observations: tuple[Observation, ...]) -> None:
        """Write the recurrence as a whole; without observations where it broke off."""


def run_recurrence(job: Job, steps: Steps) -> Recurrence:
    """Run one recurrence to its end: attempts until one converges or `job.max_attempts` have not.

    None where the drift gate finds that the model there is will do.

    Where the batch size may not change there is nothing else to try: one attempt. Batch sizes that do not fit the GPU
    do not count: smaller micro-batches follow where the job accumulates gradients, else smaller batch sizes, while
    there are any.
    """
    number = steps.begin()
    job = in_force(job, number)
    reached("after-begin")
    attempts: list[Attempt] = []
    observations: list[Observation] = []
    try:
        check = steps.gate(number)
        if check is not None and check.skips:
            return Recurrence(number, (), check)
        while not observations or another_follows(job, observations):
            attempt = steps.decide(number, tuple(observations))
            observation = steps.train(attempt)
            reached("after-train")
            steps.observe(attempt, observation)
            reached("after-observe")
            attempts.append(attempt)
            observations.append(observation)
    except BaseException:
        steps.end(number, ())
        raise
    steps.end(number, tuple(observations))
    return Recurrence(number, tuple(zip(attempts, observations, strict=True)), check)


def another_follows(job: Job, observations: Sequence[Observation]) -> bool:
    """Return whether a recurrence, with the job as it is in force, makes another attempt after those observed."""
    last = observations[-1]
    if last.converged or (last.outcome is Outcome.OUT_OF_MEMORY and not _smaller(job, last)):
        return False
    most = job.max_attempts if job.mode is Mode.FULL and len(job.batch_sizes) > 1 else 1
    return sum(o.outcome is not Outcome.OUT_OF_MEMORY for o in observations) < most


def _smaller(job: Job, observation: Observation) -> bool:
    """Return whether there are smaller batch sizes, or micro-batches, to try after one that ran out of memory."""
    if job.accumulate:
        arms = job.batch_sizes if job.mode is Mode.FULL else (observation.batch_size,)
        return any(least(b, observation.gpu.count) < observation.micro for b in arms)
    return job.mode is Mode.FULL and observation.batch_size > job.batch_sizes[0]
