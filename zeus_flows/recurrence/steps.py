"""The steps of a recurrence over a ledger and a trainer: what production and replay do alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import NoReturn, Protocol

from zeus_flows.core import policy
from zeus_flows.core.attempt import AttemptFailed, EpochReport
from zeus_flows.core.drift_windows import Boundary, Cause, boundary
from zeus_flows.core.early_stop import NoCut
from zeus_flows.core.gate import GateCheck, Question
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.observer import tried_batch_sizes
from zeus_flows.core.promotion import Version
from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.records import Ask, Decision, Observation, Outcome, decision_seed, in_parts
from zeus_flows.core.rollout import in_force
from zeus_flows.ending import OpenFiles
from zeus_flows.errors import StoreError
from zeus_flows.killpoints import reached
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.protocol import History, Ledger
from zeus_flows.recurrence.loop import Attempt, Trainer

log = logging.getLogger(__name__)


class DriftGate(Protocol):
    """Asks whether the newest model still meets the target; `zeus_flows.training.gate.Gate` runs a function for it."""

    def check(self, question: Question, mode: Mode) -> GateCheck:
        """Evaluate the newest model."""

    def broken(self, question: Question, error: BaseException) -> GateCheck:
        """Return the record of an evaluation that an exception ended."""


class LocalSteps:
    """The steps over a ledger and a trainer.

    Args:
        job: What recurs, with the objective that the trainer's GPUs allow (`JobFile.core`).
        ledger: Where decisions and observations go.
        trainer: What trains.
        context: Tags for the attempts' runs, such as links to the flow run.
        gate: The job's drift gate; None: every recurrence trains, as in a job that is off.
        learning_rate: Returns the learning rate of a batch size, to be written with the decision.
        champion: Returns the version of the job's model that is in use; None where there is none.
        seconds_left: Reads the clock: how long until the model must be ready; None where the job has no such time.
    """

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        trainer: Trainer,
        context: Mapping[str, str] | None = None,
        gate: DriftGate | None = None,
        learning_rate: Callable[[int], float] | None = None,
        seconds_left: Callable[[], float] | None = None,
        champion: Callable[[], Version | None] = lambda: None,
    ) -> None:
        self._learning_rate, self._seconds_left, self._champion = learning_rate, seconds_left, champion
        self._decided_on = self._began_on = policy.initial(job)
        self.job, self.ledger, self.trainer = job, ledger, trainer
        self._context = {names.GPU: trainer.gpu.key} | dict(context or {})
        self._gate = None if job.mode is Mode.OFF else gate

    def begin(self) -> int:
        """Take the next recurrence number."""
        return self.ledger.begin()

    def note(self, tags: Mapping[str, str]) -> None:
        """Take tags for the runs of the attempts to come, beside those there are."""
        self._context |= dict(tags)

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
        question = self._question(recurrence, history.state.newest_model)
        try:
            check = self._gate.check(question, in_force(self.job, recurrence).mode)
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

    def _question(self, recurrence: int, newest: tuple[int, int, int]) -> Question:
        """Return what the gate is asked: about the champion, where the job has one, else about the newest model."""
        champion = self._champion()
        if champion is None:
            return Question(recurrence, *newest)
        return Question(recurrence, *champion.order, champion.batch_size, champion.uri, last_trained=newest[0])

    def decide(self, recurrence: int, earlier: tuple[Observation, ...]) -> Attempt:
        """Choose a batch size from the history and write the decision."""
        history = self.ledger.history()
        seconds_left = None if self._seconds_left is None else round(self._seconds_left(), 1)
        decision = policy.decide(
            self.job, history.state, asking(self.job, history, recurrence, earlier, self.trainer, seconds_left)
        )
        if history.degraded:
            decision = stand_in(self.job, decision)
        reached("after-decide")
        context = self._context
        if self._learning_rate is not None:
            context = {**context, names.LEARNING_RATE: f"{self._learning_rate(decision.batch_size):g}"}
        attempt_id = self.ledger.decided(decision, context)
        reached("after-decided")
        state, gpu = history.state, self.trainer.gpu
        self._decided_on = state
        if not earlier:
            self._began_on = state
        overheads, _ = state.overheads_of(self.job, decision.batch_size, gpu.key)
        return Attempt(attempt_id, decision, state.profile(decision.batch_size, gpu, decision.micro), overheads)

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

        files = OpenFiles()
        try:
            observation = self.trainer.train(
                in_force(self.job, attempt.decision.recurrence),
                attempt.decision,
                attempt.profile,
                report,
                overheads=attempt.overheads,
                attempt_id=attempt.id,
            )
        except AttemptFailed as failure:
            if isinstance(failure.__cause__, Exception):
                raise
            self.failed(attempt, failure)
        observation = self._with_what_was_tried(observation)
        if files.were_closed():  # by training, and whoever is asked next may wait for an answer for ever
            self.ledger.observed(attempt.id, observation)
        files.close()
        return observation

    def failed(self, attempt: Attempt, failure: AttemptFailed) -> NoReturn:
        """Write that the attempt failed and let its exception go on."""
        self.ledger.observed(attempt.id, failure.observation)
        cause = failure.__cause__
        assert cause is not None
        raise cause from None

    def _with_what_was_tried(self, observation: Observation) -> Observation:
        """Let an observer's report name the batch sizes that were tried before, with their doubt."""
        job = in_force(self.job, observation.recurrence)
        if job.mode is not Mode.OBSERVE:
            return observation
        tried = tried_batch_sizes(job, policy.advance(self.job, self._decided_on, observation))
        return replace(observation, detail="; ".join((observation.detail, *(t.sentence for t in tried))))

    def observe(self, attempt: Attempt, observation: Observation) -> None:
        """Write how it went."""
        self.ledger.observed(attempt.id, observation)

    def learnt(self, observations: tuple[Observation, ...]) -> policy.State:
        """Return what was known when the recurrence began, with its observations."""
        after = self._began_on
        for observation in observations:
            after = policy.advance(self.job, after, observation)
        return after

    def drift(self, observations: tuple[Observation, ...]) -> Boundary | None:
        """Return the drift that a recurrence's observations show, by what was known when it began; None: none."""
        after = self.learnt(observations)
        found = boundary(self.job, self._began_on, after, observations, recurrences=0) if observations else None
        return found if found is not None and found.kind is Cause.DRIFT else None

    def end(self, recurrence: int, observations: tuple[Observation, ...]) -> None:
        """Write the recurrence's end and its point of the series."""
        self.ledger.ended(recurrence, observations)


def asking(
    job: Job,
    history: History,
    recurrence: int,
    earlier: tuple[Observation, ...],
    trainer: Trainer,
    seconds_left: float | None = None,
) -> Ask:
    """Return what is asked before the attempt of a recurrence that follows its `earlier` ones."""
    attempt = len(earlier) + 1
    return Ask(
        recurrence=recurrence,
        attempt=attempt,
        seed=decision_seed(job.seed, recurrence, attempt),
        gpu=trainer.gpu,
        in_flight=tuple([f for f in history.in_flight if f.recurrence != recurrence]),
        tried=tuple([observation.batch_size for observation in earlier]),
        power_limits_w=trainer.power_limits_w,
        out_of_memory=tuple([o.micro for o in earlier if o.outcome is Outcome.OUT_OF_MEMORY]),
        under_way=tuple([r for r in history.under_way if r != recurrence]),
        ran_out=len(list(takewhile(lambda o: o.outcome is Outcome.OUT_OF_MEMORY, reversed(earlier)))),
        seconds_left=seconds_left,
    )


def stand_in(job: Job, decision: Decision) -> Decision:
    """Return the decision for a recurrence whose history could not be read: the default batch size, uncut.

    After an attempt that ran out of memory what was decided stays: the default would run out of it again.
    """
    ran_out = decision.asked is not None and bool(decision.asked.out_of_memory)
    batch_size = decision.batch_size if ran_out else job.default_batch_size
    text = f"MLflow did not answer: the default batch size {job.default_batch_size} stands in"
    if ran_out:
        text = f"MLflow did not answer, and memory ran out: batch size {in_parts(decision)} stands in"
    return replace(
        decision,
        batch_size=batch_size,
        micro_batch_size=decision.micro_batch_size if ran_out else None,
        reason=Reason(ReasonKind.DEGRADED, text),
        cut=NoCut(),
        explores=False,
        degraded=True,
    )
