"""Groups of recurring jobs: read from a file in the format of the paper's trace, or drawn by a stated recipe.

A file has the columns `group,start_time,end_time` and, where it says what each group trains,
`dataset,runtime_ratio`. Where it does not, groups are matched to workloads by their mean runtime (section 6.3).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from scipy.cluster.vq import kmeans

from zeus_flows.core.text import shown
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.cluster.simulating import Submission
from zeus_flows.experiments.replay.comparison import default_run
from zeus_flows.experiments.replay.csv_rows import number, rows
from zeus_flows.experiments.replay.replaying import replay_job
from zeus_flows.experiments.replay.traces import Trace
from zeus_flows.experiments.replay.workloads import JOBS

COLUMNS = ("group", "start_time", "end_time")
TRIES = 20  # beginnings of K-means; the best end counts

SIZE_MEDIAN, SIZE_SPREAD, SIZE_LEAST, SIZE_MOST = 100, 1.0, 10, 2_000  # jobs of a drawn group: lognormal
GAPS = (0.5, 8.0)  # mean time between its submissions, in runs of the default: log-uniform
RATIO_SPREAD = 0.5  # of the log of a job's runtime ratio, whose mean is 1
RECIPE = (
    f"each group trains one of the workloads, drawn evenly; it has {SIZE_LEAST} to {SIZE_MOST:,} jobs (lognormal, "
    f"median {SIZE_MEDIAN}); gaps between submissions are exponential, their mean {GAPS[0]:g} to {GAPS[1]:g} runs of "
    f"the default (log-uniform, per group); runtime ratios are lognormal with mean 1 and log deviation {RATIO_SPREAD:g}"
)


class Group(Protocol):
    """A group of recurring jobs, which train one workload."""

    @property
    def name(self) -> str:
        """What it is called; seeds its draws."""

    @property
    def workload(self) -> str:
        """Which trace its jobs are runs of."""

    @property
    def jobs(self) -> int:
        """How many jobs it has."""

    def submissions(self) -> Iterator[Submission]:
        """Return its jobs in the order of their time, always the same ones."""


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """A group from a file."""

    name: str
    workload: str
    starts_s: Sequence[float]
    ratios: Sequence[float]

    @property
    def jobs(self) -> int:
        """How many jobs it has."""
        return len(self.starts_s)

    def submissions(self) -> Iterator[Submission]:
        """Return its jobs in the order of their time."""
        return map(Submission, self.starts_s, self.ratios)


@dataclass(frozen=True, slots=True)
class DrawnGroup:
    """A group drawn by the recipe. Its jobs are drawn as they are asked for, and never kept."""

    name: str
    workload: str
    jobs: int
    gap_s: float
    seed: int

    def submissions(self) -> Iterator[Submission]:
        """Return its jobs in the order of their time."""
        rng, now_s = np.random.default_rng(self.seed), 0.0
        for _ in range(self.jobs):
            yield Submission(now_s, float(rng.lognormal(-(RATIO_SPREAD**2) / 2, RATIO_SPREAD)))
            now_s += float(rng.exponential(self.gap_s))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Groups, and what may be said of where they come from.

    Attributes:
        source: A sentence for people.
        matched: Whether it is only guessed from runtimes what the groups train.
    """

    groups: tuple[Group, ...]
    source: str
    matched: bool = False


def seed_of(*parts: object) -> int:
    """Return a seed from what is to be drawn: a hash, the same in every process.

    >>> seed_of(1, "a") == seed_of(1, "a") != seed_of(1, "b")
    True
    """
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def draw_groups(traces: Sequence[Trace], *, jobs: int, seed: int) -> Arrivals:
    """Return groups with so many jobs in all, drawn by `RECIPE`."""
    rng, groups, left = np.random.default_rng(seed_of(seed, "recipe")), list[Group](), jobs
    runs_s = {t.workload: default_run(t, replay_job(t, "default")).time_s for t in traces}
    names = list(runs_s)
    while left:
        size = round(float(rng.lognormal(np.log(SIZE_MEDIAN), SIZE_SPREAD)))
        size = min(max(size, SIZE_LEAST), SIZE_MOST, left)
        workload = names[int(rng.integers(len(names)))]
        gap_s = runs_s[workload] * float(np.exp(rng.uniform(*np.log(GAPS))))
        name = f"drawn-{len(groups) + 1}"
        groups.append(DrawnGroup(name, workload, size, gap_s, seed_of(seed, name)))
        left -= size
    source = f"{jobs:,} jobs drawn with seed {seed}, not observed anywhere: {RECIPE}"
    return Arrivals(tuple(groups), source)


def read_groups(file: Path, traces: Sequence[Trace]) -> Arrivals:
    """Read groups from a file.

    Raises:
        ConfigError: the file is missing or broken (its line is given), names a dataset that has no trace, or has too
            few groups to be matched to workloads.
    """
    known = {t.workload: t.workload for t in traces}
    known |= {JOBS[t.workload].dataset: t.workload for t in traces if t.workload in JOBS}
    starts: dict[str, array[float]] = {}
    runtimes: dict[str, array[float]] = {}
    ratios: dict[str, array[float]] = {}
    trains: dict[str, str] = {}
    says = False
    for where, row in rows(file, COLUMNS, named_by="--groups names the file that holds the groups"):
        name, start_s, end_s = row["group"], number(where, row, "start_time"), number(where, row, "end_time")
        if not name:
            raise ConfigError(f"{where}: group must not be empty")
        if end_s < start_s:
            raise ConfigError(f"{where}: end_time {end_s:g} is before start_time {start_s:g}")
        says = "dataset" in row
        if says:
            if "runtime_ratio" not in row:
                raise ConfigError(f"{file}:1: the column runtime_ratio is missing, which goes with dataset")
            if (workload := known.get(row["dataset"])) is None:
                raise ConfigError(
                    f"{where}: there is no trace of the dataset {shown(row['dataset'])}; there are {', '.join(known)}"
                )
            if trains.setdefault(name, workload) != workload:
                raise ConfigError(f"{where}: group {shown(name)} trained {trains[name]} before, now {workload}")
            ratio = number(where, row, "runtime_ratio")
            if ratio <= 0:
                raise ConfigError(f"{where}: runtime_ratio must be positive, not {ratio:g}")
            ratios.setdefault(name, array("d")).append(ratio)
        starts.setdefault(name, array("d")).append(start_s)
        runtimes.setdefault(name, array("d")).append(end_s - start_s)
    if not starts:
        raise ConfigError(f"{file}: there are no jobs in it")
    source = f"those of {file.name}; it says which jobs recur as one group, and what each group trains"
    if not says:
        trains, mean_s = _match(file, runtimes, traces)
        ratios = {
            name: array("d", [max(run_s / mean_s[trains[name]], 1e-9) for run_s in those])
            for name, those in runtimes.items()
        }
        source = (
            f"those of {file.name}, whose groups are taken as it has them; what each trains is guessed from its mean "
            f"runtime (K-means), and ratios follow from that: synthetic, and not to be held against the paper's"
        )
    return Arrivals(
        tuple(_in_order(name, trains[name], starts[name], ratios[name]) for name in starts), source, not says
    )


def _in_order(name: str, workload: str, starts_s: array[float], ratios: array[float]) -> ReadGroup:
    order = sorted(range(len(starts_s)), key=starts_s.__getitem__)
    in_order = [array("d", [values[i] for i in order]) for values in (starts_s, ratios)]
    return ReadGroup(name, workload, *in_order)


def _match(
    file: Path, runtimes: dict[str, array[float]], traces: Sequence[Trace]
) -> tuple[dict[str, str], dict[str, float]]:
    """Return what each group trains, and the mean runtime of all jobs of each workload.

    K-means forms as many clusters of groups' mean runtimes as there are workloads; the two are matched in order.
    """
    means = {name: float(np.mean(those)) for name, those in runtimes.items()}
    points = np.array(list(means.values()))
    scale = float(points.std()) or 1.0
    centres = np.unique(points / scale)
    if len(centres) > len(traces):
        centres = np.sort(kmeans(points / scale, len(traces), iter=TRIES, rng=0)[0])
    if len(centres) < len(traces):
        raise ConfigError(
            f"{file}: {len(means)} groups cannot be matched to {len(traces)} workloads by their runtimes; choose fewer "
            f"with --workload, or add the columns dataset and runtime_ratio"
        )
    by_runtime = sorted(traces, key=lambda t: default_run(t, replay_job(t, "default")).time_s)
    of = np.abs(points[:, None] / scale - centres[None, :]).argmin(axis=1)
    trains = {name: by_runtime[int(i)].workload for name, i in zip(means, of, strict=True)}
    every: dict[str, list[float]] = {}
    for name, those in runtimes.items():
        every.setdefault(trains[name], []).extend(those)
    return trains, {workload: float(np.mean(those)) or 1.0 for workload, those in every.items()}
