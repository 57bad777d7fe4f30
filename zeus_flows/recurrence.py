"""One recurrence: decide, train, observe; again at another batch size where an attempt did not converge.

No Prefect in here: production (`zeus_flows.orchestration`) and trace replay (`zeus_flows.experiments`) share this loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from zeus_flows.core import policy
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.records import (
    Ask,
    Decision,
    EnergySource,
    Gpu,
    Job,
    Mode,
    Observation,
    PowerProfile,
    Selector,
    decision_seed,
)
from zeus_flows.ledger.protocol import EpochReport, Ledger
from zeus_flows.training.trainer import AttemptFailed


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
        self, job: Job, decision: Decision, profile: PowerProfile | None, report: Callable[[EpochReport], None]
    ) -> Observation:
        """Train as decided. `profile` is what earlier attempts measured at this batch size."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A decision that has been written, with what training it needs."""

    id: str
    decision: Decision
    profile: PowerProfile | None = None


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurrence that has ended."""

    number: int
    attempts: tuple[tuple[Attempt, Observation], ...]

    @property
    def converged(self) -> bool:
        """Whether its last attempt reached the target."""
        return self.attempts[-1][1].converged

    @property
    def energy_j(self) -> float:
        """Energy of all its attempts."""
        return sum(observation.energy_j for _, observation in self.attempts)

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

    def decide(self, recurrence: int, earlier: tuple[Observation, ...]) -> Attempt:
        """Choose a batch size and write the decision."""

    def train(self, attempt: Attempt) -> Observation:
        """Train it."""

    def observe(self, attempt: Attempt, observation: Observation) -> None:
        """Write how it went."""

    def end(self, recurrence: Recurrence) -> None:
        """Write the recurrence as a whole."""


class LocalSteps:
    """The steps over a ledger and a trainer.

    Args:
        job: What recurs. Where the trainer's joules mean nothing, its objective becomes time.
        ledger: Where decisions and observations go.
        trainer: What trains.
        context: Tags for the attempts' runs, such as links to the flow run.
    """

    def __init__(self, job: Job, ledger: Ledger, trainer: Trainer, context: Mapping[str, str] | None = None) -> None:
        if trainer.energy_source is EnergySource.NONE:
            job = replace(job, selector=Selector.TIME)
        self.job, self.ledger, self.trainer = job, ledger, trainer
        self._context = {"zf.gpu": trainer.gpu.key} | dict(context or {})

    def begin(self) -> int:
        """Take the next recurrence number."""
        return self.ledger.begin()

    def decide(self, recurrence: int, earlier: tuple[Observation, ...]) -> Attempt:
        """Choose a batch size from the history and write the decision."""
        history = self.ledger.history()
        attempt = len(earlier) + 1
        decision = policy.decide(
            self.job,
            history.state,
            Ask(
                recurrence=recurrence,
                attempt=attempt,
                seed=decision_seed(self.job.seed, recurrence, attempt),
                gpu=self.trainer.gpu,
                in_flight=tuple(f for f in history.in_flight if f.recurrence != recurrence),
                tried=tuple(observation.batch_size for observation in earlier),
                power_limits_w=self.trainer.power_limits_w,
            ),
        )
        attempt_id = self.ledger.decided(decision, self._context)
        return Attempt(attempt_id, decision, history.state.profile(decision.batch_size, self.trainer.gpu))

    def train(self, attempt: Attempt) -> Observation:
        """Train the attempt. One that breaks is observed as failed before its exception goes on."""

        def report(epoch: EpochReport) -> None:
            self.ledger.epoch(attempt.id, epoch)

        try:
            return self.trainer.train(self.job, attempt.decision, attempt.profile, report)
        except AttemptFailed as failure:
            self.ledger.observed(attempt.id, failure.observation)
            cause = failure.__cause__
            assert cause is not None
            raise cause from None

    def observe(self, attempt: Attempt, observation: Observation) -> None:
        """Write how it went."""
        self.ledger.observed(attempt.id, observation)

    def end(self, recurrence: Recurrence) -> None:
        """Write the recurrence's point of the series."""
        self.ledger.ended([observation for _, observation in recurrence.attempts])


def run_recurrence(job: Job, steps: Steps) -> Recurrence:
    """Run one recurrence to its end: attempts until one converges or `job.max_attempts` have not.

    Where the batch size may not change there is nothing else to try: one attempt.
    """
    number = steps.begin()
    done: list[tuple[Attempt, Observation]] = []
    for _ in range(job.max_attempts if job.mode is Mode.FULL else 1):
        attempt = steps.decide(number, tuple(observation for _, observation in done))
        observation = steps.train(attempt)
        steps.observe(attempt, observation)
        done.append((attempt, observation))
        if observation.converged:
            break
    recurrence = Recurrence(number, tuple(done))
    steps.end(recurrence)
    return recurrence
