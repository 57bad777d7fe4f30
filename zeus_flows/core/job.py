"""What recurs, as far as decisions are concerned."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from zeus_flows.core.ready_by import ReadyBy
from zeus_flows.errors import ConfigError


class Mode(StrEnum):
    """How much of the job zeus_flows may change."""

    OFF = "off"  # train as ever; measure only
    OBSERVE = "observe"  # profile briefly, train at the previous power limit, report what could be saved
    POWER = "power"  # keep the default batch size, tune the power limit
    FULL = "full"  # tune both


@dataclass(frozen=True, slots=True)
class Rollout:
    """How a job's mode grows: so many recurrences in `observe`, then so many in `power`, then as the job says."""

    observe: int = 0
    power: int = 0


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


class WindowOf(StrEnum):
    """Whose newest observations `Job.window` counts."""

    ARM = "arm"  # of each batch size, as the published package does
    JOB = "job"  # of all batch sizes together, as section 4.4 reads


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
        window: The newest N observations that count; None: all.
        window_of: Whether those are N of each arm or N of the job.
        policy: A name in `zeus_flows.core.policy.POLICIES`.
        selector: What the best power limit minimises; the bandit's objective follows it.
        slowdown: The bound of `Selector.MAX_SLOWDOWN`, at least 1.
        mode: How much may be changed; a roll-out may allow less (`zeus_flows.core.rollout`).
        mode_why: Whose word the mode is; empty where it is the job file's own.
        rollout: How the mode grows with the recurrences; None: it is the same in all.
        max_attempts: Attempts a recurrence may take before it gives up.
        seed: The job's seed; each decision's seed is derived from it.
        prior: Mean and variance in joules of every arm's cost (Algorithm 2), or None for a flat prior.
        exploration_budget: Share by which cumulative cost may exceed the estimated default's; None: no bound.
        deadline_s: Seconds within which a recurrence must finish; None: no bound.
        ready_by: The time of day by which it must have finished; None: no bound.
        fingerprint: Hash of what makes observations comparable.
        translate: Whether epoch costs measured on other GPU models guide the choice on one that lacks them (section 7).
        drift: What is done about epochs that change over time.
        control: One in so many recurrences runs the default, to be compared with; None: none does.
        host_power_w: What the machine draws beside its GPUs, in watts; None: what was measured of it counts.
        accumulate: Whether a batch size that does not fit a GPU's memory is trained in micro-batches, not left alone.
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
    window_of: WindowOf = WindowOf.ARM
    accumulate: bool = False
    mode_why: str = ""
    rollout: Rollout | None = None
    ready_by: ReadyBy | None = None

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
