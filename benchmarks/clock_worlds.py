"""Simulated jobs whose clocks can be set, by the fitted law of the simulated GPUs or by one that nothing here assumes.

The second law is there so that a search which fits the simulator does not pass for one that works: voltage that rises
with a power of the clock and leaks, kernels bound by clock and memory at once, time that falls faster than 1/f. What
is read has noise, and a sensor that averages over the last second mixes a tenth of the setting before into a span.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zeus_flows.core.clock_model import ClockReading, Model, Objective
from zeus_flows.core.clock_search import SECOND, SLOWEST, Keep, Probe, next_clock
from zeus_flows.gpu.simulated import CHIPS, Chip, Load, Workload

#: Noise of a span's power and time, as shares.
POWER_NOISE, TIME_NOISE = 0.01, 0.003
#: Share of a span that a sensor which averages over 1 s takes from the span before.
LAG = 0.1
STEP_MHZ = 15


@dataclass(frozen=True)
class ClockedJob:
    """A job on a simulated GPU whose clocks can be locked, or whose power can be limited.

    Attributes:
        other: Whether it follows the second law.
    """

    chip: Chip
    load: Load
    other: bool = False

    @cached_property
    def clocks_mhz(self) -> list[float]:
        """What the GPU supports."""
        low, high = self.chip.clocks_mhz
        return [float(mhz) for mhz in range(high, low - 1, -STEP_MHZ)][::-1]

    @cached_property
    def ran_at_mhz(self) -> float:
        """What it runs at where nothing is locked: the greatest power limit may hold it back."""
        return self.chip.clocks_mhz[1] * self._clock_at(self.chip.limits_w[1])

    def at(self, clock_mhz: float) -> ClockReading:
        """Return the truth about a clock."""
        return self._reading(clock_mhz, min(clock_mhz, self.ran_at_mhz) / self.chip.clocks_mhz[1])

    def limited(self, limit_w: float) -> ClockReading:
        """Return the truth about a power limit."""
        f = self._clock_at(limit_w)
        return self._reading(f * self.chip.clocks_mhz[1], f)

    def _reading(self, clock_mhz: float, f: float) -> ClockReading:
        load, f = self.load, max(f, self.chip.slowest)
        waiting_s = (1 - load.active) * load.seconds_per_epoch
        idle_w = self.chip.idle_w
        if self.other:
            memory = load.active - load.clock_bound
            busy, busy_then = (
                ((1.15 * load.clock_bound / x**1.1) ** 3 + memory**3) ** (1 / 3) + 0.25 * memory for x in (f, 1.0)
            )
            time_s = waiting_s + load.active * load.seconds_per_epoch * busy / busy_then
            idle_w *= 0.7 + 0.3 * _voltage(f)
        else:
            time_s = load.seconds_per_epoch * (1 - load.clock_bound + load.clock_bound / f)
        joules = (time_s - waiting_s) * self._active_w(f) + waiting_s * idle_w
        return ClockReading(clock_mhz, joules / time_s, time_s)

    def _active_w(self, f: float) -> float:
        if not self.other:
            return self.chip.active_power_w(self.load, f)
        volt = _voltage(f)
        return self.chip.active_w * (0.5 + 0.5 * volt) + (self.load.full_power_w - self.chip.active_w) * f * volt**2

    def _clock_at(self, limit_w: float) -> float:
        fs = np.linspace(self.chip.slowest, 1.0, 400)
        within = [float(f) for f in fs if self._active_w(float(f)) <= limit_w]
        return max(within, default=self.chip.slowest)


def _voltage(f: float) -> float:
    return 0.62 + 0.38 * float(f**1.8)


def jobs_of(kind: str, data: Path | None, *, other: bool = False) -> list[ClockedJob]:
    """Return the jobs of a simulated GPU: those fitted on published traces where the data has them, else by laws."""
    chip, path = CHIPS[kind], data / "gpu_model" / f"fit_{kind}.json" if data else None
    if path is not None and path.exists():
        fitted = json.loads(path.read_text(encoding="utf-8"))["jobs"]
        return [ClockedJob(chip, Load(j["T0"], j["Pd"], j["u"], j["b"]), other) for j in fitted]
    laws = [(6, 0.9, 0.9), (22, 0.8, 0.5), (250, 0.75, 0.1), (2500, 0.75, 0.1)]
    return [
        ClockedJob(chip, Workload(60.0, half, most, least).at(batch_size, chip), other)
        for half, most, least in laws
        for batch_size in (8, 32, 128, 512, 2048)
    ]


# -- searching -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Searched:
    """What a search came to; energy and time are the truth at the clock it kept.

    Attributes:
        saved: Energy against the default, as a share of it.
        behind: Energy above that of exhaustive search, as a share of the default's.
        slower: Time against the default, as a share.
        dearer: What the kept clock costs above the default by the objective, as a share; negative where it is cheaper.
        dearer_than_best: The same above exhaustive search.
        probes: Readings taken.
    """

    saved: float
    behind: float
    slower: float
    dearer: float
    dearer_than_best: float
    probes: int


def search(
    job: ClockedJob, objective: Objective, rng: np.random.Generator, model: Model | None, *, noise: float = 1.0
) -> Searched:
    """Search a job's clocks with noisy readings: so many times the usual noise."""
    readings: list[ClockReading] = []
    before_w = 0.0
    step = next_clock(readings, job.clocks_mhz, objective, ran_at_mhz=job.ran_at_mhz, model=model)
    while isinstance(step, Probe):
        true = job.at(step.clock_mhz)
        power_w = true.power_w if not (job.other and readings) else (1 - LAG) * true.power_w + LAG * before_w
        before_w = true.power_w
        power_w *= 1 + noise * POWER_NOISE * rng.standard_normal()
        time_s = true.time_s * (1 + noise * TIME_NOISE * rng.standard_normal())
        readings.append(ClockReading(step.clock_mhz, power_w, time_s))
        step = next_clock(readings, job.clocks_mhz, objective, ran_at_mhz=job.ran_at_mhz, model=model)
    default = job.at(job.clocks_mhz[-1])
    kept = job.at(step.clock_mhz) if isinstance(step, Keep) else default
    best = exhaustive(job, objective)
    return Searched(
        saved=1 - kept.energy_j / default.energy_j,
        behind=(kept.energy_j - best.energy_j) / default.energy_j,
        slower=kept.time_s / default.time_s - 1,
        dearer=objective.of(kept) / objective.of(default) - 1,
        dearer_than_best=objective.of(kept) / objective.of(best) - 1,
        probes=len(readings),
    )


def exhaustive(job: ClockedJob, objective: Objective) -> ClockReading:
    """Return the truth about the best clock."""
    default = job.at(job.clocks_mhz[-1])
    return objective.best([job.at(mhz) for mhz in job.clocks_mhz if mhz >= SLOWEST * job.ran_at_mhz], default)


def best_limit(job: ClockedJob, slowdown: float) -> ClockReading:
    """Return the truth about the power limit of least energy within a slowdown, in steps of 5 W."""
    low, high = job.chip.limits_w
    default = job.limited(high)
    return Objective(slowdown=slowdown).best([job.limited(w) for w in np.arange(low, high, 5.0)], default)


# -- boosted trees, the peer -----------------------------------------------------------------------------------------


def trees(kinds: Iterable[str], *, jobs: int = 300, seed: int = 0) -> Callable[[ClockedJob], Model]:
    """Return gradient-boosted trees trained on made-up jobs of some simulated GPUs, as GPOEO has them.

    Features are power over limit, utilisation, the clock that the default ran at, and the ratios of time and power of
    the two readings. What is returned makes a model for a job, whose limit and utilisation can be seen.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor as Trees

    rng = np.random.default_rng(seed)
    rows: list[list[float]] = []
    targets: list[tuple[float, float]] = []
    for job in _made_up(kinds, jobs, rng):
        default, second = job.at(job.clocks_mhz[-1]), job.at(SECOND * job.ran_at_mhz)
        noisy = [
            ClockReading(r.clock_mhz, r.power_w * (1 + POWER_NOISE * a), r.time_s * (1 + TIME_NOISE * b))
            for r, (a, b) in zip((default, second), rng.standard_normal((2, 2)), strict=True)
        ]
        for f in np.linspace(SLOWEST, 1.0, 25):
            true = job.at(float(f) * job.ran_at_mhz)
            rows.append([float(f), *_features(job, *noisy)])
            targets.append((true.time_s / default.time_s, true.energy_j / default.energy_j))
    options: dict[str, Any] = {"max_iter": 150, "learning_rate": 0.08, "max_depth": 5, "random_state": 0}
    x, y = np.array(rows), np.array(targets)
    time_of = Trees(monotonic_cst=[-1, *[0] * (x.shape[1] - 1)], **options).fit(x, y[:, 0])
    energy_of = Trees(**options).fit(x, y[:, 1])

    def for_job(job: ClockedJob) -> Model:
        def model(
            default: ClockReading, second: ClockReading, clocks_mhz: Sequence[float], ran_at_mhz: float
        ) -> list[ClockReading]:
            features = _features(job, default, second)
            asked = np.array([[mhz / ran_at_mhz, *features] for mhz in clocks_mhz])
            return [
                ClockReading(mhz, default.power_w * energy / time, default.time_s * time)
                for mhz, time, energy in zip(clocks_mhz, time_of.predict(asked), energy_of.predict(asked), strict=True)
            ]

        return model

    return for_job


def _made_up(kinds: Iterable[str], count: int, rng: np.random.Generator) -> Iterator[ClockedJob]:
    for kind in kinds:
        chip = CHIPS[kind]
        for active, bound, power in zip(
            rng.uniform(0.1, 0.97, count), rng.uniform(0.1, 0.65, count), rng.uniform(0, 1.1, count), strict=True
        ):
            full_w = chip.active_w + power * (chip.limits_w[1] - chip.active_w)
            yield ClockedJob(chip, Load(1.0, float(full_w), float(active), float(active * bound)))


def _features(job: ClockedJob, default: ClockReading, second: ClockReading) -> list[float]:
    waiting_s = (1 - job.load.active) * job.load.seconds_per_epoch
    return [
        default.power_w / job.chip.limits_w[1],
        round(1 - waiting_s / job.at(job.clocks_mhz[-1]).time_s, 2),
        job.ran_at_mhz / job.clocks_mhz[-1],
        second.time_s / default.time_s,
        second.power_w / default.power_w,
    ]
