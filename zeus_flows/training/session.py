"""The session that a train function receives: it profiles, sets the power limit, measures and stops.

def train(session, **parameters):
    model = build(session.learning_rate)
    loader = DataLoader(data, batch_size=session.batch_size)
    for epoch in session.epochs():          # may stop early
        for batch in session.steps(loader):
            learn(model, batch)
        session.report_metric(evaluate(model))
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from zeus_flows.core.cost import attempt_cost
from zeus_flows.core.early_stop import NoCut, epochs_allowed
from zeus_flows.core.power import best_limit, epoch_cost
from zeus_flows.core.records import Decision, Job, Mode, Observation, Outcome, PowerProfile
from zeus_flows.errors import TrainingError
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.meter import Mark, Span
from zeus_flows.job import JobFile
from zeus_flows.ledger.protocol import EpochReport
from zeus_flows.training.profiler import PowerProfiler

log = logging.getLogger(__name__)
Batch = TypeVar("Batch")


class Session:
    """One attempt, from the side of the training loop.

    Attributes:
        batch_size: The batch size to train with.
        learning_rate: The learning rate for it, by the job file's rule.
        recurrence: Number of the recurrence, from 1: which slice of the data it is about.
        attempt: Number of the attempt within the recurrence, from 1.
        seed: For the train function's own randomness; differs between attempts.
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
    ) -> None:
        self.batch_size = decision.batch_size
        self.learning_rate = job_file.learning_rate.at(decision.batch_size, job_file.default_batch_size)
        self.recurrence, self.attempt = decision.recurrence, decision.attempt
        self.seed = decision.seed % 2**31
        self._job_file, self._job, self._decision, self._gpus = job_file, job, decision, gpus
        self._report = report
        self._profiler = self._make_profiler(known_profile)
        self._limit_before_w = gpus.power_limit_w()
        self._limit_w: float | None = None
        self._start: Mark | None = None
        self._span: Span | None = None
        self._epoch = 0
        self._metric: float | None = None
        self._reported: float | None = None
        self._samples_per_epoch = 0
        self._allowed: int | None = None
        self._outcome: Outcome | None = None
        self._detail = ""

    def epochs(self) -> Iterator[int]:
        """Yield epoch numbers from 1 until the target, the cut or max_epochs ends the attempt."""
        if self._start is not None:
            raise TrainingError("session.epochs() can be used once per attempt")
        self._start = self._gpus.mark()
        if not self._profiler.active:
            self._settle()
        while self._outcome is None and not self._must_stop():
            self._epoch += 1
            self._reported = None
            yield self._epoch
            self._end_epoch()
        self._span = self._gpus.since(self._start)

    def steps(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield a loader's batches; between them, profile power limits until that is done."""
        if self._epoch == 0:
            raise TrainingError("session.steps() belongs inside `for epoch in session.epochs()`")
        if not self._samples_per_epoch:
            self._samples_per_epoch = _samples_in(loader, self.batch_size)
            self._gpus.samples_per_epoch = self._samples_per_epoch
        profiler, ran, batch_size = self._profiler, self._gpus.ran, self.batch_size
        left = self._samples_per_epoch
        profiler.begin()
        for batch in loader:
            yield batch
            samples = min(batch_size, left) or batch_size
            left -= samples
            ran(samples)
            if profiler.ran(samples):
                self._settle()
        if profiler.end():
            self._settle()

    def report_metric(self, value: float) -> None:
        """Tell how good the model is after this epoch. The job file says what is good enough."""
        value = float(value)
        self._metric = self._reported = value
        target = self._job_file.target
        if math.isnan(value):
            self._end(Outcome.DIVERGED, f"{target.metric} is NaN in epoch {self._epoch}")
        elif target.reached(value):
            self._end(Outcome.CONVERGED, f"{target.metric} reached {value:.4g} in epoch {self._epoch}")

    def observation(self) -> Observation:
        """Return how the attempt went.

        Raises:
            TrainingError: the train function never trained, or never reported a metric.
        """
        if self._start is None or (self._epoch == 0 and self._outcome is None):
            raise TrainingError("the train function never looped over session.epochs()")
        if self._metric is None and self._epoch > 0 and self._outcome is not Outcome.STOPPED:
            raise TrainingError("the train function never called session.report_metric()")
        if self._outcome is None:
            self._outcome, self._detail = Outcome.FAILED, "the train function left session.epochs() by itself"
        return self._observation(self._outcome, self._detail, self._span or self._gpus.since(self._start))

    def failed(self, outcome: Outcome, detail: str) -> Observation:
        """Return the observation of an attempt that an exception ended."""
        span = self._gpus.since(self._start) if self._start else Span(0.0, 0.0, (), complete=True)
        return self._observation(outcome, detail, span)

    def _observation(self, outcome: Outcome, detail: str, span: Span) -> Observation:
        metric = self._metric
        return Observation(
            recurrence=self.recurrence,
            attempt=self.attempt,
            batch_size=self.batch_size,
            outcome=outcome,
            epochs=self._epoch,
            energy_j=span.energy_j,
            time_s=span.time_s,
            gpu=self._gpus.gpu,
            energy_source=self._gpus.energy_source,
            samples_per_epoch=self._samples_per_epoch,
            power_limit_w=self._limit_w,
            profile=self._profiler.profile,
            profiling_energy_j=self._profiler.energy_j,
            profiling_time_s=self._profiler.time_s,
            epochs_allowed=self._allowed,
            metric=metric if metric is not None and math.isfinite(metric) else None,
            energy_complete=span.complete,
            explores=self._decision.explores,
            fingerprint=self._job.fingerprint,
            detail=detail,
        )

    def _make_profiler(self, known: PowerProfile | None) -> PowerProfiler:
        section = self._job_file.power_limit
        limits: Iterable[float]
        if not self._may_tune:
            limits = (self._decision.power_limit_w or self._gpus.power_limit_w(),)
        elif section.limits == "all":
            limits = self._gpus.limits_w
        else:
            limits = sorted(section.limits, reverse=True)
        return PowerProfiler(
            self._gpus,
            batch_size=self.batch_size,
            limits_w=limits,
            known=known,
            profile_s=section.profile_seconds,
            warmup_s=section.warmup_seconds,
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

    def _settle(self) -> None:
        """Apply the best limit: the profile is complete, or will not be."""
        profile = self._profiler.profile
        wanted = self._decision.power_limit_w or self._limit_before_w
        if profile and profile.complete and self._may_tune and self._job.mode is not Mode.OBSERVE:
            wanted = best_limit(self._job, profile).power_limit_w
        if self._profiler.broken:
            log.warning("power profiling was given up: %s", self._profiler.broken)
        if self._gpus.can_set_limits and self._gpus.power_limit_w() != wanted:
            self._gpus.set_power_limit_w(wanted)
        self._limit_w = wanted

    def _must_stop(self) -> bool:
        """Whether another epoch would be one too many; ends the attempt if so."""
        if self._epoch >= self._job.max_epochs:
            target = self._job_file.target
            self._end(
                Outcome.EXHAUSTED,
                f"{target.metric} did not reach {target.value:g} in {self._job.max_epochs} epochs (max_epochs)",
            )
            return True
        cost_j = self._epoch_cost()
        if cost_j is None or isinstance(self._decision.cut, NoCut):
            return False
        self._allowed = epochs_allowed(self._decision.cut, epoch_cost_j=cost_j, max_epochs=self._job.max_epochs)
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
        span = self._gpus.since(self._start)
        cost_j = attempt_cost(
            energy_j=span.energy_j,
            time_s=span.time_s,
            eta=self._job.objective_eta,
            max_power_w=self._gpus.gpu.max_power_w,
        )
        return cost_j / self._epoch or None

    def _end_epoch(self) -> None:
        assert self._start is not None
        span = self._gpus.since(self._start)
        limit = self._limit_w if self._limit_w is not None else self._gpus.power_limit_w()
        self._report(EpochReport(self._epoch, span.energy_j, span.time_s, limit, self._reported))

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
