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
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

from zeus_flows.core.cost import attempt_cost
from zeus_flows.core.early_stop import NoCut, epochs_allowed
from zeus_flows.core.observer import would_have_saved
from zeus_flows.core.power import best_limit, epoch_cost
from zeus_flows.core.records import Decision, Job, LimitMeasurement, Mode, Observation, Outcome, PowerProfile
from zeus_flows.errors import DeviceError, DeviceLost, TrainingError
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.meter import Mark, Span
from zeus_flows.job import JobFile
from zeus_flows.ledger.protocol import EpochReport
from zeus_flows.training.checkpoint import Checkpoints, Progress
from zeus_flows.training.profiler import LEAST_S, PowerProfiler

log = logging.getLogger(__name__)
Batch = TypeVar("Batch")

#: A stored profile whose power or speed is off by more than this is measured again.
TOLERANCE = 0.05

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
        report: Called with every epoch.
        checkpoints: What an earlier try of this attempt left; None: nothing is kept.
        made_with: Major versions that a profile depends on.
        least_span_s: What the sensor needs to measure a power limit.

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
        report: Callable[[EpochReport], None] = lambda _: None,
        checkpoints: Checkpoints | None = None,
        made_with: str = "",
        least_span_s: float = LEAST_S,
    ) -> None:
        self.batch_size = decision.batch_size
        self.learning_rate = job_file.learning_rate.at(decision.batch_size, job_file.default_batch_size)
        self.recurrence, self.attempt = decision.recurrence, decision.attempt
        self.seed = decision.seed % 2**31
        self.target, self.max_epochs = job_file.target, job.max_epochs
        self._job_file, self._job, self._decision, self._gpus = job_file, job, decision, gpus
        self._report, self._checkpoints = report, checkpoints
        self._limit_before_w = gpus.power_limit_w()
        known = checkpoints.profile if checkpoints is not None and checkpoints.profile is not None else known_profile
        self._least_span_s = least_span_s
        self._profiler = self._make_profiler(known, made_with)
        self._checker: PowerProfiler | None = None
        self._limit_w: float | None = None
        self._start: Mark | None = None
        self._before = Progress()
        self._reached: Progress | None = None
        self._ended: Progress | None = None
        self._epoch = 0
        self._metric: float | None = None
        self._reported: float | None = None
        self._samples_per_epoch = 0
        self._samples_in_epoch = 0
        self._allowed: int | None = None
        self._outcome: Outcome | None = None
        self._detail = ""
        self._over = False

    # -- what a train function calls -------------------------------------------------------------------------

    @property
    def resumed_epoch(self) -> int:
        """The epoch that `load` went back to; 0 where training starts from the beginning."""
        return self._before.epoch

    @property
    def training(self) -> bool:
        """Whether an epoch is under way."""
        return self._start is not None and self._epoch > 0 and self._ended is None and not self._over

    def epochs(self) -> Iterator[int]:
        """Yield epoch numbers until the target, the cut or max_epochs ends the attempt.

        The first is 1, or the one after the checkpoint where `load` returned one.
        """
        if self._start is not None:
            raise TrainingError("session.epochs() can be used once per attempt")
        self._start = self._gpus.mark()
        if not self._profiler.active:
            self._settle()
        while self._outcome is None and not self._must_stop():
            self._epoch += 1
            self._reported = None
            self._samples_in_epoch = 0
            yield self._epoch
            self._end_epoch()
        self._ended = self._progress()

    def steps(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a loader's batches; between them, profile power limits until that is done."""
        if self._epoch == 0 or self._start is None:
            raise TrainingError("session.steps() belongs inside `for epoch in session.epochs()`")
        if not self._samples_per_epoch:
            self._samples_per_epoch = _samples_in(loader, self.batch_size)
            self._gpus.samples_per_epoch = self._samples_per_epoch
        ran, batch_size = self._gpus.ran, self.batch_size
        left = self._samples_per_epoch
        measuring = self._begin_measuring()
        try:
            for batch in loader:
                yield batch
                samples = min(batch_size, left) or batch_size
                left -= samples
                self._samples_in_epoch += samples
                ran(samples)
                if measuring is not None and measuring.ran(samples):
                    self._measured(measuring)
                    measuring = self._begin_measuring()
        except GeneratorExit:  # the train function left its loop early; or all is over, and the GPUs are not ours
            if self._over:
                return
        if measuring is not None and measuring.end():
            self._measured(measuring)

    def report_metric(self, value: float) -> None:
        """Tell how good the model is after this epoch. The job file says what is good enough."""
        value = float(value)
        self._metric = self._reported = value
        target = self.target
        if self._reached is not None:
            return
        if math.isnan(value) or (math.isinf(value) and target.reached(value)):
            name = "NaN" if math.isnan(value) else "infinite"
            self._end(Outcome.DIVERGED, f"{target.metric} is {name} in epoch {self._epoch}")
        elif target.reached(value):
            self._detail = f"{target.metric} reached {value:.4g} in epoch {self._epoch}"
            if self._job_file.stop_at_target:
                self._end(Outcome.CONVERGED, self._detail)
            else:
                self._reached = self._progress()

    def save(self, state: Mapping[str, Any]) -> None:
        """Keep what the next try needs to go on after this epoch, should this one break: call it at an epoch's end.

        Args:
            state: Tensors, numbers, strings, and dicts and lists of them, such as `model.state_dict()`.
        """
        if self._checkpoints is None:
            return
        if self._start is None:
            raise TrainingError("session.save() belongs inside `for epoch in session.epochs()`")
        self._checkpoints.save(state, self._progress(), self._reached)

    def load(self) -> dict[str, Any] | None:
        """Return what an earlier try of this attempt saved last, on the CPU, and go on after it; None at first."""
        if self._start is not None:
            raise TrainingError("session.load() belongs before `for epoch in session.epochs()`")
        if self._checkpoints is None or (state := self._checkpoints.load()) is None:
            return None
        assert self._checkpoints.progress is not None
        self._before, self._reached = self._checkpoints.progress, self._checkpoints.reached
        self._epoch, self._metric = self._before.epoch, self._before.metric
        log.info("going on after epoch %d", self._epoch)
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
        self._over = True

    def observation(self) -> Observation:
        """Return how the attempt went.

        Raises:
            TrainingError: the train function never trained, or never reported a metric.
        """
        self.close()
        if self._start is None or (self._epoch == 0 and self._outcome is None):
            raise TrainingError("the train function never looped over session.epochs()")
        if self._metric is None and self._epoch > 0 and self._outcome is not Outcome.STOPPED:
            raise TrainingError("the train function never called session.report_metric()")
        if self._outcome is None:
            if self._reached is not None:
                self._converged_on_the_way()
            else:
                self._end(Outcome.FAILED, "the train function left session.epochs() by itself")
        assert self._outcome is not None
        books = self._reached or self._ended or self._progress()
        observed = self._observation(self._outcome, self._detail, books)
        if self._job.mode is Mode.OBSERVE:
            observed = replace(observed, detail=f"{observed.detail}; {self._observer_report(observed)}")
        log.info("batch size %d %s: %s", self.batch_size, observed.outcome, observed.detail)
        return observed

    def failed(self, outcome: Outcome, detail: str, traceback: str = "") -> Observation:
        """Return the observation of an attempt that an exception ended."""
        self.close()
        span = Span(0.0, 0.0, (), complete=True)
        if self._start is not None:
            try:
                span = self._gpus.since(self._start)
            except Exception:  # a lost GPU, or CUDA that answers nothing any more
                span = self._gpus.known_since(self._start)
        log.warning("batch size %d %s: %s", self.batch_size, outcome, detail)
        return replace(self._observation(outcome, detail, self._with(span)), traceback=traceback)

    # -- books -------------------------------------------------------------------------------------------------

    def _progress(self) -> Progress:
        assert self._start is not None
        return self._with(self._gpus.since(self._start))

    def _with(self, span: Span) -> Progress:
        """Return the books with a span since the start of this try."""
        before, profiler = self._before, self._profiler
        return Progress(
            epoch=self._epoch,
            energy_j=before.energy_j + span.energy_j,
            time_s=before.time_s + span.time_s,
            profiling_energy_j=before.profiling_energy_j + profiler.energy_j,
            profiling_time_s=before.profiling_time_s + profiler.time_s,
            complete=before.complete and span.complete,
            metric=self._metric,
        )

    def _observation(self, outcome: Outcome, detail: str, books: Progress) -> Observation:
        metric = self._metric
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
            samples_per_epoch=self._samples_per_epoch,
            power_limit_w=self._limit_w,
            profile=self._profiler.profile,
            profiling_energy_j=min(books.profiling_energy_j, books.energy_j),
            profiling_time_s=min(books.profiling_time_s, books.time_s),
            epochs_allowed=self._allowed,
            metric=metric if metric is not None and math.isfinite(metric) else None,
            energy_complete=books.complete,
            explores=self._decision.explores,
            fingerprint=self._job.fingerprint,
            detail=detail,
        )

    def _end_epoch(self) -> None:
        if self._samples_in_epoch and self._epoch == self._before.epoch + 1:
            self._samples_per_epoch = self._samples_in_epoch  # what a loader yields, which may be less than it has
        books = self._progress()
        if self._reached is not None and self._reached.epoch == self._epoch:
            self._reached = books
        limit = self._limit_w if self._limit_w is not None else self._gpus.power_limit_w()
        if self._checkpoints is not None:
            if self._epoch <= self._checkpoints.reported:
                return
            self._checkpoints.reported = self._epoch
        metric = self._reported if self._reported is not None and math.isfinite(self._reported) else None
        self._report(EpochReport(self._epoch, books.energy_j, books.time_s, limit, metric))

    def _observer_report(self, observed: Observation) -> str:
        if not self._gpus.can_set_limits:
            return f"no power limit could be tried: {self._gpus.why_not}"
        saved = would_have_saved(self._job, observed)
        return saved.sentence if saved else "power limits are not all measured yet"

    # -- power limits --------------------------------------------------------------------------------------------

    def _make_profiler(self, known: PowerProfile | None, made_with: str) -> PowerProfiler:
        section = self._job_file.power_limit
        limits: Iterable[float]
        if not self._may_tune:
            limits = (self._decision.power_limit_w or self._limit_before_w,)
        elif section.limits == "all":
            limits = self._gpus.limits_w
        else:
            limits = section.limits
        observing = self._may_tune and self._job.mode is Mode.OBSERVE
        return PowerProfiler(
            self._gpus,
            job=self._job,
            batch_size=self.batch_size,
            limits_w=limits,
            known=known,
            profile_s=section.profile_seconds,
            warmup_s=section.warmup_seconds,
            made_with=made_with,
            least_s=self._least_span_s,
            always_w=(self._limit_before_w,) if observing else (),
            skip_losers=not section.profile_all_limits,
        )

    @property
    def _may_tune(self) -> bool:
        """Whether this attempt looks for the best power limit."""
        return (
            self._gpus.can_set_limits
            and self._job.mode is not Mode.OFF
            and self._decision.power_limit_w is None
            and (self._decision.tune_power or self._job.mode is Mode.OBSERVE)
        )

    def _begin_measuring(self) -> PowerProfiler | None:
        """Return what measures now, begun: the profiler, then what checks a stored profile; None: nothing."""
        measuring = self._profiler if self._profiler.active else self._checker
        if measuring is not None:
            measuring.samples_per_epoch = self._samples_per_epoch
            measuring.begin()
        return measuring

    def _measured(self, measuring: PowerProfiler) -> None:
        """Draw the conclusion of what was measured."""
        if measuring is self._profiler:
            self._settle()
            return
        self._checker = None
        measured = measuring.profile.measurements[0] if measuring.profile and not measuring.broken else None
        if measured is not None and self._is_off(measured):
            self._profiler.distrust(measured)
            if not self._profiler.active:
                self._settle()

    def _settle(self) -> None:
        """Apply the best limit: the profile is complete, or will not be."""
        profile = self._profiler.profile
        wanted = self._decision.power_limit_w or self._limit_before_w
        if profile and profile.complete and self._may_tune and self._job.mode is not Mode.OBSERVE:
            wanted = best_limit(self._job, profile).power_limit_w
        if self._profiler.broken:
            log.warning("power profiling was given up: %s", self._profiler.broken)
        if self._gpus.can_set_limits:
            try:
                if self._gpus.power_limit_w() != wanted:
                    self._gpus.set_power_limit_w(wanted)
            except DeviceLost:
                raise
            except DeviceError as error:
                log.warning("the power limit stays as it is: %s", error)
                wanted = self._limit_before_w
        self._limit_w = wanted
        if self._may_tune and self._profiler.time_s == 0 and self._said_of(wanted) is not None:
            section = self._job_file.power_limit
            self._checker = PowerProfiler(
                self._gpus,
                job=self._job,
                batch_size=self.batch_size,
                limits_w=(wanted,),
                known=None,
                profile_s=section.profile_seconds,
                warmup_s=section.warmup_seconds,
                least_s=self._least_span_s,
            )

    def _said_of(self, limit_w: float) -> LimitMeasurement | None:
        profile = self._profiler.profile
        return next((m for m in profile.measurements if m.power_limit_w == limit_w), None) if profile else None

    def _is_off(self, measured: LimitMeasurement) -> bool:
        """Whether a limit does not do as the stored profile says; says so in the log."""
        said = self._said_of(measured.power_limit_w)
        if said is None:
            return False
        power, speed = (
            measured.average_power_w / said.average_power_w - 1,
            measured.samples_per_s / said.samples_per_s - 1,
        )
        if max(abs(power), abs(speed)) <= TOLERANCE:
            return False
        log.warning(
            "the stored power profile of batch size %d is off by %+.0f %% in power, %+.0f %% in speed: measuring again",
            self.batch_size,
            100 * power,
            100 * speed,
        )
        return True

    # -- stopping ------------------------------------------------------------------------------------------------

    def _must_stop(self) -> bool:
        """Whether another epoch would be one too many; ends the attempt if so."""
        target, max_epochs = self.target, self.max_epochs
        if self._epoch >= max_epochs:
            if self._reached is not None:
                self._converged_on_the_way()
            else:
                self._end(
                    Outcome.EXHAUSTED,
                    f"{target.metric} did not reach {target.value:g} in {max_epochs} epochs (max_epochs)",
                )
            return True
        if self._reached is not None:
            return False
        cost_j = self._epoch_cost()
        if cost_j is None or isinstance(self._decision.cut, NoCut):
            return False
        self._allowed = epochs_allowed(self._decision.cut, epoch_cost_j=cost_j, max_epochs=max_epochs)
        if self._epoch < self._allowed:
            return False
        self._end(
            Outcome.STOPPED,
            f"stopped after {self._epoch} epochs: another would not be worth its cost of {cost_j:,.0f} J",
        )
        return True

    def _epoch_cost(self) -> float | None:
        """Return EpochCost(b) by the profile; by the epochs so far while it is incomplete; None at first."""
        profile = self._profiler.profile
        if profile and profile.complete:
            samples = self._samples_per_epoch
            return epoch_cost(self._job, profile, samples_per_epoch=samples) if samples else None
        if self._epoch == 0 or self._start is None:
            return None
        books = self._progress()
        cost_j = attempt_cost(
            energy_j=books.energy_j,
            time_s=books.time_s,
            eta=self._job.objective_eta,
            max_power_w=self._gpus.gpu.max_power_w,
        )
        return cost_j / self._epoch or None

    def _converged_on_the_way(self) -> None:
        assert self._reached is not None
        target = self.target
        self._end(
            Outcome.CONVERGED,
            f"{target.metric} reached {self._reached.metric:.4g} in epoch {self._reached.epoch}; "
            f"trained on to epoch {self._epoch} (stop_at_target: false)",
        )

    def _end(self, outcome: Outcome, detail: str) -> None:
        self._outcome, self._detail = outcome, detail


def _samples_in(loader: Any, batch_size: int) -> int:
    """Return how many samples a loader yields: its data set's size, else whole batches."""
    dataset = getattr(loader, "dataset", None)
    if dataset is not None and hasattr(dataset, "__len__"):
        return len(dataset)
    if hasattr(loader, "__len__"):
        return len(loader) * batch_size
    raise TrainingError("session.steps() needs a loader with a length: give it a DataLoader, or a list of batches")
