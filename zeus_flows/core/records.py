"""What is decided and what is observed, as frozen records.

State is a fold over these: only decisions and observations are stored; arms, minimum cost, stages and
beliefs are computed from them. Units are suffixes: joules, watts, seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from zeus_flows.core.early_stop import Cut, NoCut
from zeus_flows.core.job import Mode
from zeus_flows.core.power_profile import Gpu, Knob, Parts, PowerProfile
from zeus_flows.core.reasons import Reason
from zeus_flows.errors import MeasurementError


class EnergySource(StrEnum):
    """Where joules come from. Observations from different sources are never mixed."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    NONE = "none"  # energy means nothing here (shared GPU); the job runs on time alone


class Outcome(StrEnum):
    """How an attempt ended."""

    CONVERGED = "converged"  # reached the target
    STOPPED = "stopped"  # stopped before an epoch that would have crossed the cut: right-censored
    EXHAUSTED = "exhausted"  # trained max_epochs without reaching the target
    DIVERGED = "diverged"  # the metric became NaN
    OUT_OF_MEMORY = "out_of_memory"  # this batch size does not fit this GPU
    FAILED = "failed"  # crash, lost GPU, cancellation, kill: says nothing about the arm

    @property
    def blames_the_arm(self) -> bool:
        """Whether the outcome says something about the batch size."""
        return self is not Outcome.FAILED


@dataclass(frozen=True, slots=True)
class InFlight:
    """An attempt of another recurrence that has its decision and no observation yet."""

    recurrence: int
    attempt: int
    batch_size: int
    explores: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """What a policy is asked: which attempt, on which GPU, with whose draws.

    Attributes:
        recurrence: Number of the recurrence, from 1.
        attempt: Number of the attempt within it, from 1; above 1 an earlier one did not converge.
        seed: All the randomness of the decision; see `decision_seed`.
        gpu: What the attempt will train on; None when it is not known yet.
        samples_per_epoch: Size of the data set, so that per-sample profiles give epoch costs.
        in_flight: Attempts of other recurrences that are under way.
        tried: Batch sizes of this recurrence's earlier attempts.
        power_limits_w: Limits the GPU offers, per GPU; only `grid` wants them.
        out_of_memory: What of `tried` did not fit the GPU: batch sizes, or micro-batches where it was one.
        under_way: Recurrences that had begun and not ended, this one left out.
        ran_out: How many attempts right before this one ran out of memory.
        seconds_left: Until the model must be ready, by the clock of whoever asks; None where the job has no such time.
    """

    recurrence: int
    attempt: int
    seed: int
    gpu: Gpu | None = None
    samples_per_epoch: int | None = None
    in_flight: tuple[InFlight, ...] = ()
    tried: tuple[int, ...] = ()
    power_limits_w: tuple[float, ...] = ()
    out_of_memory: tuple[int, ...] = ()
    under_way: tuple[int, ...] = ()
    ran_out: int = 0
    seconds_left: float | None = None


#: Version of the records as they are stored. Older ones are read for ever.
SCHEMA = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """What a decision was asked and what it knew, so that it can be made again from the runs.

    Attributes:
        gpu: What the attempt would train on.
        samples_per_epoch: Size of the data set, where it was known.
        in_flight: Attempts of other recurrences that were under way.
        tried: Batch sizes of this recurrence's earlier attempts.
        out_of_memory: What of them did not fit the GPU.
        power_limits_w: Limits the GPU offered.
        folded: How many observations the history had.
        newest: (recurrence, attempt) of the newest of them.
        under_way: Recurrences up to that one that had begun and not ended: their later observations are not in it.
        ran_out: How many attempts right before this one ran out of memory.
        mode_why: Whose word the decision's mode is; empty where it is the job file's own.
        seconds_left: Until the model had to be ready; None where the job has no such time.
    """

    gpu: Gpu | None = None
    samples_per_epoch: int | None = None
    in_flight: tuple[InFlight, ...] = ()
    tried: tuple[int, ...] = ()
    out_of_memory: tuple[int, ...] = ()
    power_limits_w: tuple[float, ...] = ()
    folded: int = 0
    newest: tuple[int, int] = (0, 0)
    under_way: tuple[int, ...] = ()
    ran_out: int = 0
    mode_why: str = ""
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """An arm, why, and when to stop it; written before training starts.

    Attributes:
        batch_size: The arm to run.
        reason: Why.
        seed: The seed the draws came from.
        cut: When to stop the attempt; `core.early_stop` turns it into a number of epochs.
        explores: Whether the attempt is there to learn rather than to exploit the best known arm.
        degraded: The history could not be read; the default batch size stands in.
        tune_power: Whether the best power limit may be looked for and applied; False: train at the limit the
            GPU has.
        setting: Train at this setting of the knob, per GPU, without profiling (`grid`); None: the profile decides.
        control: The default runs, b0 at the limit that is there, to be compared with.
        mode: How much the job might change; None in records of schema 1.
        asked: What was asked; None in records of schema 1.
        schema: Version of the record.
        micro_batch_size: Samples that go through the GPUs at once, gradients of several being added up; None: the
            whole batch.
    """

    formerly: ClassVar[Mapping[str, str]] = {"setting": "power_limit_w"}

    recurrence: int
    attempt: int
    batch_size: int
    reason: Reason
    seed: int
    policy: str
    cut: Cut = field(default_factory=NoCut)
    explores: bool = False
    degraded: bool = False
    tune_power: bool = True
    setting: float | None = None
    control: bool = False
    mode: Mode | None = None
    asked: Asked | None = None
    schema: int = SCHEMA
    micro_batch_size: int | None = None

    @property
    def knob(self) -> Knob:
        """What is tuned."""
        gpu = self.asked.gpu if self.asked is not None else None
        return gpu.knob if gpu is not None else Knob.POWER_LIMIT

    @property
    def micro(self) -> int:
        """Samples that go through the GPUs at once."""
        return self.micro_batch_size or self.batch_size


@dataclass(frozen=True, slots=True)
class Observation:
    """An attempt's single outcome.

    Costs are not stored: they are computed from energy and time, so that a changed eta keeps the history.

    Attributes:
        epochs: Epochs trained (up to the target, where it was reached).
        energy_j: Energy of the attempt, summed over its GPUs; energy to accuracy where it converged.
        time_s: Its training time; time to accuracy where it converged.
        setting: The setting of the knob that it settled on, per GPU; None where none was applied.
        profiling_energy_j: The part of `energy_j` spent while profiling.
        profiling_time_s: The part of `time_s` spent while profiling; above 0 where this attempt profiled.
        samples_per_epoch: Training samples in an epoch.
        epochs_allowed: What the cut came to once the epoch cost was known; None where it never was.
        metric: The last metric reported.
        energy_complete: False where a reading failed: kept, shown, and kept from the bandit.
        explores: Copied from the decision.
        detail: A sentence about how it ended, for people.
        traceback: Where the train function broke; empty where it did not.
        parts: What it took beside its training steps; None where that was not measured (schema 1).
        host_energy_j: What the machine drew beside its GPUs meanwhile; not part of `energy_j`.
        mode: How much the job might change; None in records of schema 1.
        setting_before: The setting that was there before, per GPU; None where it is not known.
        foreign_limit_w: The power limit that somebody else set meanwhile; then `energy_j` and `time_s` were spent, and
            are not those of `setting`. None where nobody did.
        control: The default ran, to be compared with.
        curve: The learning curve: (epoch, best metric so far) where that improved, a few of them.
        schema: Version of the record.
        micro_batch_size: Copied from the decision.
        sensor: How joules were had: `counter`, `sampled power`, `model`, `none`; empty in older records.
    """

    formerly: ClassVar[Mapping[str, str]] = {"setting": "power_limit_w", "setting_before": "limit_before_w"}

    recurrence: int
    attempt: int
    batch_size: int
    outcome: Outcome
    epochs: int
    energy_j: float
    time_s: float
    gpu: Gpu
    energy_source: EnergySource
    samples_per_epoch: int
    setting: float | None = None
    profile: PowerProfile | None = None
    profiling_energy_j: float = 0.0
    profiling_time_s: float = 0.0
    epochs_allowed: int | None = None
    metric: float | None = None
    energy_complete: bool = True
    explores: bool = False
    fingerprint: str = ""
    detail: str = ""
    traceback: str = ""
    parts: Parts | None = None
    host_energy_j: float = 0.0
    mode: Mode | None = None
    setting_before: float | None = None
    foreign_limit_w: float | None = None
    control: bool = False
    curve: tuple[tuple[int, float], ...] = ()
    schema: int = SCHEMA
    micro_batch_size: int | None = None
    sensor: str = ""

    def __post_init__(self) -> None:
        believable = (
            0 <= self.energy_j < math.inf
            and 0 <= self.time_s < math.inf
            and 0 <= self.profiling_energy_j < math.inf
            and 0 <= self.profiling_time_s < math.inf
            and 0 <= self.host_energy_j < math.inf
        )
        if not believable:
            names = ("energy_j", "time_s", "profiling_energy_j", "profiling_time_s", "host_energy_j")
            name = next(n for n in names if not 0 <= getattr(self, n) < math.inf)
            raise MeasurementError(f"{name} must be finite and not negative, not {getattr(self, name)!r}")
        if self.epochs < 0:
            raise MeasurementError(f"epochs must not be negative, not {self.epochs}")

    @property
    def converged(self) -> bool:
        """Whether the attempt reached the target."""
        return self.outcome is Outcome.CONVERGED

    @property
    def knob(self) -> Knob:
        """What was tuned."""
        return self.gpu.knob

    @property
    def micro(self) -> int:
        """Samples that went through the GPUs at once."""
        return self.micro_batch_size or self.batch_size

    @property
    def order(self) -> tuple[int, int]:
        """The fold's order, whatever order reports arrive in."""
        return (self.recurrence, self.attempt)


@dataclass(frozen=True, slots=True)
class Gap:
    """A recurrence that ended without an observation that counts.

    Attributes:
        recurrence: Which.
        skipped: A drift gate skipped it; otherwise its process was killed.
        time_s: What asking the gate took.
        energy_j: The same, where it was measured.
    """

    recurrence: int
    skipped: bool
    time_s: float = 0.0
    energy_j: float = 0.0


def unobserved(
    decision: Decision,
    *,
    gpu: Gpu,
    energy_source: EnergySource,
    fingerprint: str,
    detail: str,
    energy_complete: bool = True,
) -> Observation:
    """Return the observation of an attempt that was not observed: it never began, or its process died."""
    return Observation(
        recurrence=decision.recurrence,
        attempt=decision.attempt,
        batch_size=decision.batch_size,
        outcome=Outcome.FAILED,
        epochs=0,
        energy_j=0.0,
        time_s=0.0,
        gpu=gpu,
        energy_source=energy_source,
        samples_per_epoch=0,
        energy_complete=energy_complete,
        explores=decision.explores,
        fingerprint=fingerprint,
        detail=detail,
        mode=decision.mode,
        control=decision.control,
        micro_batch_size=decision.micro_batch_size,
    )


def in_parts(of: Decision | Observation) -> str:
    """Return a batch size for people: as it is, or as the micro-batches that it is made up of, such as `4x64`."""
    return f"{of.batch_size}" if of.micro == of.batch_size else f"{of.batch_size // of.micro}x{of.micro}"


def decision_seed(job_seed: int, recurrence: int, attempt: int) -> int:
    """Return the seed of one decision: a hash, so that it never comes from a clock.

    >>> decision_seed(0, 1, 1) == decision_seed(0, 1, 1) != decision_seed(0, 1, 2)
    True
    """
    digest = hashlib.sha256(f"{job_seed}:{recurrence}:{attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
