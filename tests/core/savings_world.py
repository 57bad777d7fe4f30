"""A simulated job whose truth is known: what every batch size takes in expectation, and what the default would have.

Nothing in here asks the code under test what a run costs. Policies, cuts and the loop of a recurrence are the real
ones, and so is the fold that savings are told from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache

import numpy as np
from scipy.special import ndtr

from zeus_flows.core import policy
from zeus_flows.core.attempt import AttemptFailed, EpochReport
from zeus_flows.core.belief import EpochsBelief
from zeus_flows.core.early_stop import epochs_allowed
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power_profile import Gpu, Part, Parts, PowerProfile, SettingMeasurement
from zeus_flows.core.records import Decision, EnergySource, Observation, Outcome
from zeus_flows.core.savings import Account, Savings
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import run_recurrence
from zeus_flows.recurrence.steps import LocalSteps

GPU = Gpu("V100", 1, 250.0)
ARMS = (16, 32, 64, 128, 256)
B0 = 64
LIMITS = (100.0, 125.0, 150.0, 175.0, 200.0, 225.0, 250.0)
IDLE_W = 40.0
MAX_EPOCHS = 1_000
CHECKPOINT = Part(1, 0.5 * IDLE_W, 0.5)

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]  # energy (GPU and host), time, cost


@cache
def true_profile(batch_size: int) -> PowerProfile:
    """Power and throughput at every limit."""
    full = batch_size / (batch_size + 40)
    measured = []
    for limit in LIMITS:
        draws = min(limit, IDLE_W + 270 * full**0.5)
        measured.append(SettingMeasurement(limit, draws, 3_000 * full * ((draws - IDLE_W) / 210) ** 0.45))
    return PowerProfile(batch_size, GPU, tuple(measured))


@lru_cache(maxsize=64)
def measured_profile(batch_size: int, seed: int) -> PowerProfile:
    """The same as a few seconds of measuring make it."""
    off = np.exp(0.01 * np.random.default_rng([seed, 4, batch_size]).normal(size=(len(LIMITS), 2)))
    true = true_profile(batch_size)
    measured = [
        SettingMeasurement(m.setting, m.average_power_w * float(w), m.samples_per_s * float(s))
        for m, (w, s) in zip(true.measurements, off, strict=True)
    ]
    return replace(true, measurements=tuple(measured))


@lru_cache(maxsize=64)
def mean_of_whole(median: float, scatter: float) -> float:
    """Return the expectation of lognormal epochs, rounded to whole ones and to 1 at least."""
    k = np.arange(2, 2_000)
    return 1 + float((1 - ndtr(np.log((k - 0.5) / median) / scatter)).sum())


@cache
def one_evaluation(batch_size: int, limit_w: float) -> Part:
    """What an evaluation takes: it is busy for a while, which a limit slows down, and waits for a while."""
    measured = true_profile(batch_size).measurements
    at, free = measured[LIMITS.index(limit_w)], measured[LIMITS.index(250.0)]
    busy_s, waiting_s = 3.0 * free.samples_per_s / at.samples_per_s, 1.0
    return Part(1, busy_s * at.average_power_w + waiting_s * IDLE_W, busy_s + waiting_s)


@dataclass(frozen=True)
class World:
    """What is true of one job."""

    seed: int
    policy: str = "thompson"
    recurrences: int = 50
    scatter: float = 0.1
    drift_at: int | None = None
    drift: float = 1.0
    growth: float = 0.0
    failures: float = 0.0
    control: int | None = None
    before_w: float = 250.0
    host_w: float = 0.0
    eta: float = 0.5
    epochs: dict[int, float] = field(default_factory=dict)
    best_limits_w: dict[tuple[int, float], float] = field(default_factory=dict, init=False, compare=False)

    @classmethod
    def drawn(cls, seed: int) -> World:
        """Return a job as chance has it."""
        rng = np.random.default_rng([seed, 1])
        policy = str(rng.choice(["thompson"] * 4 + ["lookahead"] * 2 + ["zeus"] * 4 + ["power"]))
        learns = policy in ("thompson", "lookahead")
        level, bend = math.exp(rng.uniform(math.log(15), math.log(80))), rng.uniform(0.05, 0.25)
        valley = float(rng.choice([-1, 1, 1])) * rng.uniform(0.5, 2.5)
        octaves = {b: math.log2(b / B0) for b in ARMS}
        recurrences = int(rng.integers(25, 60))
        return cls(
            seed=seed,
            policy=policy,
            recurrences=recurrences,
            scatter=math.exp(rng.uniform(math.log(0.04), math.log(0.2))),
            drift_at=int(rng.integers(12, recurrences - 8)) if learns and rng.random() < 0.4 else None,
            drift=float(rng.choice([0.5, 1.8, 2.5])),
            growth=float(rng.choice([0.0, 0.0, 0.01])),
            failures=float(rng.choice([0.0, 0.05])),
            control=int(rng.choice([10, 20])) if rng.random() < 0.3 else None,
            before_w=float(rng.choice([250.0, 225.0])),
            host_w=float(rng.choice([0.0, 90.0])),
            eta=float(rng.choice([0.5, 0.5, 1.0, 0.2])),
            epochs={b: level * math.exp(bend * (d - valley) ** 2) for b, d in octaves.items()},
        )

    @property
    def job(self) -> Job:
        """What recurs."""
        return Job(
            "t",
            ARMS,
            B0,
            MAX_EPOCHS,
            eta=self.eta,
            policy=self.policy,
            seed=self.seed,
            control=self.control,
            host_power_w=self.host_w,
        )

    def samples(self, recurrence: int) -> int:
        """Training samples in an epoch."""
        return round(50_000 * (1 + self.growth * recurrence))

    def level(self, recurrence: int) -> float:
        """What drift has made of the epochs."""
        return self.drift if self.drift_at is not None and recurrence >= self.drift_at else 1.0

    def needed(self, batch_size: int, recurrence: int) -> int:
        """Epochs to the target; the luck of a recurrence is the same at every batch size."""
        luck = np.random.default_rng([self.seed, 2, recurrence]).normal()
        return max(1, round(self.epochs[batch_size] * self.level(recurrence) * math.exp(self.scatter * luck)))

    def mean_epochs(self, batch_size: int, recurrence: int) -> float:
        """Their expectation, whole epochs and all."""
        return mean_of_whole(self.epochs[batch_size] * self.level(recurrence), self.scatter)

    def at(self, batch_size: int, limit_w: float) -> SettingMeasurement:
        """Power and throughput at one of them."""
        return true_profile(batch_size).measurements[LIMITS.index(limit_w)]

    def parts(self, batch_size: int, limit_w: float, epochs: float) -> Parts:
        """What a run takes beside its steps: a start, and for each epoch an evaluation and a checkpoint."""
        evaluation = one_evaluation(batch_size, limit_w)
        return Parts(Part(1, 20 * IDLE_W, 20.0), ((limit_w, evaluation.times(epochs)),), CHECKPOINT.times(epochs))

    def run(self, batch_size: int, limit_w: float, epochs: float, samples: float) -> Part:
        """Return what a run takes, GPU only."""
        at, beside = self.at(batch_size, limit_w), self.parts(batch_size, limit_w, epochs).together
        time_s = epochs * samples / at.samples_per_s
        return Part(1, time_s * at.average_power_w + beside.energy_j, time_s + beside.time_s)

    def steps(self, batch_size: int, limit_w: float, samples: float) -> Part:
        """Return what training on so many samples takes; GPU only."""
        at = self.at(batch_size, limit_w)
        return Part(0, samples / at.samples_per_s * at.average_power_w, samples / at.samples_per_s)

    def more_by_profiling(self, batch_size: int, limit_w: float, samples: float) -> Part:
        """Return what an epoch that goes through all limits takes more than one at the best; GPU only."""
        plain = self.steps(batch_size, limit_w, samples)
        all_limits = sum((self.steps(batch_size, w, samples / len(LIMITS)) for w in LIMITS), Part())
        return Part(0, max(all_limits.energy_j - plain.energy_j, 0.0), max(all_limits.time_s - plain.time_s, 0.0))

    def profiling(self, batch_size: int, limit_w: float, samples: float) -> Vector:
        """Return energy, time and cost of that."""
        more = self.more_by_profiling(batch_size, limit_w, samples)
        return self.figures(more.energy_j, more.time_s)

    def figures(self, energy_j: float, time_s: float) -> Vector:
        """Return energy with the host's, time and cost."""
        all_j = energy_j + self.host_w * time_s
        return np.array([all_j, time_s, self.eta * all_j + (1 - self.eta) * GPU.max_power_w * time_s])

    def costs(self, batch_size: int, limit_w: float, epochs: float, samples: float) -> Vector:
        """Return energy, time and cost of a run."""
        run = self.run(batch_size, limit_w, epochs, samples)
        return self.figures(run.energy_j, run.time_s)

    def expected(self, batch_size: int, limit_w: float, recurrence: int) -> Vector:
        """Return D(b, p) in one recurrence."""
        return self.costs(batch_size, limit_w, self.mean_epochs(batch_size, recurrence), self.samples(recurrence))

    def best_w(self, batch_size: int, samples: float) -> float:
        """Return the limit at which an epoch costs least by what was measured; found once and kept."""
        if (batch_size, samples) in self.best_limits_w:
            return self.best_limits_w[batch_size, samples]

        def cost(m: SettingMeasurement) -> tuple[float, float]:
            evaluation = one_evaluation(batch_size, m.setting)
            time_s = samples / m.samples_per_s + evaluation.time_s + CHECKPOINT.time_s
            energy_j = samples / m.samples_per_s * m.average_power_w + evaluation.energy_j + CHECKPOINT.energy_j
            return float(self.figures(energy_j, time_s)[2]), -m.setting

        found = min(measured_profile(batch_size, self.seed).measurements, key=cost).setting
        self.best_limits_w[batch_size, samples] = found
        return found


class Simulated:
    """A trainer that does what is true of the world."""

    gpu, energy_source, power_limits_w = GPU, EnergySource.SIMULATED, LIMITS

    def __init__(self, world: World) -> None:
        self.world = world
        self._rng = np.random.default_rng([world.seed, 3])

    def train(
        self,
        job: Job,
        decision: Decision,
        profile: PowerProfile | None,
        report: Callable[[EpochReport], None],
        *,
        overheads: Overheads = NOTHING,
        attempt_id: str = "",
    ) -> Observation:
        """Return how an attempt goes."""
        world, b, number = self.world, decision.batch_size, decision.recurrence
        samples, needed = world.samples(number), world.needed(b, number)
        best_w = world.best_w(b, samples)
        tuned = decision.tune_power and not decision.control
        limit_w = best_w if tuned else world.before_w
        profiles = tuned and profile is None
        one = world.costs(b, best_w, 1, samples) - world.costs(b, best_w, 0, samples)
        allowed = epochs_allowed(decision.cut, epoch_cost_j=float(one[2]), max_epochs=MAX_EPOCHS)
        epochs = max(min(needed, allowed), 1)
        reached = epochs == needed
        parts, took = world.parts(b, limit_w, epochs), world.run(b, limit_w, epochs, samples)
        spent = Part()
        if profiles:
            more, first = world.more_by_profiling(b, limit_w, samples), world.steps(b, limit_w, samples)
            took, spent = took + more, first + more
        noise = math.exp(0.005 * self._rng.normal())
        made = Observation(
            recurrence=number,
            attempt=decision.attempt,
            batch_size=b,
            outcome=Outcome.CONVERGED if reached else Outcome.STOPPED,
            epochs=epochs,
            energy_j=took.energy_j * noise,
            time_s=took.time_s,
            gpu=GPU,
            energy_source=self.energy_source,
            samples_per_epoch=samples,
            setting=limit_w if tuned else None,
            profile=measured_profile(b, world.seed) if profiles else None,
            profiling_energy_j=spent.energy_j,
            profiling_time_s=spent.time_s,
            parts=parts,
            host_energy_j=world.host_w * took.time_s,
            setting_before=world.before_w,
            control=decision.control,
        )
        if self._rng.random() >= world.failures:
            return made
        share = self._rng.random()
        broken = replace(
            made,
            outcome=Outcome.FAILED,
            energy_j=share * made.energy_j,
            time_s=share * made.time_s,
            host_energy_j=share * made.host_energy_j,
            profile=None,
            profiling_energy_j=0.0,
            profiling_time_s=0.0,
        )
        if self._rng.random() < 0.5:
            return broken
        raise AttemptFailed(broken) from RuntimeError("lost the GPU")


@dataclass
class History:
    """What happened in a world, and what is true of it."""

    world: World
    saved: Savings
    account: Account
    eras: list[tuple[list[tuple[Observation, ...]], int | None]]

    @cached_property
    def truth(self) -> dict[str, Vector]:
        """Return the lines and the total as they are, for the recurrences that are compared."""
        world = self.world
        lines = {name: np.zeros(3) for name in ("power limit", "batch size", "learning", "total", "power only")}
        for recurrences, best in self.eras:
            if best is None:
                continue
            for attempts in recurrences:
                self._add(lines, world, attempts, best)
        lines["luck"] = lines["total"] - lines["power limit"] - lines["batch size"] - lines["learning"]
        return lines

    @staticmethod
    def _add(lines: dict[str, Vector], world: World, attempts: tuple[Observation, ...], best: int) -> None:
        run = attempts[-1]
        number, samples, b = run.recurrence, run.samples_per_epoch, run.batch_size
        stopped = [o for o in attempts[:-1] if o.outcome is not Outcome.FAILED]
        actual, beside = (
            sum((world.figures(o.energy_j, o.time_s) for o in of), np.zeros(3)) for of in ([run], stopped)
        )
        limit_w = run.setting or world.before_w
        plain = world.costs(b, limit_w, run.epochs, samples)
        profiling = world.profiling(b, limit_w, samples) if run.profile is not None else np.zeros(3)
        lines["learning"] -= beside + profiling
        if b == B0 and run.setting is None:
            lines["total"] -= beside + profiling
            lines["power only"] -= beside + profiling
            return
        ours = beside + (plain + profiling if b == B0 else actual)  # readings err alike
        for name, default_w in (("total", world.before_w), ("power only", world.best_w(B0, samples))):
            lines[name] += world.costs(B0, default_w, world.needed(B0, number), samples) - ours
        before = world.expected(B0, world.before_w, number)
        at_best = world.expected(B0, world.best_w(B0, samples), number)
        cheapest = world.expected(best, world.best_w(best, samples), number)
        lines["power limit"] += before - at_best
        lines["batch size"] += at_best - cheapest
        lines["learning"] += cheapest - world.expected(b, limit_w, number)


class WatchedLedger(MemoryLedger):
    """Keeps, of each observation, the state before it and after it."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, EnergySource.SIMULATED)
        self.learnt: list[tuple[Observation, policy.State, policy.State]] = []

    def observed(self, attempt_id: str, observation: Observation) -> None:
        """Write an attempt's outcome."""
        before = self.history().state
        super().observed(attempt_id, observation)
        self.learnt.append((observation, before, self.history().state))


def live(world: World) -> History:
    """Let a world run: real policies, and the fold that production keeps beside them."""
    job = world.job
    ledger = WatchedLedger(job)
    steps = LocalSteps(job, ledger, Simulated(world))
    eras: list[tuple[list[tuple[Observation, ...]], int | None]] = []
    era: list[tuple[Observation, ...]] = []
    pending: list[Observation] = []

    def best(of: policy.State, *, without_newest: bool = False) -> int | None:
        assert of.account is not None
        known = replace(of.account, newest=None) if without_newest else of.account
        return policy.saved(job, replace(of, account=known)).default.best_batch_size

    for _ in range(world.recurrences):
        with suppress(RuntimeError):  # lost the GPU
            run_recurrence(job, steps)
        for o, before, state in ledger.learnt:
            if pending and pending[-1].recurrence != o.recurrence:
                pending = []
            pending.append(o)
            if isinstance(state.belief, EpochsBelief) and state.belief.resets > before.belief.resets:
                moved = [era.pop()] if sum(state.belief.runs) >= 2 and era else []
                eras.append((era, best(before, without_newest=bool(moved))))
                era = moved
            if o.converged:
                era.append(tuple(pending))
                pending = []
        ledger.learnt.clear()
    state = ledger.history().state
    eras.append((era, best(state)))
    assert state.account is not None
    return History(world, policy.saved(job, state), state.account, eras)
