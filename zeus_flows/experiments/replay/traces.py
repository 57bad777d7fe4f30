"""Traces of a recurring job: how many epochs each batch size takes, and what an epoch costs at each power limit.

They are read from the format the Zeus project published: `summary_train.csv` (one row per
training run and target) and `summary_power_<gpu>.csv` (one row per batch size and power limit).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zeus_flows.core.cost import price
from zeus_flows.core.job import Job
from zeus_flows.core.learning_curve import Curve
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power import epoch_cost
from zeus_flows.core.power_profile import Gpu, Part, PowerProfile, SettingMeasurement
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.replay.csv_rows import integer, number, rows

TRAIN_COLUMNS = (
    *("dataset", "network", "batch_size", "optimizer", "learning_rate"),
    *("run", "target_metric", "target_epoch"),
)
OVERHEAD_COLUMNS = (
    *("dataset", "network", "batch_size", "optimizer", "power_limit", "once_time", "once_energy"),
    *("evaluations_per_epoch", "evaluation_time", "evaluation_energy", "rest_time", "rest_energy"),
)
POWER_COLUMNS = ("dataset", "network", "batch_size", "optimizer", "power_limit", "time_per_epoch", "average_power")
SAMPLES_PER_EPOCH = 10_000  # traces are per epoch; any number serves to make per-sample profiles of them


@dataclass(frozen=True, slots=True)
class TraceJob:
    """What a trace's rows are picked by, and how the job is run (Table 1 of the paper)."""

    dataset: str
    network: str
    optimizer: str
    target: float
    max_epochs: int
    default_batch_size: int


@dataclass(frozen=True, slots=True)
class Trace:
    """A job on one GPU, ready to be replayed.

    Attributes:
        workload: Its name.
        gpu: What it runs on; its maximum power is the greatest limit of the whole power trace.
        epochs: For each batch size, the epochs each repetition took to the target; None: never.
        profiles: For each batch size, power and throughput at every limit.
        default_batch_size: b0, or the greatest batch size below it that was traced.
        max_epochs: An attempt never trains longer.
        samples_per_epoch: Any number serves: traces are per epoch.
        overheads: For each batch size, what a run takes beside its steps; published traces have none of it.
        curves: For each batch size, the learning curve of each repetition: (epoch, metric) of levels on the way.
    """

    workload: str
    gpu: Gpu
    epochs: Mapping[int, tuple[int | None, ...]]
    profiles: Mapping[int, PowerProfile]
    default_batch_size: int
    max_epochs: int
    samples_per_epoch: int = SAMPLES_PER_EPOCH
    overheads: Mapping[int, Overheads] = field(default_factory=dict)
    curves: Mapping[int, tuple[Curve, ...]] = field(default_factory=dict)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The arms, ascending."""
        return tuple(sorted(self.epochs))

    @property
    def power_limits_w(self) -> tuple[float, ...]:
        """The limits of the trace, ascending."""
        return tuple(sorted({m.setting for p in self.profiles.values() for m in p.measurements}))

    def mean_epochs(self, batch_size: int) -> float:
        """Return the expected epochs to the target; infinite where some repetition never got there in time."""
        runs = self.epochs[batch_size]
        if any(e is None or e > self.max_epochs for e in runs):
            return math.inf
        return math.fsum(e for e in runs if e is not None) / len(runs)

    def expected_costs(self, job: Job) -> dict[int, float]:
        """Return every arm's expected cost at its best power limit, in joules."""
        return {b: self.once_cost(job, b) + self.mean_epochs(b) * self.epoch_cost(job, b) for b in self.batch_sizes}

    def epoch_cost(self, job: Job, batch_size: int) -> float:
        """Return EpochCost of an arm at its best power limit, evaluation included."""
        overheads = self.overheads.get(batch_size, NOTHING)
        samples = self.samples_per_epoch
        return epoch_cost(job, self.profiles[batch_size], samples_per_epoch=samples, overheads=overheads)

    def once_cost(self, job: Job, batch_size: int) -> float:
        """Return what an attempt costs before its first step."""
        overheads = self.overheads.get(batch_size, NOTHING)
        once = overheads.once_each
        return price(job, self.gpu.max_power_w).of(once.energy_j + overheads.host_w * once.time_s, once.time_s)

    def best_cost_j(self, job: Job) -> float:
        """Return the least expected cost: what regret is measured from (eq. 9).

        Raises:
            ConfigError: no batch size always reaches the target.
        """
        best = min(self.expected_costs(job).values())
        if not math.isfinite(best):
            raise ConfigError(f"no batch size of {self.workload} always reaches the target within {self.max_epochs}")
        return best


def read_trace(
    folder: Path,
    workload: str,
    gpu: str,
    spec: TraceJob,
    *,
    target: float | None = None,
    default_batch_size: int | None = None,
) -> Trace:
    """Read one job on one GPU from published traces.

    Args:
        folder: Holds `summary_train.csv` and `summary_power_<gpu>.csv`.
        workload: Name of the result.
        gpu: Such as `v100`.
        spec: Which rows.
        target: Another target metric than the paper's.
        default_batch_size: Another b0 than the paper's.

    Raises:
        ConfigError: a file is missing or broken (its name and line are given), or has no such rows.
    """
    target = spec.target if target is None else target
    epochs: dict[int, list[int | None]] = {}
    levels: dict[tuple[int, str, str], list[tuple[int, float]]] = {}
    targets: dict[int, list[tuple[int, str, str]]] = {}
    for where, row in rows(folder / "summary_train.csv", TRAIN_COLUMNS):
        if not _matches(row, spec):
            continue
        reached = None if row["target_epoch"] in ("", "nan") else integer(where, row, "target_epoch")
        level, b = number(where, row, "target_metric"), integer(where, row, "batch_size")
        run = (b, row["learning_rate"], row["run"])
        if abs(level - target) < 1e-9:
            epochs.setdefault(b, []).append(reached)
            targets.setdefault(b, []).append(run)
        if reached is not None:
            levels.setdefault(run, []).append((reached, level))
    power_file = folder / f"summary_power_{gpu}.csv"
    limits: dict[int, list[SettingMeasurement]] = {}
    max_power_w = 0.0
    for where, row in rows(power_file, POWER_COLUMNS):
        limit = number(where, row, "power_limit")
        max_power_w = max(max_power_w, limit)
        if _matches(row, spec):
            seconds, watts = number(where, row, "time_per_epoch"), number(where, row, "average_power")
            if min(limit, seconds, watts) <= 0:
                raise ConfigError(f"{where}: power limit, time and power must be positive")
            measured = SettingMeasurement(limit, watts, SAMPLES_PER_EPOCH / seconds)
            limits.setdefault(integer(where, row, "batch_size"), []).append(measured)
    overheads = _read_overheads(folder / f"summary_overheads_{gpu}.csv", spec)
    arms = sorted(b for b in epochs if b in limits)
    if not arms:
        raise ConfigError(
            f"{folder} has no runs of {spec.dataset}, {spec.network}, {spec.optimizer} with target {target:g} "
            f"whose power was traced in {power_file.name}"
        )
    default = spec.default_batch_size if default_batch_size is None else default_batch_size
    device = Gpu(gpu, 1, max_power_w)
    return Trace(
        workload=workload,
        gpu=device,
        epochs={b: tuple(epochs[b]) for b in arms},
        profiles={b: PowerProfile(b, device, tuple(sorted(limits[b], key=lambda m: -m.setting))) for b in arms},
        default_batch_size=max((b for b in arms if b <= default), default=arms[0]),
        max_epochs=spec.max_epochs,
        overheads={b: overheads[b] for b in arms if b in overheads},
        curves=_curves({b: [levels.get(run, []) for run in targets[b]] for b in arms}, target),
    )


def _curves(levels: Mapping[int, Sequence[Sequence[tuple[int, float]]]], target: float) -> dict[int, tuple[Curve, ...]]:
    """Return each run's learning curve up to the target, from the epochs at which it reached several levels.

    Whether a greater metric is the better one shows in which of two levels is reached later.
    """
    steps = [
        (b[0] - a[0]) * (b[1] - a[1])
        for runs in levels.values()
        for points in runs
        for a, b in itertools.combinations(points, 2)
    ]
    if not any(steps):
        return {}
    sign = 1.0 if math.fsum(steps) > 0 else -1.0
    curves = {}
    for batch_size, runs in levels.items():
        found = []
        for points in runs:
            best: dict[int, float] = {}
            for epoch, level in sorted(points, key=lambda p: sign * p[1]):
                if sign * (target - level) >= -1e-9:
                    best[epoch] = level
            found.append(tuple(sorted(best.items())))
        curves[batch_size] = tuple(found)
    return curves


def _read_overheads(file: Path, spec: TraceJob) -> dict[int, Overheads]:
    """Read what runs take beside their steps, where a folder tells: published ones do not."""
    known: dict[int, Overheads] = {}
    for where, row in rows(file, OVERHEAD_COLUMNS) if file.exists() else ():
        if not _matches(row, spec):
            continue
        limit, per_epoch = number(where, row, "power_limit"), number(where, row, "evaluations_per_epoch")
        once, evaluation, rest = (
            (number(where, row, f"{part}_energy"), number(where, row, f"{part}_time"))
            for part in ("once", "evaluation", "rest")
        )
        if min(per_epoch, *once, *evaluation, *rest) < 0:
            raise ConfigError(f"{where}: times, energies and counts must not be negative")
        b = integer(where, row, "batch_size")
        at = Part(per_epoch, per_epoch * evaluation[0], per_epoch * evaluation[1])
        others = known[b].evaluation if b in known else ()
        share = len(others) + 1  # evaluations per epoch is told once for each limit
        seen = tuple((w, part.times((share - 1) / share)) for w, part in others)
        known[b] = Overheads(once=Part(1, *once), evaluation=(*seen, (limit, at.times(1 / share))), rest=Part(1, *rest))
    return known


def jobs_in(folder: Path, published: Mapping[str, TraceJob]) -> dict[str, TraceJob]:
    """Return the jobs that a folder's train trace is about: published ones by their name, others by their dataset.

    A job that nobody published starts from its largest batch size, as the paper's baselines do, and may train twice
    as long as its longest run that reached the target.

    Raises:
        ConfigError: the file is missing or broken; its name and line are given.
    """
    datasets = {spec.dataset for spec in published.values()}
    found: dict[str, TraceJob] = {}
    for where, row in rows(folder / "summary_train.csv", TRAIN_COLUMNS):
        for name, spec in published.items():
            if _matches(row, spec):
                found[name] = spec
        if row["dataset"] in datasets:
            continue
        batch_size = integer(where, row, "batch_size")
        epochs = 1 if row["target_epoch"] in ("", "nan") else integer(where, row, "target_epoch")
        known = found.get(row["dataset"])
        found[row["dataset"]] = TraceJob(
            row["dataset"],
            row["network"],
            row["optimizer"],
            number(where, row, "target_metric"),
            max_epochs=max(2 * epochs, known.max_epochs if known else 1),
            default_batch_size=max(batch_size, known.default_batch_size if known else 1),
        )
    return found


def _matches(row: Mapping[str, str], spec: TraceJob) -> bool:
    return (row["dataset"], row["network"], row["optimizer"]) == (spec.dataset, spec.network, spec.optimizer)
