"""What is decided and what is observed, as frozen records.

State is a fold over these: only decisions and observations are stored; arms, minimum cost, stages and
beliefs are computed from them. Units are suffixes: joules, watts, seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zeus_flows.core.early_stop import Cut, NoCut
from zeus_flows.errors import ConfigError, MeasurementError


class Mode(StrEnum):
    """How much of the job zeus_flows may change."""

    OFF = "off"  # train as ever; measure only
    OBSERVE = "observe"  # profile briefly, train at the previous power limit, report what could be saved
    POWER = "power"  # keep the default batch size, tune the power limit
    FULL = "full"  # tune both


class Selector(StrEnum):
    """What the best power limit, and with it the bandit, minimises."""

    COST = "cost"
    ENERGY = "energy"
    TIME = "time"
    MAX_SLOWDOWN = "max_slowdown"  # least energy among limits at most `slowdown` times slower than the fastest


class Drift(StrEnum):
    """What `thompson` and `lookahead` do about epochs that change over time, beside the window."""

    RESET = "reset"  # forget what was learnt about epochs when a run is too surprising
    DISCOUNT = "discount"  # let every run count a little less with each one after it
    IGNORE = "ignore"


class Knob(StrEnum):
    """What is tuned within an attempt; a setting is one value of it."""

    POWER_LIMIT = "power_limit"  # watts per GPU


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
class Gpu:
    """What an attempt trains on: a GPU model and how many of it.

    Attributes:
        model: The model's name as the device reports it.
        count: GPUs of the data-parallel job (its world size).
        max_power_w: MAXPOWER of eq. 2: the greatest power limit, summed over the GPUs.
    """

    model: str
    count: int
    max_power_w: float

    @property
    def key(self) -> str:
        """What makes two profiles comparable: the model and the world size."""
        return f"{self.model} x{self.count}"


@dataclass(frozen=True, slots=True)
class LimitMeasurement:
    """AvgPower(b, p) and Throughput(b, p) of eq. 5, with throughput in samples per second.

    Attributes:
        begun_s: Seconds measured where training ended before there were enough; None where there were.
    """

    power_limit_w: float
    average_power_w: float
    samples_per_s: float
    begun_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("power_limit_w", "average_power_w", "samples_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise MeasurementError(f"{name} of a power profile must be positive and finite, not {value!r}")


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """Power limit -> average power and throughput, for one (batch size, GPU).

    Only a complete profile defines an arm's epoch cost; a partial one is kept to be completed. A complete one need
    not hold every limit: those that cannot win are not measured.

    Attributes:
        made_with: Major versions it depends on, such as `torch 2, driver 550`; empty where none matter.
        stale_w: Limits whose measurements still serve but are to be measured again.
    """

    batch_size: int
    gpu: Gpu
    measurements: tuple[LimitMeasurement, ...]
    complete: bool = True
    made_with: str = ""
    stale_w: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Energy in joules and time in seconds of something that happened `count` times.

    >>> Part(1, 10.0, 2.0) + Part(2, 5.0, 1.0)
    Part(count=3, energy_j=15.0, time_s=3.0)
    """

    count: float = 0
    energy_j: float = 0.0
    time_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.count < math.inf and 0 <= self.energy_j < math.inf and 0 <= self.time_s < math.inf):
            raise MeasurementError(f"a part of an attempt must be finite and not negative, not {self!r}")

    def __add__(self, other: Part) -> Part:
        return Part(self.count + other.count, self.energy_j + other.energy_j, self.time_s + other.time_s)

    def times(self, factor: float) -> Part:
        """Return so many times this."""
        return Part(self.count * factor, self.energy_j * factor, self.time_s * factor)

    @property
    def each(self) -> Part:
        """One of them, on average; nothing where there was none."""
        return self.times(1 / self.count) if self.count else NO_PART


NO_PART = Part()


@dataclass(frozen=True, slots=True)
class Parts:
    """What an attempt took beside its training steps; the steps took the rest of its energy and time.

    Attributes:
        once: Start-up and compilation: all before the first step, and what the first step took more than others.
        evaluation: Evaluations of the model, by the power limit (per GPU) that was in force.
        rest: Checkpoints, logging, starting a loader: what is left of each epoch.
    """

    once: Part = NO_PART
    evaluation: tuple[tuple[float, Part], ...] = ()
    rest: Part = NO_PART

    @property
    def evaluations(self) -> Part:
        """All evaluations, at whichever limit."""
        return sum((part for _, part in self.evaluation), NO_PART)

    @property
    def together(self) -> Part:
        """All parts in one."""
        return self.once + self.evaluations + self.rest


@dataclass(frozen=True, slots=True)
class Job:
    """What recurs, as far as decisions are concerned. The job file (`zeus_flows.job_file`) makes one.

    Attributes:
        name: Names the MLflow experiment.
        batch_sizes: The arms, ascending.
        default_batch_size: b0, what runs when nothing is known.
        max_epochs: An attempt never trains longer.
        eta: The energy-time knob of eq. 2, 0 (time) to 1 (energy).
        beta: Early stopping at `beta` times the minimum cost.
        window: The newest N observations per arm that count; None: all.
        policy: A name in `zeus_flows.core.policy.POLICIES`.
        selector: What the best power limit minimises; the bandit's objective follows it.
        slowdown: The bound of `Selector.MAX_SLOWDOWN`, at least 1.
        mode: How much may be changed.
        max_attempts: Attempts a recurrence may take before it gives up.
        seed: The job's seed; each decision's seed is derived from it.
        prior: Mean and variance in joules of every arm's cost (Algorithm 2), or None for a flat prior.
        exploration_budget: Share by which cumulative cost may exceed the estimated default's; None: no bound.
        deadline_s: Seconds within which a recurrence must finish; None: no bound.
        fingerprint: Hash of what makes observations comparable.
        translate: Whether epoch costs measured on other GPU models guide the choice on one that lacks them (section 7).
        drift: What is done about epochs that change over time.
        control: One in so many recurrences runs the default, to be compared with; None: none does.
        host_power_w: What the machine draws beside its GPUs, in watts; None: what was measured of it counts.
        in_seconds: Joules mean nothing here (no sensor, or a shared GPU): the cost of a run is its time in seconds.
    """

    name: str
    batch_sizes: tuple[int, ...]
    default_batch_size: int
    max_epochs: int
    eta: float = 0.5
    beta: float = 2.0
    window: int | None = None
    policy: str = "thompson"
    selector: Selector = Selector.COST
    slowdown: float = 1.1
    mode: Mode = Mode.FULL
    max_attempts: int = 4
    seed: int = 0
    prior: tuple[float, float] | None = None
    exploration_budget: float | None = None
    deadline_s: float | None = None
    fingerprint: str = ""
    drift: Drift = Drift.RESET
    translate: bool = True
    control: int | None = None
    host_power_w: float | None = 0.0
    in_seconds: bool = False

    def __post_init__(self) -> None:
        if not self.batch_sizes or tuple(sorted(set(self.batch_sizes))) != self.batch_sizes:
            raise ConfigError(f"batch sizes must be ascending and distinct, not {self.batch_sizes}")
        if self.default_batch_size not in self.batch_sizes:
            raise ConfigError(f"the default batch size {self.default_batch_size} is not among {self.batch_sizes}")

    @property
    def objective_eta(self) -> float:
        """The eta that the bandit's cost uses: it follows the power-limit selector."""
        if self.selector is Selector.COST and not self.in_seconds:
            return self.eta
        return 0.0 if self.in_seconds or self.selector is Selector.TIME else 1.0


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
        out_of_memory: Those of `tried` that did not fit the GPU.
        under_way: Recurrences that had begun and not ended, this one left out.
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


@dataclass(frozen=True, slots=True)
class ArmBelief:
    """What a policy thought of one arm when it decided.

    Attributes:
        batch_size: The arm.
        runs: Runs that reached the target.
        expected_cost_j: Expected cost of a run; None where the policy has no estimate.
        spread: Standard deviation of the log of that cost (relative uncertainty); None where unknown.
        sampled_cost_j: What Thompson sampling drew; None where the policy does not sample.
        status: `untried`, `known`, `stopped`, `pruned`, `dead`, `infeasible`, `out of reach`.
        chance_best: Probability that this arm is the cheapest; None where the policy does not estimate it.
        gain_j: What trying the arm now is expected to save over running the best known one, its own cost
            and what it may teach included; None where the policy does not weigh it.
        noise: Standard deviation of the log of one run's cost around the arm's mean; None where unknown.
        stopped: Runs that were stopped, or ended without reaching the target.
    """

    batch_size: int
    runs: int
    expected_cost_j: float | None = None
    spread: float | None = None
    sampled_cost_j: float | None = None
    status: str = "untried"
    chance_best: float | None = None
    gain_j: float | None = None
    noise: float | None = None
    stopped: int = 0


Explanation = tuple[str, tuple[ArmBelief, ...]]  # a reason's text and arms


class _Told:
    """Room for what tells a reason's text and arms."""

    __slots__ = ("_tell",)


@dataclass(frozen=True, slots=True)
class Reason(_Told):
    """Why this batch size: a word for grouping, a sentence for a person, the numbers behind it.

    >>> reason = Reason.later("exploit", lambda: ("64 is the best known", ()))
    >>> reason == Reason("exploit", "64 is the best known")
    True
    """

    kind: str
    text: str
    arms: tuple[ArmBelief, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def later(cls, kind: str, tell: Callable[[], Explanation], numbers: Mapping[str, float] | None = None) -> Reason:
        """Return a reason whose text and arms are made when first looked at: in a replay, nobody looks at most.

        Args:
            kind: As ever.
            tell: Returns text and arms, the same whenever it is called.
            numbers: As ever.
        """
        reason = object.__new__(cls)
        _set(reason, "kind", kind)
        _set(reason, "numbers", {} if numbers is None else numbers)
        _set(reason, "_tell", tell)
        return reason

    if not TYPE_CHECKING:  # a type checker would take any attribute to exist

        def __getattr__(self, name: str) -> Any:
            if name not in ("text", "arms"):
                raise AttributeError(name)
            text, arms = self._tell()
            _set(self, "text", text)
            _set(self, "arms", arms)
            return text if name == "text" else arms


_set = object.__setattr__  # frozen records, while they are made


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
        out_of_memory: Those of them that did not fit the GPU.
        power_limits_w: Limits the GPU offered.
        folded: How many observations the history had.
        newest: (recurrence, attempt) of the newest of them.
        under_way: Recurrences up to that one that had begun and not ended: their later observations are not in it.
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
        power_limit_w: Train at this limit, per GPU, without profiling (`grid`); None: the profile decides.
        control: The default runs, b0 at the limit that is there, to be compared with.
        mode: How much the job might change; None in records of schema 1.
        asked: What was asked; None in records of schema 1.
        schema: Version of the record.
    """

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
    power_limit_w: float | None = None
    control: bool = False
    mode: Mode | None = None
    asked: Asked | None = None
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Observation:
    """An attempt's single outcome.

    Costs are not stored: they are computed from energy and time, so that a changed eta keeps the history.

    Attributes:
        epochs: Epochs trained (up to the target, where it was reached).
        energy_j: Energy of the attempt, summed over its GPUs; energy to accuracy where it converged.
        time_s: Its training time; time to accuracy where it converged.
        power_limit_w: The limit it settled on, per GPU; None where no limit was applied.
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
        knob: What was tuned; `power_limit_w` is its setting.
        limit_before_w: The limit that was there before, per GPU; None where it is not known.
        control: The default ran, to be compared with.
        curve: The learning curve: (epoch, best metric so far) where that improved, a few of them.
        schema: Version of the record.
    """

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
    power_limit_w: float | None = None
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
    knob: Knob = Knob.POWER_LIMIT
    limit_before_w: float | None = None
    control: bool = False
    curve: tuple[tuple[int, float], ...] = ()
    schema: int = SCHEMA

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
    """Return the observation of an attempt of which nothing was seen: it never began, or nobody is left to tell."""
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
    )


def decision_seed(job_seed: int, recurrence: int, attempt: int) -> int:
    """Return the seed of one decision: a hash, so that it never comes from a clock.

    >>> decision_seed(0, 1, 1) == decision_seed(0, 1, 1) != decision_seed(0, 1, 2)
    True
    """
    digest = hashlib.sha256(f"{job_seed}:{recurrence}:{attempt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def jsonable(record: Any) -> Any:
    """Return a record as plain JSON values, field by field, for stores and `--json`."""
    if isinstance(record, StrEnum):
        return record.value
    if hasattr(record, "__dataclass_fields__"):
        return {name: jsonable(getattr(record, name)) for name in record.__dataclass_fields__}
    if isinstance(record, Mapping):
        return {str(k): jsonable(v) for k, v in record.items()}
    if isinstance(record, (tuple, list)):
        return [jsonable(v) for v in record]
    return record
