"""What a prior learnt from other jobs would be worth: regret of a job's first ten recurrences with it, over without.

The jobs of every workload run 30 recurrences. How likely each law is and how much runs vary is learnt from those of
other workloads: of all sources, or of its own alone. Learnt from the workload's own jobs it is a ceiling, not a result.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from scores import Goals, geometric
from sources import Cell

from zeus_flows.core import belief, laws
from zeus_flows.core.belief import EpochsBelief
from zeus_flows.core.gaussian import Floats
from zeus_flows.core.policy import engine
from zeus_flows.core.records import Observation
from zeus_flows.experiments.replay.replaying import replay, replay_job
from zeus_flows.experiments.replay.shifts import mean

BEFORE, FIRST = 30, 10  # recurrences of the jobs that are learnt from, and of the new one
POLICIES = ("lookahead", "thompson")
KINDS = ("all others", "same source", "its own")
FLOOR = 0.05  # of a best run
LEARNT_FROM = 1000  # seed of the runs that are learnt from
PRIOR_JOBS = 1.0  # how many jobs equally likely laws are worth
STEPS = 50  # of expectation-maximisation
MOST, MOST_MEAN = 1.1, 0.85


class Taught(NamedTuple):
    """What a job of a workload has come to believe."""

    source: str
    workload: str
    belief: EpochsBelief


@dataclass(frozen=True)
class Learnt:
    """How likely each law is, and run-to-run deviation of log epochs, before a job's first run."""

    laws: Floats
    noise: float


def workload(cell: Cell) -> str:
    """Return the workload whatever the GPU: the published traces of two GPUs share their training runs."""
    return cell.workload.split(", ")[0]


def taught(source: str, cell: Cell) -> Taught:
    """Run a job, and return what it believes."""
    job = replace(replay_job(cell.trace, "thompson"), seed=LEARNT_FROM)
    seen: list[Observation] = []
    replay(
        cell.trace,
        job,
        recurrences=BEFORE,
        seed=LEARNT_FROM,
        watch=lambda recurrence: seen.extend(o for _, o in recurrence.attempts),
    )
    believed = engine.fold(job, seen, account=False).belief
    assert isinstance(believed, EpochsBelief)
    return Taught(source, workload(cell), believed)


def learn(jobs: Sequence[Taught]) -> Learnt:
    """Return the likeliest weights of the laws, and the geometric mean of noise; every workload counts once."""
    cells = Counter(job.workload for job in jobs)
    shares = np.array([1 / cells[job.workload] for job in jobs])
    before = _before(jobs[0].belief)
    said = np.array([job.belief.posterior.laws / _before(job.belief) for job in jobs])
    weights = before
    for _ in range(STEPS):
        each = said * weights
        weights = PRIOR_JOBS * before + shares @ (each / each.sum(axis=1, keepdims=True))
        weights = weights / weights.sum()
    logs = [math.log(_noise(job.belief)) for job in jobs]
    return Learnt(weights, math.exp(0.5 * float(np.average(logs, weights=shares))))


def _before(believed: EpochsBelief) -> Floats:
    return EpochsBelief.empty(believed.batch_sizes, believed.default_batch_size).posterior.laws


def _noise(believed: EpochsBelief) -> float:
    """Return the run-to-run variance that all arms of a job share."""
    spare = sum(max(runs.count - 1, 0) for runs in believed.completed)
    squares = sum(runs.squares for runs in believed.completed)
    weight = belief.NOISE_POOL_WEIGHT
    return (weight * belief.NOISE**2 + squares) / (weight + spare)


@contextmanager
def believing(learnt: Learnt) -> Iterator[None]:
    """Let jobs begin with what was learnt, in the place of the constants."""
    plain = laws._prior

    @lru_cache(maxsize=256)
    def prior(batch_sizes: tuple[int, ...], default_batch_size: int) -> laws._Prior:
        found = plain(batch_sizes, default_batch_size)
        return replace(found, odds=found.odds * (learnt.laws / found.odds.sum(axis=0)))

    with patch.object(laws, "_prior", prior), patch.object(belief, "NOISE", learnt.noise):
        yield


def regret(cell: Cell, policy: str, seeds: int) -> float:
    """Return the mean regret of a cell's first recurrences."""
    job = replay_job(cell.trace, policy)
    return max(mean(replay(cell.trace, job, recurrences=FIRST, seed=s).regret for s in range(seeds)), FLOOR)


class Task(NamedTuple):
    """A workload, with what there is to learn from."""

    source: str
    workload: str
    cells: tuple[Cell, ...]
    learnt: Mapping[str, Learnt]
    seeds: int


def measure(found: Mapping[str, Sequence[Cell]], *, seeds: int, processes: int) -> dict[str, Any]:
    """Return policy -> what is learnt from -> source -> workload -> regret with what was learnt, over without."""
    jobs = [taught(source, cell) for source, cells in found.items() for cell in cells]
    tasks = []
    for source, cells in found.items():
        for name in sorted({workload(cell) for cell in cells}):
            others = [job for job in jobs if job.workload != name]
            from_whom = {
                "all others": others,
                "same source": [job for job in others if job.source == source],
                "its own": [job for job in jobs if job.workload == name],
            }
            learnt = {kind: learn(some) for kind, some in from_whom.items() if some}
            tasks.append(Task(source, name, tuple(c for c in cells if workload(c) == name), learnt, seeds))
    result: dict[str, Any] = {policy: {kind: {} for kind in KINDS} for policy in POLICIES}
    with multiprocessing.Pool(processes) as pool:
        for done, (task, ratios) in enumerate(zip(tasks, pool.imap(run, tasks), strict=True), start=1):
            print(f"  {done} of {len(tasks)}: {task.workload}", file=sys.stderr)
            for (policy, kind), ratio in ratios.items():
                result[policy][kind].setdefault(task.source, {})[task.workload] = ratio
    return result


def run(task: Task) -> dict[tuple[str, str], float]:
    """Replay a workload's cells with and without what was learnt; return the geometric mean of their ratios."""
    ratios = {}
    for policy in POLICIES:
        plain = [regret(cell, policy, task.seeds) for cell in task.cells]
        for kind, learnt in task.learnt.items():
            with believing(learnt):
                with_it = [regret(cell, policy, task.seeds) for cell in task.cells]
            ratios[policy, kind] = geometric([a / b for a, b in zip(with_it, plain, strict=True)])
    return ratios


def told(by_source: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the geometric mean over all workloads, that of each source, and the worst workload."""
    every = {name: ratio for ratios in by_source.values() for name, ratio in ratios.items()}
    worst = max(every, key=lambda name: every[name])
    return {
        "mean": geometric(every.values()),
        "sources": {source: geometric(ratios.values()) for source, ratios in by_source.items()},
        "worst": every[worst],
        "worst_workload": worst,
        "above": sum(ratio > MOST for ratio in every.values()),
        "workloads": every,
    }


def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return policy -> what is learnt from -> what is told."""
    return {
        policy: {kind: told(by_source) for kind, by_source in kinds.items() if by_source}
        for policy, kinds in measured.items()
    }


def goals(found: Mapping[str, Any], goal: Goals) -> None:
    for policy, kinds in found.items():
        where = f"{policy}, learnt from {KINDS[0]}, regret at {FIRST} / without"
        goal.at_most(where, kinds[KINDS[0]]["mean"], MOST_MEAN)
        goal.at_most(f"{where}, worst workload", kinds[KINDS[0]]["worst"], MOST)


def show(found: Mapping[str, Any], seeds: int) -> None:
    for policy, kinds in found.items():
        print(f"\n{policy}: regret of {FIRST} recurrences with laws and noise learnt / without, {seeds} seeds")
        for kind, r in kinds.items():
            sources = ", ".join(f"{source} {ratio:.3f}" for source, ratio in r["sources"].items())
            print(
                f"{kind:12} geometric mean {r['mean']:.3f} ({sources}), worst {r['worst']:.2f} "
                f"({r['worst_workload']}), {r['above']} of {len(r['workloads'])} above {MOST:g}"
            )
