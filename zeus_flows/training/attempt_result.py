"""What an attempt has come to, and the observation that is made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeus_flows.core.observer import would_have_saved
from zeus_flows.core.power_profile import Knob
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.gpu.group import Gpus
from zeus_flows.training.attempt_task import AttemptTask
from zeus_flows.training.books import Curve
from zeus_flows.training.checkpoint import Progress
from zeus_flows.training.setting_tuner import SettingTuner


@dataclass(slots=True)
class AttemptResult:
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

    @property
    def converged(self) -> bool:
        """Whether the target was reached."""
        return self.outcome is Outcome.CONVERGED or (self.outcome is None and self.reached is not None)

    def end(self, outcome: Outcome, detail: str) -> None:
        """Say how the attempt ended."""
        self.outcome, self.detail = outcome, detail

    def converged_on_the_way(self, metric_name: str, epoch: int) -> None:
        """End an attempt that reached the target and trained on to an epoch."""
        assert self.reached is not None
        self.end(
            Outcome.CONVERGED,
            f"{metric_name} reached {self.reached.metric:.4g} in epoch {self.reached.epoch}; "
            f"trained on to epoch {epoch} (stop_at_target: false)",
        )

    def observation(
        self, task: AttemptTask, gpus: Gpus, tuner: SettingTuner, books: Progress, *, samples: int, allowed: int | None
    ) -> Observation:
        """Return the attempt's single outcome.

        Args:
            task: What was to be trained.
            gpus: What it trained on.
            tuner: What turned the knob.
            books: What it took.
            samples: Samples per epoch.
            allowed: The epochs that its cut came to; None where there was none.
        """
        assert self.outcome is not None
        metric, has_settings = self.metric, gpus.control.has_settings
        return Observation(
            recurrence=task.decision.recurrence,
            attempt=task.decision.attempt,
            batch_size=task.decision.batch_size,
            outcome=self.outcome,
            epochs=books.epoch,
            energy_j=books.energy_j,
            time_s=books.time_s,
            gpu=gpus.gpu,
            energy_source=gpus.energy_source,
            samples_per_epoch=samples,
            setting=tuner.settled if has_settings else None,
            profile=tuner.profile,
            profiling_energy_j=min(books.profiling_energy_j, books.energy_j),
            profiling_time_s=min(books.profiling_time_s, books.time_s),
            epochs_allowed=allowed,
            metric=metric if metric is not None and math.isfinite(metric) else None,
            energy_complete=books.complete,
            explores=task.decision.explores,
            fingerprint=task.job.fingerprint,
            detail=self.detail + _foreign(books.foreign_limit_w),
            parts=books.parts,
            host_energy_j=books.host_energy_j,
            mode=task.job.mode,
            setting_before=tuner.before if has_settings else None,
            foreign_limit_w=books.foreign_limit_w,
            control=task.decision.control,
            curve=self.curve.points,
            micro_batch_size=task.decision.micro_batch_size,
            sensor=gpus.sensor,
        )


def observer_report(task: AttemptTask, gpus: Gpus, observed: Observation) -> str:
    """Return, as a sentence, what the best setting would have saved an attempt that was only observed."""
    control = gpus.control
    if not control.can_set and observed.foreign_limit_w is None:
        one = "power limit" if control.knob is Knob.POWER_LIMIT else "clock"
        return f"no {one} could be tried: {control.why_not}"
    if observed.foreign_limit_w is not None:
        return "what other limits would have saved cannot be told"
    saved = would_have_saved(task.job, observed)
    return saved.sentence if saved else f"{_SEVERAL[control.knob]} are not all measured yet"


_SEVERAL = {Knob.POWER_LIMIT: "power limits", Knob.CLOCKS: "clocks"}


def _foreign(limit_w: float | None) -> str:
    if limit_w is None:
        return ""
    return f"; somebody else set the power limit to {limit_w:g} W meanwhile, so its energy says nothing about ours"
