"""The session that a train function receives: it profiles, sets the power limit, measures and stops.

def train(session, **parameters):
    model = build(session.learning_rate)
    loader = DataLoader(data, batch_size=session.batch_size)
    if (saved := session.load()) is not None:           # a retry goes on from here; optional
        model.load_state_dict(saved["model"])
    for epoch in session.epochs():                      # may stop early
        for batch in session.steps(loader):
            learn(model, batch)
        session.report_metric(evaluate(model))
        session.save({"model": model.state_dict()})     # optional
    if session.converged:                               # not where the attempt was stopped
        publish(model)

What lies between the last step and `report_metric` is taken for an evaluation. One that happens elsewhere, every n
steps say, is put into `with session.evaluation():`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.cost import price
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.observer import would_have_saved
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power import epoch_cost
from zeus_flows.core.power_profile import PowerProfile
from zeus_flows.core.records import Decision, Observation, Outcome
from zeus_flows.errors import TrainingError
from zeus_flows.gpu.group import Gpus
from zeus_flows.job_file import JobFile
from zeus_flows.training.books import Books, Curve, For
from zeus_flows.training.checkpoint import Checkpoints, Progress
from zeus_flows.training.limit_tuner import LimitTuner
from zeus_flows.training.profiler import LEAST_S
from zeus_flows.training.stopper import Stopper
from zeus_flows.training.training_loop import TrainingLoop, batch_size_of, samples_in

log = logging.getLogger(__name__)
Batch = TypeVar("Batch")

_current: ContextVar[Session | None] = ContextVar("zeus_flows_session", default=None)


def current_session() -> Session | None:
    """Return the session of the train function that runs now; None outside of one."""
    return _current.get()


class Session:
    """One attempt, from the side of the training loop.

    Args:
        job_file: The job as its user wrote it.
        job: The job as decisions see it.
        decision: What to train, and when to stop.
        gpus: What to train on.
        known_profile: What earlier attempts measured at this batch size.
        overheads: What is known of an epoch beside its steps, from this batch size or others.
        report: Called with every epoch.
        checkpoints: What an earlier try of this attempt left; None: nothing is kept.
        made_with: Major versions that a profile depends on.
        least_span_s: What the sensor needs to measure a power limit.
        host_energy_j: Reads the machine's own energy counter, where its energy is measured.

    Attributes:
        batch_size: The batch size to train with.
        learning_rate: The learning rate for it, by the job file's rule.
        recurrence: Number of the recurrence, from 1: which slice of the data it is about.
        attempt: Number of the attempt within the recurrence, from 1.
        seed: For the train function's own randomness; differs between attempts.
        target: The metric, and when it is good enough.
        max_epochs: Epochs an attempt trains at most.
    """

    def __init__(
        self,
        job_file: JobFile,
        job: Job,
        decision: Decision,
        gpus: Gpus,
        *,
        known_profile: PowerProfile | None = None,
        overheads: Overheads = NOTHING,
        report: Callable[[EpochReport], None] = lambda _: None,
        checkpoints: Checkpoints | None = None,
        made_with: str = "",
        least_span_s: float = LEAST_S,
        host_energy_j: Callable[[], float] | None = None,
    ) -> None:
        self.batch_size = decision.batch_size
        self.learning_rate = job_file.learning_rate.at(decision.batch_size, job_file.default_batch_size)
        self.recurrence, self.attempt = decision.recurrence, decision.attempt
        self.seed = decision.seed % 2**31
        self.target, self.max_epochs = job_file.target, job.max_epochs
        if job.host_power_w and not overheads.host_w:
            overheads = replace(overheads, host_w=job.host_power_w)
        known = checkpoints.profile if checkpoints is not None and checkpoints.profile is not None else known_profile
        self._task = _Task(job, decision, overheads, job_file.stop_at_target)
        self._gpus = gpus
        self._out = _Out(report, checkpoints)
        self._tuner = tuner = LimitTuner(
            gpus,
            job_file.power_limit,
            job,
            decision,
            known=known,
            overheads=overheads,
            made_with=made_with,
            least_span_s=least_span_s,
        )
        self._books = Books(gpus, lambda: tuner.limit_w, host_w=job.host_power_w or 0.0, host_energy_j=host_energy_j)
        self._stopper = Stopper(job, decision.cut)
        self._loop = TrainingLoop()
        self._result = _Result(Curve(lower_is_better=self.target.better == "lower"))

    # -- what a train function calls -------------------------------------------------------------------------

    @property
    def outcome(self) -> Outcome | None:
        """How the attempt ended; None while it has not. Look at it after the loop, before a model is published."""
        return self._result.outcome

    @property
    def converged(self) -> bool:
        """Whether the target was reached. Where it is False after the loop, the model is not to be used."""
        return self._result.outcome is Outcome.CONVERGED or (
            self._result.outcome is None and self._result.reached is not None
        )

    @property
    def resumed_epoch(self) -> int:
        """The epoch that `load` went back to; 0 where training starts from the beginning."""
        return self._loop.resumed

    @property
    def training(self) -> bool:
        """Whether an epoch is under way."""
        return self._loop.begun and self._loop.epoch > 0 and self._result.ended is None and not self._loop.over

    def epochs(self) -> Iterator[int]:
        """Yield epoch numbers until the target, the cut or max_epochs ends the attempt.

        The first is 1, or the one after the checkpoint where `load` returned one.
        """
        loop = self._loop
        if loop.begun:
            raise TrainingError("session.epochs() can be used once per attempt")
        loop.begun = True
        self._tuner.begin()
        while self._result.outcome is None and not self._must_stop():
            loop.next_epoch()
            yield loop.epoch
            self._end_epoch()
        self._result.ended = self._progress()

    def steps(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a loader's batches; between them, profile power limits until that is done.

        A loop may stop asking at the last batch. A loader without a length is counted in the first epoch.
        """
        loop, step, books, tuner = self._loop, self._loop.step, self._books, self._tuner
        ran, now_s = self._gpus.ran, self._gpus.now_s
        if not loop.begun or loop.epoch == 0:
            raise TrainingError("session.steps() belongs inside `for epoch in session.epochs()`")
        self._leave_steps()
        mine, size = object(), 0
        try:
            for batch in loader:
                if loop.steps is not mine:
                    size = batch_size_of(loader, batch) or self.batch_size
                    self._enter_steps(mine, samples_in(loader, size))
                samples = min(size, loop.left) or size
                loop.left = max(loop.left - samples, 0)
                books.samples += samples
                ran(samples)
                loop.hand_out(samples, now_s())
                yield batch
                if step.samples:
                    step.samples = 0
                    if not step.first_done:
                        self._stepped_first(samples)
                    elif (measuring := tuner.measuring) is not None and measuring.ran(samples):
                        tuner.measured()
        except GeneratorExit:  # the train function left its loop early; or all is over, and the GPUs are not ours
            pass
        if loop.steps is mine and not loop.over:
            self._leave_steps()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Measure a block as an evaluation of the model. It may be inside the steps, for example after every 500."""
        loop = self._loop
        if not self.training or loop.evaluating:
            yield
            return
        inside = loop.steps
        if inside is None:
            self._books.close(For.REST)
        else:
            self._step_is_done()
            self._tuner.pause()
            self._books.close(For.STEPS)
        loop.evaluating = True
        try:
            yield
        finally:
            loop.evaluating = False
            if not loop.over:
                self._evaluated()
                if inside is not None and loop.steps is inside:
                    self._tuner.resume()

    def report_metric(self, value: float) -> None:
        """Tell how good the model is after this epoch. The job file says what is good enough."""
        value = float(value)
        loop, target = self._loop, self.target
        self._result.metric = loop.reported = value
        if self.training and not loop.evaluating and not loop.evaluated:
            self._look_back()
        self._result.curve.add(loop.epoch, value)
        if self._result.reached is not None:
            return
        if math.isnan(value) or (math.isinf(value) and target.reached(value)):
            name = "NaN" if math.isnan(value) else "infinite"
            self._end(Outcome.DIVERGED, f"{target.metric} is {name} in epoch {loop.epoch}")
        elif target.reached(value):
            self._result.detail = f"{target.metric} reached {value:.4g} in epoch {loop.epoch}"
            if self._task.stops_at_target:
                self._end(Outcome.CONVERGED, self._result.detail)
            else:
                self._result.reached = self._progress()

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a checkpoint at the end of an epoch. If this try fails, the next one continues from there.

        Args:
            state: Tensors, numbers, strings, and dicts and lists of them, such as `model.state_dict()`.
        """
        if self._out.checkpoints is None:
            return
        if not self._loop.begun:
            raise TrainingError("session.save() belongs inside `for epoch in session.epochs()`")
        if self._loop.steps is None:
            self._books.close(For.REST)
        saved = self._progress()
        rest = replace(saved.parts.rest, count=saved.epoch)  # the epoch ends with this
        saved = replace(saved, parts=replace(saved.parts, rest=rest), curve=self._result.curve.points)
        self._out.checkpoints.save(state, saved, self._result.reached)

    def load(self) -> dict[str, Any] | None:
        """Return the last checkpoint of an earlier try, on the CPU, and continue after it. None in the first try."""
        if self._loop.begun:
            raise TrainingError("session.load() belongs before `for epoch in session.epochs()`")
        if self._out.checkpoints is None or (state := self._out.checkpoints.load()) is None:
            return None
        before = self._out.checkpoints.progress
        assert before is not None
        self._books.go_on_after(before)
        for epoch, level in before.curve:
            self._result.curve.add(epoch, level)
        self._result.reached, self._result.metric = self._out.checkpoints.reached, before.metric
        self._loop.epoch = self._loop.resumed = before.epoch
        log.info("going on after epoch %d", before.epoch)
        return state

    # -- what the trainer calls ------------------------------------------------------------------------------

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Let `current_session` find this session until the block ends."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def close(self) -> None:
        """Leave the GPUs alone from now on: loops that are still open do not measure any more."""
        self._loop.over = True

    def observation(self) -> Observation:
        """Return how the attempt went.

        Raises:
            TrainingError: the train function never trained, or never reported a metric.
        """
        self.close()
        loop = self._loop
        if not loop.begun or (loop.epoch == 0 and self._result.outcome is None):
            raise TrainingError("the train function never looped over session.epochs()")
        if loop.epoch > loop.resumed and not self._books.samples:
            raise TrainingError(
                "the train function never used session.steps(), so nothing could be measured: "
                "write `for batch in session.steps(loader)` where it goes through its batches"
            )
        if self._result.metric is None and loop.epoch > 0 and self._result.outcome is not Outcome.STOPPED:
            raise TrainingError("the train function never called session.report_metric()")
        if self._result.outcome is None:
            if self._result.reached is not None:
                self._converged_on_the_way()
            else:
                self._end(Outcome.FAILED, "the train function left session.epochs() by itself")
        assert self._result.outcome is not None
        books = self._result.reached or self._result.ended or self._progress()
        observed = self._observation(self._result.outcome, self._result.detail, books)
        if self._task.job.mode is Mode.OBSERVE:
            observed = replace(observed, detail=f"{observed.detail}; {self._observer_report(observed)}")
        log.info("batch size %d %s: %s", self.batch_size, observed.outcome, observed.detail)
        return observed

    def failed(self, outcome: Outcome, detail: str, traceback: str = "") -> Observation:
        """Return the observation of an attempt that an exception ended."""
        self.close()
        self._result.outcome = outcome
        tuner = self._tuner
        books = self._books.upto(
            self._books.known(), self._loop.epoch, self._result.metric, tuner.profiling, tuner.profile
        )
        log.warning("batch size %d %s: %s", self.batch_size, outcome, detail)
        return replace(self._observation(outcome, detail, books), traceback=traceback)

    # -- steps and epochs --------------------------------------------------------------------------------------

    def _enter_steps(self, mine: object, samples_per_epoch: int) -> None:
        """Begin an epoch's steps: its first batch is there."""
        loop, tuner = self._loop, self._tuner
        self._books.close(For.REST if loop.step.first_done else For.ONCE)
        if not loop.step.first_done:
            self._books.begin_again()
        if not loop.total:
            loop.total, loop.counted = samples_per_epoch, samples_per_epoch > 0
            if loop.total:
                self._gpus.samples_per_epoch = loop.total
        loop.steps, loop.left, loop.step.handed_s = mine, loop.total, None
        tuner.samples_per_epoch = loop.total
        if loop.total or not self._gpus.simulated:  # a simulated GPU's clock stands still until the length is known
            tuner.resume()

    def _leave_steps(self) -> None:
        """End an epoch's steps: the loader has no more, or the train function does something else."""
        loop = self._loop
        if loop.steps is None:
            return
        loop.steps = None
        self._step_is_done()
        if not loop.total:
            self._gpus.samples_per_epoch = loop.samples
        self._tuner.pause()
        self._books.close(For.STEPS)

    def _step_is_done(self) -> None:
        """Count the step under way, where the train function has not asked for another."""
        loop, tuner = self._loop, self._tuner
        samples, loop.step.samples = loop.step.samples, 0
        if samples and not loop.step.first_done:
            self._stepped_first(samples)
        elif samples and tuner.measuring is not None and tuner.measuring.ran(samples):
            tuner.measured()

    def _stepped_first(self, samples: int) -> None:
        """Book the first step apart and keep it out of profiles: it may include compilation."""
        self._loop.step.first_done = True
        self._tuner.drop()
        self._books.stepped_first(samples)
        if self._loop.steps is not None and (self._loop.total or not self._gpus.simulated):
            self._tuner.resume()

    def _evaluated(self) -> None:
        self._gpus.evaluated()
        self._books.close(For.EVALUATION, 1)
        self._loop.evaluated = self._loop.evaluated_once = True

    def _look_back(self) -> None:
        """Find out what was done before a metric was reported, where nothing was marked as an evaluation.

        Between epochs it was one. A loop that did not ask for another batch may be at its end, or in the middle of its
        steps: where the last step took far longer than steps do, the model was evaluated after it.
        """
        loop, tuner = self._loop, self._tuner
        at_the_end = loop.counted and not loop.left
        if loop.steps is not None and (ended_s := loop.step.overdue(self._gpus.now_s())) is not None:
            tuner.drop()
            watts = tuner.average_power_w
            self._gpus.evaluated()
            self._books.close_late(ended_s, watts)
            loop.step.samples, loop.step.first_done = 0, True
            loop.evaluated = loop.evaluated_once = True
            if at_the_end:
                loop.steps = None
            else:
                tuner.resume()
            return
        if at_the_end:
            self._leave_steps()
        if loop.steps is None:
            self._evaluated()

    def _end_epoch(self) -> None:
        loop, tuner = self._loop, self._tuner
        self._leave_steps()
        if loop.reported is not None and not loop.evaluated_once:
            self._evaluated()
        self._books.close(For.REST, 1)
        if loop.samples and loop.epoch == loop.resumed + 1:
            loop.total = tuner.samples_per_epoch = loop.samples  # what a loader yields may be less than it has
            loop.counted = True
        books = self._progress()
        if self._result.reached is not None and self._result.reached.epoch == loop.epoch:
            self._result.reached = books
        tuner.reconsider(self._overheads(books))
        if self._out.checkpoints is not None:
            if loop.epoch <= self._out.checkpoints.reported:
                return
            self._out.checkpoints.reported = loop.epoch
        metric = loop.reported if loop.reported is not None and math.isfinite(loop.reported) else None
        limit_w = tuner.limit_w if self._gpus.power.has_limits else None
        self._out.report(
            EpochReport(loop.epoch, books.energy_j, books.time_s, limit_w, metric, metric_name=self.target.metric)
        )

    # -- books -------------------------------------------------------------------------------------------------

    def _progress(self) -> Progress:
        tuner = self._tuner
        return self._books.progress(self._loop.epoch, self._result.metric, tuner.profiling, tuner.profile)

    def _overheads(self, books: Progress) -> Overheads:
        """Return what an epoch takes beside its steps, by earlier attempts and this one."""
        return self._task.overheads.add(books.parts) if books.epoch else self._task.overheads

    def _observation(self, outcome: Outcome, detail: str, books: Progress) -> Observation:
        metric, tuner = self._result.metric, self._tuner
        return Observation(
            recurrence=self.recurrence,
            attempt=self.attempt,
            batch_size=self.batch_size,
            outcome=outcome,
            epochs=books.epoch,
            energy_j=books.energy_j,
            time_s=books.time_s,
            gpu=self._gpus.gpu,
            energy_source=self._gpus.energy_source,
            samples_per_epoch=self._loop.total,
            power_limit_w=tuner.settled_w if self._gpus.power.has_limits else None,
            profile=tuner.profile,
            profiling_energy_j=min(books.profiling_energy_j, books.energy_j),
            profiling_time_s=min(books.profiling_time_s, books.time_s),
            epochs_allowed=self._stopper.allowed,
            metric=metric if metric is not None and math.isfinite(metric) else None,
            energy_complete=books.complete,
            explores=self._task.decision.explores,
            fingerprint=self._task.job.fingerprint,
            detail=detail,
            parts=books.parts,
            host_energy_j=books.host_energy_j,
            mode=self._task.job.mode,
            limit_before_w=tuner.before_w if self._gpus.power.has_limits else None,
            control=self._task.decision.control,
            curve=self._result.curve.points,
        )

    def _observer_report(self, observed: Observation) -> str:
        if not self._gpus.power.can_set:
            return f"no power limit could be tried: {self._gpus.power.why_not}"
        saved = would_have_saved(self._task.job, observed)
        return saved.sentence if saved else "power limits are not all measured yet"

    # -- stopping ------------------------------------------------------------------------------------------------

    def _must_stop(self) -> bool:
        """Whether another epoch would be one too many; ends the attempt if so."""
        target, epoch = self.target, self._loop.epoch
        if epoch >= self.max_epochs:
            if self._result.reached is not None:
                self._converged_on_the_way()
            else:
                self._end(
                    Outcome.EXHAUSTED,
                    f"{target.metric} did not reach {target.value:g} in {self.max_epochs} epochs (max_epochs)",
                )
            return True
        if self._result.reached is not None or not self._stopper.cuts:
            return False
        books = self._progress()
        why = self._stopper.why_stop(epoch, epoch_cost=self._epoch_cost(books), once_cost=self._once_cost(books))
        if why is not None:
            self._end(Outcome.STOPPED, why)
        return why is not None

    def _epoch_cost(self, books: Progress) -> float | None:
        """Return EpochCost(b) by the profile; by the epochs so far while it is incomplete; None at first."""
        profile, samples = self._tuner.profile, self._loop.total
        if profile and profile.complete:
            overheads = self._overheads(books)
            return (
                epoch_cost(self._task.job, profile, samples_per_epoch=samples, overheads=overheads) if samples else None
            )
        if not books.epoch:
            return None
        once = books.parts.once
        rates = price(self._task.job, self._gpus.gpu.max_power_w)
        energy_j = max(books.energy_j + books.host_energy_j - once.energy_j, 0.0)
        return rates.of(energy_j, max(books.time_s - once.time_s, 0.0)) / books.epoch or None

    def _once_cost(self, books: Progress) -> float:
        once = books.parts.once
        host_j = self._task.overheads.host_w * once.time_s
        return price(self._task.job, self._gpus.gpu.max_power_w).of(once.energy_j + host_j, once.time_s)

    def _converged_on_the_way(self) -> None:
        assert self._result.reached is not None
        target = self.target
        self._end(
            Outcome.CONVERGED,
            f"{target.metric} reached {self._result.reached.metric:.4g} in epoch {self._result.reached.epoch}; "
            f"trained on to epoch {self._loop.epoch} (stop_at_target: false)",
        )

    def _end(self, outcome: Outcome, detail: str) -> None:
        self._result.outcome, self._result.detail = outcome, detail


@dataclass(frozen=True, slots=True)
class _Task:
    """What to train, with what is known of it beforehand."""

    job: Job
    decision: Decision
    overheads: Overheads
    stops_at_target: bool


@dataclass(frozen=True, slots=True)
class _Out:
    """Where what is learnt on the way goes."""

    report: Callable[[EpochReport], None]
    checkpoints: Checkpoints | None


@dataclass(slots=True)
class _Result:
    """What an attempt has come to so far.

    Attributes:
        curve: The learning curve.
        metric: The metric reported last.
        reached: The books at the epoch that reached the target, where training goes on after it.
        ended: The books when the loop ended.
        outcome: How it ended; None while it has not.
        detail: The same as a sentence.
    """

    curve: Curve
    metric: float | None = None
    reached: Progress | None = None
    ended: Progress | None = None
    outcome: Outcome | None = None
    detail: str = ""
