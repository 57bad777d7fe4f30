"""The session that a train function receives: it profiles, sets the power limit or clocks, measures and stops.

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
    session.keep(model)                                 # logged to MLflow if the attempt reached the target

What lies between the last step and `report_metric` is taken for an evaluation. One that happens elsewhere, every n
steps say, is put into `with session.evaluation():`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power_profile import PowerProfile
from zeus_flows.core.records import Decision, Observation, Outcome
from zeus_flows.errors import TrainingError
from zeus_flows.gpu.group import Gpus
from zeus_flows.job_file import JobFile
from zeus_flows.training.accumulation import Accumulation
from zeus_flows.training.attempt_result import AttemptResult, observer_report
from zeus_flows.training.attempt_task import AttemptTask
from zeus_flows.training.books import Books, Curve, For
from zeus_flows.training.checkpoint import Checkpoints, Progress
from zeus_flows.training.keeping import Keeper
from zeus_flows.training.measured_loop import MeasuredLoop
from zeus_flows.training.profiler import LEAST_S
from zeus_flows.training.setting_tuner import SettingTuner
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
        keeper: Where the attempt's model is staged; None: it is not kept.
        made_with: Major versions that a profile depends on.
        least_span_s: What the sensor needs to measure a setting of the knob.
        host_energy_j: Reads the machine's own energy counter, where its energy is measured.

    Attributes:
        batch_size: The batch size to train with.
        learning_rate: The learning rate for it, by the job file's rule.
        recurrence: Number of the recurrence, from 1: which slice of the data it is about.
        attempt: Number of the attempt within the recurrence, from 1.
        seed: For the train function's own randomness; differs between attempts. Again in smaller parts, it is the same.
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
        keeper: Keeper | None = None,
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
        parts = Accumulation.of(decision.batch_size, decision.micro, wanted=job.accumulate)
        self._task = AttemptTask(job, decision, overheads, job_file.stop_at_target, gpus.gpu.max_power_w, parts)
        self._gpus = gpus
        self._out = _Out(report, checkpoints, keeper)
        self._tuner = tuner = SettingTuner(
            gpus,
            job_file.power_limit,
            job,
            decision,
            known=known,
            overheads=overheads,
            made_with=made_with,
            least_span_s=least_span_s,
        )
        books = Books(gpus, lambda: tuner.setting, host_w=job.host_power_w or 0.0, host_energy_j=host_energy_j)
        self._stopper = Stopper(job, decision.cut)
        self._loop = TrainingLoop()
        self._measured = MeasuredLoop(self._loop, gpus, books, tuner)
        self._result = AttemptResult(Curve(lower_is_better=self.target.better == "lower"))

    # -- what a train function calls -------------------------------------------------------------------------

    @property
    def micro_batch_size(self) -> int:
        """What the loader is to yield where the job accumulates gradients; else the batch size."""
        return self.parts(heeded=True).micro_batch_size

    @property
    def accumulation_steps(self) -> int:
        """How many of the loader's batches an optimizer step takes; 1 where nothing is accumulated."""
        return self.parts(heeded=True).steps

    @property
    def outcome(self) -> Outcome | None:
        """How the attempt ended; None while it has not. Look at it after the loop, before a model is published."""
        return self._result.outcome

    @property
    def converged(self) -> bool:
        """Whether the target was reached. Where it is False after the loop, the model is not to be used."""
        return self._result.converged

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
        goes_on = self.begin_training()
        while goes_on:
            yield self.begin_epoch()
            goes_on = self.end_epoch()

    def steps(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a loader's batches; between them, profile power limits until that is done.

        A loop may stop asking at the last batch. A loader without a length is counted in the first epoch. Where its
        batches are parts of the batch size, as many as make one up are a step.
        """
        loop, step, books, tuner = self._loop, self._loop.step, self._measured.books, self._tuner
        ran, now_s = self._gpus.ran, self._gpus.now_s
        if not loop.begun or loop.epoch == 0:
            raise TrainingError("session.steps() belongs inside `for epoch in session.epochs()`")
        self._measured.leave_steps()
        mine, size, batches = object(), 0, 1
        try:
            for batch in loader:
                if loop.steps is not mine:
                    size = batch_size_of(loader, batch) or self.batch_size
                    self._measured.enter_steps(mine, samples_in(loader, size))
                    step.batches = batches = max(self.batch_size // size, 1)
                samples = min(size, loop.left) or size
                books.samples += samples
                ran(samples)
                loop.hand_out(samples, now_s())
                yield batch
                if step.samples:
                    step.samples = 0
                    if batches > 1 and not (samples := step.gather(samples)):
                        continue
                    if not step.first_done:
                        self._task.accumulation.check()
                        self._measured.stepped_first(samples)
                    elif (measuring := tuner.measuring) is not None and measuring.ran(samples):
                        tuner.measured()
        except GeneratorExit:  # the train function left its loop early; or all is over, and the GPUs are not ours
            pass
        if loop.steps is mine and not loop.over:
            self._measured.leave_steps()

    def begin_steps(self, samples_per_epoch: int = 0) -> None:
        """Begin an epoch's steps, for a loop elsewhere that tells of each with `stepped`; `steps` does both.

        Args:
            samples_per_epoch: How long an epoch is; 0 where only its end will tell.
        """
        if not self._loop.begun or self._loop.epoch == 0:
            raise TrainingError("session.begin_steps() belongs inside `for epoch in session.epochs()`")
        self._measured.leave_steps()
        self._measured.enter_steps(object(), samples_per_epoch)
        self._loop.step.handed_s = self._gpus.now_s()

    def stepped(self, samples: int | None = None) -> bool:
        """Tell that a step has ended, with so many samples (the batch size); return whether the epoch has more.

        Where the length of an epoch is known its steps end with the last one, and what follows is no step. Where it
        is not, this is always True.
        """
        loop, tuner = self._loop, self._tuner
        if loop.steps is None:
            raise TrainingError("session.stepped() belongs after session.begin_steps()")
        size = samples or self.batch_size
        size = min(size, loop.left) or size
        self._measured.books.samples += size
        self._gpus.ran(size)
        loop.stepped(size, self._gpus.now_s())
        if not loop.step.first_done:
            self._measured.stepped_first(size)
        elif (measuring := tuner.measuring) is not None and measuring.ran(size):
            tuner.measured()
        if loop.counted and not loop.left:
            self._measured.leave_steps()
        return loop.steps is not None

    def ended_by_itself(self, detail: str) -> None:
        """Tell that training is over for good, and not because the session said so: it is exhausted."""
        loop = self._loop
        if loop.epoch > loop.resumed and loop.reported is None:
            loop.epoch -= 1  # the one under way will not end
        if self._result.outcome is None and self._result.reached is None:
            self._result.end(Outcome.EXHAUSTED, detail)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Measure a block as an evaluation of the model. It may be inside the steps, for example after every 500."""
        loop = self._loop
        if not self.training or loop.evaluating:
            yield
            return
        if loop.counted and not loop.left:  # the loop over steps may not ask again, but it has none left
            self._measured.leave_steps()
        inside = loop.steps
        self._measured.begin_evaluation()
        try:
            yield
        finally:
            self._measured.end_evaluation(inside)

    def report_metric(self, value: float) -> None:
        """Tell how good the model is after this epoch. The job file says what is good enough."""
        value = float(value)
        loop, target = self._loop, self.target
        self._result.metric = loop.reported = value
        if self.training and not loop.evaluating and not loop.evaluated:
            self._measured.look_back()
        self._result.curve.add(loop.epoch, value)
        if self._result.reached is not None:
            return
        if math.isnan(value) or (math.isinf(value) and target.reached(value)):
            name = "NaN" if math.isnan(value) else "infinite"
            self._result.end(Outcome.DIVERGED, f"{target.metric} is {name} in epoch {loop.epoch}")
            loop.cut_short = loop.steps is not None
        elif target.reached(value):
            self._result.detail = f"{target.metric} reached {value:.4g} in epoch {loop.epoch}"
            if self._task.stops_at_target:
                self._result.end(Outcome.CONVERGED, self._result.detail)
                loop.cut_short = loop.steps is not None
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
            self._measured.books.close(For.REST)
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
        self._measured.books.go_on_after(before)
        for epoch, level in before.curve:
            self._result.curve.add(epoch, level)
        self._result.reached, self._result.metric = self._out.checkpoints.reached, before.metric
        self._loop.epoch = self._loop.resumed = before.epoch
        log.info("going on after epoch %d", before.epoch)
        return state

    def keep(self, model: object, /, **about: object) -> None:
        """Keep the model that this attempt brings. It is logged to MLflow where the attempt reaches the target.

        It may be called in every epoch, or once at the end: the newest one counts. Where the attempt does not reach the
        target nothing is kept.

        Args:
            model: A torch module, its weights by name, or the path of a file or folder, which is kept as it is.
            **about: What is needed to build it again: numbers, texts, lists and dicts.

        Raises:
            TrainingError: it is something else, or there is no such path.
        """
        if self._out.keeper is None:
            log.warning("session.keep(): outside of a job nothing is kept")
        elif self._result.outcome is None or self._result.converged:
            try:
                self._out.keeper.keep(model, about)
            except OSError as error:  # a full disk costs the model, and not the training
                log.error("the model could not be kept: %s", error)

    # -- what a framework's callback calls instead of looping over `epochs` ------------------------------------

    def begin_training(self) -> bool:
        """Begin the attempt; return whether there is an epoch to train."""
        if self._loop.begun:
            raise TrainingError("session.epochs() can be used once per attempt")
        self._loop.begun = True
        self._tuner.begin()
        return self._goes_on()

    def begin_epoch(self) -> int:
        """Begin the next epoch and return its number."""
        self._loop.next_epoch()
        return self._loop.epoch

    def end_epoch(self) -> bool:
        """End the epoch under way; return whether there is to be another."""
        self._task.accumulation.check()
        self._end_epoch()
        return self._goes_on()

    def parts(self, *, heeded: bool) -> Accumulation:
        """Return what of a batch goes through at once.

        Args:
            heeded: Whether the training follows it from now on.
        """
        found = self._task.accumulation
        found.heeded = found.heeded or heeded
        return found

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
        if self._result.ended is None:
            self._tuner.look(after_s=0.0)
        loop = self._loop
        if not loop.begun or (loop.epoch == 0 and self._result.outcome is None):
            raise TrainingError("the train function never looped over session.epochs()")
        if loop.epoch > loop.resumed and not self._measured.books.samples:
            raise TrainingError(
                "the train function never used session.steps(), so nothing could be measured: "
                "write `for batch in session.steps(loader)` where it goes through its batches"
            )
        if self._result.metric is None and loop.epoch > 0 and self._result.outcome is not Outcome.STOPPED:
            raise TrainingError("the train function never called session.report_metric()")
        if self._result.outcome is None:
            if self._result.reached is not None:
                self._result.converged_on_the_way(self.target.metric, loop.epoch)
            else:
                self._result.end(Outcome.FAILED, "the train function left session.epochs() by itself")
        assert self._result.outcome is not None
        books = self._result.reached or self._result.ended or self._progress()
        observed = self._observation(books)
        if self._task.job.mode is Mode.OBSERVE:
            found = observer_report(self._task, self._gpus, observed)
            observed = replace(observed, detail=f"{observed.detail}; {found}")
        log.info("batch size %d %s: %s", self.batch_size, observed.outcome, observed.detail)
        return observed

    def failed(self, outcome: Outcome, detail: str, traceback: str = "") -> Observation:
        """Return the observation of an attempt that an exception ended."""
        with suppress(Exception):  # a loop over steps that a framework's events drive is still open; a GPU may be lost
            self._measured.leave_steps()
        self.close()
        self._result.end(outcome, detail)
        tuner, books = self._tuner, self._measured.books
        known = books.upto(books.known(), self._loop.epoch, self._result.metric, tuner.profiling, tuner.profile)
        log.warning("batch size %d %s: %s", self.batch_size, outcome, detail)
        return replace(self._observation(known), traceback=traceback)

    # -- the end of an epoch, and of the attempt -----------------------------------------------------------------

    def _end_epoch(self) -> None:
        loop, tuner = self._loop, self._tuner
        self._measured.end_epoch()
        books = self._progress()
        if self._result.reached is not None and self._result.reached.epoch == loop.epoch:
            self._result.reached = books
        tuner.reconsider(self._task.overheads_with(books))
        if self._out.checkpoints is not None:
            if loop.epoch <= self._out.checkpoints.reported:
                return
            self._out.checkpoints.reported = loop.epoch
        metric = loop.reported if loop.reported is not None and math.isfinite(loop.reported) else None
        control = self._gpus.control
        setting, name = tuner.setting if control.has_settings else None, self.target.metric
        self._out.report(
            EpochReport(loop.epoch, books.energy_j, books.time_s, setting, metric, metric_name=name, knob=control.knob)
        )

    def _progress(self) -> Progress:
        tuner = self._tuner
        return self._measured.books.progress(self._loop.epoch, self._result.metric, tuner.profiling, tuner.profile)

    def _observation(self, books: Progress) -> Observation:
        samples, allowed = self._loop.total, self._stopper.allowed
        return self._result.observation(self._task, self._gpus, self._tuner, books, samples=samples, allowed=allowed)

    def _goes_on(self) -> bool:
        """Whether there is another epoch to train; closes the books if not."""
        if self._result.outcome is None and not self._must_stop():
            return True
        self._tuner.look(after_s=0.0)
        self._result.ended = self._progress()
        return False

    def _must_stop(self) -> bool:
        """Whether another epoch would be one too many; ends the attempt if so."""
        loop, target, epoch = self._loop, self.target, self._loop.epoch
        if epoch >= self.max_epochs:
            if self._result.reached is not None:
                self._result.converged_on_the_way(self.target.metric, loop.epoch)
            else:
                self._result.end(
                    Outcome.EXHAUSTED,
                    f"{target.metric} did not reach {target.value:g} in {self.max_epochs} epochs (max_epochs)",
                )
            return True
        if self._result.reached is not None or not self._stopper.cuts:
            return False
        books = self._progress()
        an_epoch = self._task.epoch_cost(books, self._tuner.profile, loop.total)
        why = self._stopper.why_stop(
            epoch,
            epoch_cost=an_epoch,
            once_cost=self._task.once_cost(books),
            curve=self._result.curve.points,
        )
        if why is not None:
            self._result.end(Outcome.STOPPED, why)
        return why is not None


@dataclass(frozen=True, slots=True)
class _Out:
    """Where what is learnt on the way goes."""

    report: Callable[[EpochReport], None]
    checkpoints: Checkpoints | None
    keeper: Keeper | None
