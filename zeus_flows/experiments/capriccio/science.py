"""What the slices can tell: the best arm of each, exact regret, intervals, a placebo, and the detector on trial.

On a simulated GPU every batch size is trained on every slice with every seed, and recurrences draw from just these
runs. So the expected cost of each arm on each slice is known, not estimated, and dynamic regret (against the best arm
of each slice) is exact. Intervals come from replaying the whole experiment in memory with other policy seeds: they
speak of the luck of training and deciding, on these slices; not of other data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

from zeus_flows.core.job import Job
from zeus_flows.core.overheads import Overheads
from zeus_flows.core.power_profile import Gpu, Part, PowerProfile, SettingMeasurement
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.curves import Cell, Curves
from zeus_flows.experiments.fan_out import FanOut, in_turn
from zeus_flows.experiments.replay.replaying import TraceTrainer
from zeus_flows.experiments.replay.shifts import Shift, lengthened, shifted
from zeus_flows.experiments.replay.traces import Trace
from zeus_flows.gpu.power_control import candidate_limits
from zeus_flows.gpu.simulated import CHIPS, Workload
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import run_recurrence
from zeus_flows.recurrence.steps import LocalSteps

Floats = npt.NDArray[np.float64]

PLANTED: Final = (1.25, 1.5, 2.0, 3.0)  # factors on epochs that the detector is tried with
NOTICED_WITHIN: Final = 10  # recurrences after a planted change in which a reset counts as having noticed it
_RESAMPLES: Final = 2000
_TOGETHER: Final = 10  # replays that are one piece of work


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over replays, and what 95 % of bootstrap resamples of them lie between."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Replays:
    """A contender, replayed many times.

    Attributes:
        regret: Of each replay (row) on each slice (column), in units of the slice's best expected cost.
        alarms: Of each replay, the slices after which the policy forgot what it knew of epochs.
    """

    regret: Floats
    alarms: tuple[tuple[int, ...], ...]

    @property
    def totals(self) -> Floats:
        """Cumulative regret of each replay."""
        return np.asarray(self.regret.sum(axis=1))


@dataclass(frozen=True, slots=True)
class Oracle:
    """What every arm costs on every slice, in expectation.

    Attributes:
        batch_sizes: The arms.
        costs_j: Slices x arms; a run that never reaches the target is charged for max_epochs.
        log_epochs: Slices x arms x seeds; NaN where the target is not reached.
    """

    batch_sizes: tuple[int, ...]
    costs_j: Floats
    log_epochs: Floats

    @property
    def best_costs_j(self) -> Floats:
        """The least expected cost of each slice."""
        return np.asarray(self.costs_j.min(axis=1))

    @property
    def always_reaches(self) -> npt.NDArray[np.bool_]:
        """Slices x arms: whether every seed reaches the target."""
        return np.asarray(~np.isnan(self.log_epochs).any(axis=2))

    @property
    def best_arms(self) -> tuple[int, ...]:
        """The arm that has it."""
        return tuple(self.batch_sizes[int(i)] for i in self.costs_j.argmin(axis=1))

    @property
    def best_fixed_arm(self) -> int:
        """The arm that would have cost least had it run on every slice."""
        return self.batch_sizes[int(self.costs_j.sum(axis=0).argmin())]

    @property
    def worth_of_adapting(self) -> float:
        """Share by which the best fixed arm costs more than the best arm of each slice: no policy can gain more."""
        return float(self.costs_j.sum(axis=0).min() / self.best_costs_j.sum() - 1)

    @property
    def between_slices(self) -> float:
        """Standard deviation between slices of an arm's mean log epochs, on average over arms."""
        with np.errstate(all="ignore"):
            return float(np.nanmean(np.nanstd(np.nanmean(self.log_epochs, axis=2), axis=0)))

    @property
    def between_runs(self) -> float:
        """Standard deviation between runs of one arm on one slice, on average over both."""
        with np.errstate(all="ignore"):
            return float(np.sqrt(np.nanmean(np.nanvar(self.log_epochs, axis=2, ddof=1))))


@dataclass(frozen=True, slots=True)
class Detection:
    """How a planted change is noticed.

    Attributes:
        factor: What epochs were multiplied by from the middle on.
        noticed: Share of replays with a reset within `NOTICED_WITHIN` recurrences.
        delay: Recurrences to it, where there was one; None where there was none in any replay.
    """

    factor: float
    noticed: Interval
    delay: Interval | None


@dataclass(frozen=True, slots=True)
class Findings:
    """One order of time (as it was, or shuffled): what is best, and how contenders fare."""

    oracle: Oracle
    replays: Mapping[str, Replays]

    def regret(self, contender: str) -> Interval:
        """Return a contender's cumulative regret."""
        return interval(self.replays[contender].totals)

    def difference(self, contender: str, reference: str) -> Interval:
        """Return how much more regret a contender has than another, replay by replay."""
        return interval(self.replays[contender].totals - self.replays[reference].totals)

    def cost_against(self, contender: str, reference: str) -> Interval:
        """Return by how many per cent a contender costs more than another over all slices, replay by replay."""
        mine, theirs = (
            ((1.0 + self.replays[name].regret) * self.oracle.best_costs_j).sum(axis=1)
            for name in (contender, reference)
        )
        return interval(100.0 * (mine / theirs - 1.0))

    def alarm_rate(self, contender: str) -> Interval:
        """Return a contender's resets per 100 recurrences."""
        slices = self.replays[contender].regret.shape[1]
        return interval(np.array([100.0 * len(a) / slices for a in self.replays[contender].alarms]))


def measure(curves: Curves, jobs: Mapping[str, JobFile], *, replays: int, fan_out: FanOut = in_turn) -> Findings:
    """Compute the findings from the learning curves, which must all exist; `fan_out` replays."""
    first = next(iter(jobs.values()))
    traces = slice_traces(curves, first)
    oracle = _oracle(traces, first.core())
    asked = [(traces, file.core(), oracle.best_costs_j) for file in jobs.values()]
    return Findings(oracle, dict(zip(jobs, replayed(asked, times=replays, fan_out=fan_out), strict=True)))


def slice_traces(curves: Curves, job_file: JobFile) -> tuple[Trace, ...]:
    """Return each slice as a trace: epochs by batch size and seed, and the simulated GPU's power profile."""
    trainer = curves.trainer
    gpu, profiles, overheads = simulated_profiles(job_file, trainer.train_rows)
    seeds = range(trainer.experiment.science.seeds)
    target = job_file.target

    def epochs(key: str, batch_size: int, seed: int) -> int | None:
        curve = curves.get(Cell(key, batch_size, seed))
        return len(curve) if target.reached(getattr(curve[-1], target.metric)) else None

    return tuple(
        Trace(
            workload=f"slice {part.number}",
            gpu=gpu,
            epochs={b: tuple(epochs(part.key, b, seed) for seed in seeds) for b in job_file.batch_sizes},
            profiles=profiles,
            default_batch_size=job_file.default_batch_size,
            max_epochs=job_file.max_epochs,
            samples_per_epoch=trainer.train_rows,
            overheads=overheads,
        )
        for part in trainer.slices
    )


def simulated_profiles(
    job_file: JobFile, samples_per_epoch: int
) -> tuple[Gpu, dict[int, PowerProfile], dict[int, Overheads]]:
    """Return the job's simulated GPU, and what perfect profiles of every batch size and evaluation on it would say.

    Raises:
        ConfigError: the job's GPU is not simulated.
    """
    chip = CHIPS.get(job_file.device.removeprefix("simulated-"))
    if chip is None:
        raise ConfigError(f"only simulated GPUs are known beforehand, not {job_file.device}")
    gpu = Gpu(chip.name, 1, max_power_w=chip.limits_w[1])
    workload = Workload(**job_file.simulation.model_dump())
    profiles, overheads = {}, {}
    for b in job_file.batch_sizes:
        load = workload.at(b, chip)
        at = [(limit, *chip.epoch(load, limit)) for limit in candidate_limits(*chip.limits_w)]
        share, each = workload.evaluation_s / load.seconds_per_epoch, 1 / len(at)
        evaluation = tuple((limit, Part(1, share * s * w, share * s).times(each)) for limit, s, w in at)
        overheads[b] = Overheads(evaluation=tuple(sorted(evaluation)), rest=Part(1))
        measured = tuple(SettingMeasurement(limit, watts, samples_per_epoch / seconds) for limit, seconds, watts in at)
        profiles[b] = PowerProfile(b, gpu, measured)
    return gpu, profiles, overheads


@dataclass(frozen=True)
class Replaying:
    """A job to be replayed over slices with some policy seeds, wherever that is done."""

    traces: Sequence[Trace]
    job: Job
    best_costs_j: Floats
    seeds: range


def replayed(asked: Sequence[tuple[Sequence[Trace], Job, Floats]], *, times: int, fan_out: FanOut) -> list[Replays]:
    """Replay jobs, each over slices of best costs, with policy seeds 0, 1, 2 ...; a few seeds of a job are a piece."""
    some = [range(first, min(first + _TOGETHER, times)) for first in range(0, times, _TOGETHER)]
    done = fan_out(_replay_piece, [Replaying(*one, seeds) for one in asked for seeds in some])
    return [_joined(done[i * len(some) : (i + 1) * len(some)]) for i in range(len(asked))]


def _joined(parts: Sequence[Replays]) -> Replays:
    return Replays(np.vstack([part.regret for part in parts]), tuple(a for part in parts for a in part.alarms))


def _replay_piece(piece: Replaying) -> Replays:
    return replay_slices(piece.traces, piece.job, piece.best_costs_j, seeds=piece.seeds)


def replay_slices(traces: Sequence[Trace], job: Job, best_costs_j: Floats, *, seeds: range) -> Replays:
    """Replay a job over the slices in memory, once with each of some policy seeds."""
    regret, alarms = np.zeros((len(seeds), len(traces))), []
    for row, seed in enumerate(seeds):
        mine = replace(job, seed=seed)
        shifts = dict(enumerate(traces[1:], start=2))
        trainer = TraceTrainer(traces[0], mine, np.random.default_rng(seed), shifts=shifts)
        ledger = MemoryLedger(mine, trainer.energy_source, account=False)
        steps = LocalSteps(mine, ledger, trainer)
        resets, at = 0, []
        for i in range(len(traces)):
            recurrence = run_recurrence(mine, steps)
            regret[row, i] = recurrence.cost_j(mine) / best_costs_j[i] - 1.0
            now = getattr(ledger.history().state.belief, "resets", 0)
            if now > resets:
                at.append(recurrence.number)
            resets = now
        alarms.append(tuple(at))
    return Replays(regret, tuple(alarms))


def detections(traces: Sequence[Trace], job: Job, *, times: int, fan_out: FanOut = in_turn) -> tuple[Detection, ...]:
    """Plant changes in slices that do not drift, and see how the policy's detector notices them.

    From the middle slice on, every batch size takes a factor more epochs.
    """
    middle, found = len(traces) // 2, []
    longer = [lengthened(trace) for trace in traces]
    job = replace(job, max_epochs=longer[0].max_epochs)
    planted = [
        [t if i < middle else shifted(t, Shift("planted", times=factor)) for i, t in enumerate(longer)]
        for factor in PLANTED
    ]
    asked = [(slices, job, np.ones(len(slices))) for slices in planted]
    for factor, replays in zip(PLANTED, replayed(asked, times=times, fan_out=fan_out), strict=True):
        after = [next((a - middle for a in mine if a > middle), None) for mine in replays.alarms]
        delays = [d for d in after if d is not None and d <= NOTICED_WITHIN]
        delay = interval(np.array(delays, dtype=float)) if delays else None
        found.append(Detection(factor, share(len(delays), times), delay))
    return tuple(found)


def interval(values: Floats, *, resamples: int = _RESAMPLES) -> Interval:
    """Return mean and 95 % bootstrap interval; the same values always give the same.

    >>> interval(np.array([1.0, 1.0, 1.0]))
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(resamples, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))


def share(hits: int, times: int) -> Interval:
    """Return a share with its exact 95 % interval (Clopper and Pearson), which has a width even at none and at all.

    >>> share(20, 20)  # doctest: +ELLIPSIS
    Interval(mean=1.0, low=0.831..., high=1.0)
    """
    low = betaincinv(hits, times - hits + 1, 0.025) if hits else 0.0
    high = betaincinv(hits + 1, times - hits, 0.975) if hits < times else 1.0
    return Interval(hits / times, float(low), float(high))


def recorded_regret(costs_j: Iterable[float], oracle: Oracle) -> Floats:
    """Return the regret of recurrences that were run, slice by slice, in units of the slice's best expected cost."""
    return np.array(list(costs_j)) / oracle.best_costs_j - 1.0


def _oracle(traces: Sequence[Trace], job: Job) -> Oracle:
    arms = traces[0].batch_sizes
    per_epoch = {b: traces[0].epoch_cost(job, b) for b in arms}
    epochs = np.array([[[e or math.nan for e in trace.epochs[b]] for b in arms] for trace in traces], dtype=float)
    spent = np.where(np.isnan(epochs), job.max_epochs, epochs).mean(axis=2)
    return Oracle(arms, spent * np.array([per_epoch[b] for b in arms]), np.log(epochs))
