"""One recurrence: decide, train, observe; again at another batch size where an attempt did not converge.

A drift gate, where the job has one, is asked before that whether anything needs to be trained.

No Prefect in here: production (`zeus_flows.orchestration`) and trace replay (`zeus_flows.experiments`) share this loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from zeus_flows.core import policy
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.early_stop import NoCut
from zeus_flows.core.gate import GateCheck, Question
from zeus_flows.core.observer import tried_batch_sizes
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.records import (
    Ask,
    Decision,
    EnergySource,
    Gpu,
    Job,
    Mode,
    Observation,
    Outcome,
    PowerProfile,
    Reason,
    decision_seed,
)
from zeus_flows.errors import StoreError, StoreUnavailable
from zeus_flows.ledger.points import reached
from zeus_flows.ledger.protocol import EpochReport, Ledger
from zeus_flows.training.gate import Gate
from zeus_flows.training.trainer import AttemptFailed

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
    ) -> Observation:
        """Train as decided.

        Args:
            job: The job as decisions see it.
            decision: What to train, and when to stop.
            profile: What earlier attempts measured at this batch size.
            report: Called with every epoch.
            overheads: What is known of an epoch beside its steps.
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
        """Whether its last attempt reached the target, or the model there is still does."""
        return self.skipped or self.attempts[-1][1].converged

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

    def gate(self, recurrence: int) -> GateCheck | None:
        """Ask the drift gate whether anything needs to be trained; None where there is none to ask."""

    def decide(self, recurrence: int, earlier: tuple[Observation, ...]) -> Attempt:
        """Choose a batch size and write the decision."""

    def train(self, attempt: Attempt) -> Observation:
        """Train it."""

    def observe(self, attempt: Attempt, observation: Observation) -> None:
        """Write how it went."""

    def end(self, recurrence: int, observations: tuple[Observation, ...]) -> None:
        """Write the recurrence as a whole; without observations where it broke off."""


class LocalSteps:
    """The steps over a ledger and a trainer.

    Args:
        job: What recurs, with the objective that the trainer's GPUs allow (`JobFile.core`).
        ledger: Where decisions and observations go.
        trainer: What trains.
        context: Tags for the attempts' runs, such as links to the flow run.
        gate: The job's drift gate; None: every recurrence trains, as in a job that is off.
        learning_rate: Returns the learning rate of a batch size, to be written with the decision.
    """

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        trainer: Trainer,
        context: Mapping[str, str] | None = None,
        gate: Gate | None = None,
        learning_rate: Callable[[int], float] | None = None,
    ) -> None:
        self._learning_rate = learning_rate
        self.job, self.ledger, self.trainer = job, ledger, trainer
        self._context = {"zf.gpu": trainer.gpu.key} | dict(context or {})
        self._gate = None if job.mode is Mode.OFF else gate

    def begin(self) -> int:
        """Take the next recurrence number."""
        return self.ledger.begin()

    @property
    def has_gate(self) -> bool:
        """Whether a drift gate may be asked."""
        return self._gate is not None

    def gate(self, recurrence: int) -> GateCheck | None:
        """Ask the drift gate about the newest model that counts, where there is one; write what it found.

        A model of another fingerprint or from before a reset does not count. Where MLflow is away or refuses, training
        is the safe side.
        """
        if self._gate is None:
            return None
        history = self.ledger.history()
        if history.degraded or history.state.newest_model is None:
            return None
        try:
            check_id = self.ledger.asked(recurrence, self._context)
        except StoreError as error:
            log.warning("recurrence %d trains without asking its drift gate: %s", recurrence, error)
            return None
        reached("after-ask")
        question = Question(recurrence, *history.state.newest_model)
        try:
            check = self._gate.check(question, self.job.mode)
        except BaseException as order:  # to stop: the gate's run must not look as if it went on
            with suppress(StoreError):
                self.ledger.gated(check_id, self._gate.broken(question, order))
            raise
        reached("after-check")
        try:
            self.ledger.gated(check_id, check)
        except StoreError as error:
            log.warning("recurrence %d trains: what its drift gate found was refused: %s", recurrence, error)
            return None
        return check

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
                in_flight=tuple([f for f in history.in_flight if f.recurrence != recurrence]),
                tried=tuple([observation.batch_size for observation in earlier]),
                power_limits_w=self.trainer.power_limits_w,
                out_of_memory=tuple([o.batch_size for o in earlier if o.outcome is Outcome.OUT_OF_MEMORY]),
                under_way=tuple([r for r in history.under_way if r != recurrence]),
            ),
        )
        if history.degraded:
            decision = stand_in(self.job, decision)
        reached("after-decide")
        context = self._context
        if self._learning_rate is not None:
            context = {**context, "zf.learning_rate": f"{self._learning_rate(decision.batch_size):g}"}
        attempt_id = self.ledger.decided(decision, context)
        reached("after-decided")
        state, gpu = history.state, self.trainer.gpu
        overheads, _ = state.overheads_of(self.job, decision.batch_size, gpu.key)
        return Attempt(attempt_id, decision, state.profile(decision.batch_size, gpu), overheads)

    def train(self, attempt: Attempt) -> Observation:
        """Train the attempt. One that breaks is observed as failed before its exception goes on."""
        try:
            return self.try_once(attempt)
        except AttemptFailed as failure:
            self.failed(attempt, failure)

    def try_once(self, attempt: Attempt) -> Observation:
        """Train the attempt once.

        Raises:
            AttemptFailed: the train function broke, and nothing was written about it yet: it may be tried again.
                What is no error but an order to stop (a signal) is observed and goes on as it is.
        """

        def report(epoch: EpochReport) -> None:
            self.ledger.epoch(attempt.id, epoch)

        try:
            observation = self.trainer.train(
                self.job, attempt.decision, attempt.profile, report, overheads=attempt.overheads
            )
        except AttemptFailed as failure:
            if isinstance(failure.__cause__, Exception):
                raise
            self.failed(attempt, failure)
        return self._with_what_was_tried(observation)

    def failed(self, attempt: Attempt, failure: AttemptFailed) -> NoReturn:
        """Write that the attempt failed and let its exception go on."""
        self.ledger.observed(attempt.id, failure.observation)
        cause = failure.__cause__
        assert cause is not None
        raise cause from None

    def _with_what_was_tried(self, observation: Observation) -> Observation:
        """Let an observer's report name the batch sizes that were tried before, with their doubt."""
        if self.job.mode is not Mode.OBSERVE:
            return observation
        try:
            before = self.ledger.observations()
        except StoreUnavailable:  # the report can do without; the observation cannot be lost for it
            return observation
        tried = tried_batch_sizes(self.job, (*before, observation))
        return replace(observation, detail="; ".join((observation.detail, *(t.sentence for t in tried))))

    def observe(self, attempt: Attempt, observation: Observation) -> None:
        """Write how it went."""
        self.ledger.observed(attempt.id, observation)

    def end(self, recurrence: int, observations: tuple[Observation, ...]) -> None:
        """Write the recurrence's end and its point of the series."""
        self.ledger.ended(recurrence, observations)


def stand_in(job: Job, decision: Decision) -> Decision:
    """Return the decision for a recurrence whose history could not be read: the default batch size, uncut."""
    text = f"MLflow did not answer: the default batch size {job.default_batch_size} stands in"
    return replace(
        decision,
        batch_size=job.default_batch_size,
        reason=Reason("degraded", text),
        cut=NoCut(),
        explores=False,
        degraded=True,
    )


def run_recurrence(job: Job, steps: Steps) -> Recurrence:
    """Run one recurrence to its end: attempts until one converges or `job.max_attempts` have not.

    None where the drift gate finds that the model there is will do.

    Where the batch size may not change there is nothing else to try: one attempt. Batch sizes that do not fit the GPU
    do not count: smaller ones follow, while there are any.
    """
    number = steps.begin()
    reached("after-begin")
    attempts: list[Attempt] = []
    observations: list[Observation] = []
    left = job.max_attempts if job.mode is Mode.FULL and len(job.batch_sizes) > 1 else 1
    try:
        check = steps.gate(number)
        if check is not None and check.skips:
            return Recurrence(number, (), check)
        while left:
            attempt = steps.decide(number, tuple(observations))
            observation = steps.train(attempt)
            reached("after-train")
            steps.observe(attempt, observation)
            reached("after-observe")
            attempts.append(attempt)
            observations.append(observation)
            if observation.converged or (
                observation.outcome is Outcome.OUT_OF_MEMORY and not _smaller(job, observation)
            ):
                break
            left -= observation.outcome is not Outcome.OUT_OF_MEMORY
    except BaseException:
        steps.end(number, ())
        raise
    steps.end(number, tuple(observations))
    return Recurrence(number, tuple(zip(attempts, observations, strict=True)), check)


def _smaller(job: Job, observation: Observation) -> bool:
    """Return whether there are smaller batch sizes to try after one that ran out of memory."""
    return job.mode is Mode.FULL and observation.batch_size > job.batch_sizes[0]
