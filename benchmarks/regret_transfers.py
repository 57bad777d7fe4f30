"""What a job that knows one GPU regrets on another, over what it would regret there starting anew.

30 recurrences on the first GPU, then 50 on the second. Both GPUs offer the batch sizes that were traced on both: what
does not fit into memory is another subject. The second GPU's training runs are drawn alike for both jobs.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scores import Goals, geometric

from zeus_flows.core.job import Job
from zeus_flows.experiments.replay.replaying import TraceTrainer, replay_job
from zeus_flows.experiments.replay.shifts import mean
from zeus_flows.experiments.replay.traces import Trace, read_trace
from zeus_flows.experiments.replay.workloads import JOBS, MODELS, model_trace
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import run_recurrence
from zeus_flows.recurrence.steps import LocalSteps

BEFORE, AFTER = 30, 50
POLICIES = ("lookahead", "thompson")
TRACED = ("v100", "p100")
MODELLED = ("a40", "rtx6000")
FLOOR = 0.05  # of a best run
MOST, MOST_MEAN = 1.1, 0.6


@dataclass(frozen=True, slots=True)
class Transfer:
    """A workload's traces on two GPUs, with the same batch sizes."""

    kind: str
    name: str
    first: Trace
    second: Trace


@dataclass(frozen=True, slots=True)
class Outcome:
    """Mean regret on the second GPU in units of its best arm's expected cost: with what the first taught, and anew."""

    kind: str
    name: str
    policy: str
    taught: float
    anew: float

    @property
    def ratio(self) -> float:
        """How much of the regret is left."""
        return max(self.taught, FLOOR) / max(self.anew, FLOOR)


def transfers(folder: Path) -> list[Transfer]:
    """Return those between the traced GPUs, and those from models of them to GPUs that are modelled only."""
    found = []
    for first, second in (TRACED, TRACED[::-1]):
        for w, spec in JOBS.items():
            pair = [read_trace(folder, w, gpu, spec) for gpu in (first, second)]
            found.append(Transfer("traced", f"{w}, {first} to {second}", *in_common(*pair)))
    for second in MODELLED:
        for first in TRACED:
            for w in MODELS:
                pair = [model_trace(w, gpu) for gpu in (first, second)]
                found.append(Transfer("modelled", f"{w}, {first} to {second}", *in_common(*pair)))
    return found


def in_common(first: Trace, second: Trace) -> tuple[Trace, Trace]:
    """Return two traces with the batch sizes of both, from the greatest default that both have."""
    arms = [b for b in first.batch_sizes if b in second.batch_sizes]
    wanted = min(first.default_batch_size, second.default_batch_size)
    default = max((b for b in arms if b <= wanted), default=arms[0])

    def cut(trace: Trace) -> Trace:
        return replace(
            trace,
            epochs={b: trace.epochs[b] for b in arms},
            profiles={b: trace.profiles[b] for b in arms},
            default_batch_size=default,
        )

    return cut(first), cut(second)


def regret(job: Job, before: Trace | None, trace: Trace, seed: int) -> float:
    """Return the regret of `AFTER` recurrences on a GPU, after `BEFORE` on another where there is one."""
    job = replace(job, seed=seed)
    ledger: MemoryLedger | None = None
    if before is not None:
        trainer = TraceTrainer(before, job, np.random.default_rng((seed, 1)))
        ledger = MemoryLedger(job, trainer.energy_source, account=False)
        steps = LocalSteps(job, ledger, trainer)
        for _ in range(BEFORE):
            run_recurrence(job, steps)
    trainer = TraceTrainer(trace, job, np.random.default_rng(seed))
    steps = LocalSteps(job, ledger or MemoryLedger(job, trainer.energy_source, account=False), trainer)
    spent = sum(run_recurrence(job, steps).cost_j(job) for _ in range(AFTER))
    return spent / trace.best_cost_j(job) - AFTER


def measure(found: Sequence[Transfer], *, seeds: int, processes: int) -> list[Outcome]:
    """Measure every transfer with every policy."""
    tasks = [(transfer, policy, seeds) for policy in POLICIES for transfer in found]
    outcomes = []
    for done, outcome in enumerate(_each(tasks, processes), start=1):
        print(f"  {done} of {len(tasks)}: {outcome.policy}, {outcome.name}", file=sys.stderr)
        outcomes.append(outcome)
    return outcomes


def _each(tasks: Sequence[tuple[Transfer, str, int]], processes: int) -> Iterator[Outcome]:
    if processes < 2:
        yield from map(run, tasks)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap(run, tasks)


def run(task: tuple[Transfer, str, int]) -> Outcome:
    """Replay one transfer with one policy, taught and anew, once for each seed."""
    transfer, policy, seeds = task
    job = replay_job(transfer.second, policy)
    taught = mean(regret(job, transfer.first, transfer.second, s) for s in range(seeds))
    anew = mean(regret(job, None, transfer.second, s) for s in range(seeds))
    return Outcome(transfer.kind, transfer.name, policy, taught, anew)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return policy -> kind -> what is told, with every transfer."""
    found: dict[str, Any] = {}
    for policy in dict.fromkeys(o.policy for o in outcomes):
        kinds = found[policy] = {}
        for kind in dict.fromkeys(o.kind for o in outcomes):
            some = [o for o in outcomes if (o.policy, o.kind) == (policy, kind)]
            worst = max(some, key=lambda o: o.ratio)
            kinds[kind] = {
                "mean": geometric([o.ratio for o in some]),
                "worst": worst.ratio,
                "worst_transfer": worst.name,
                "above": sum(o.ratio > MOST for o in some),
                "transfers": [asdict(o) | {"ratio": o.ratio} for o in some],
            }
    return found


def goals(found: dict[str, Any], goal: Goals) -> None:
    for policy, kinds in found.items():
        for kind, r in kinds.items():
            where = f"{policy}, transfers between {kind} GPUs, regret / starting anew"
            goal.at_most(where, r["mean"], MOST_MEAN)
            goal.at_most(f"{where}, worst", r["worst"], MOST)


def show(found: dict[str, Any], seeds: int) -> None:
    for policy, kinds in found.items():
        print(f"\n{policy}: regret of {AFTER} recurrences on a GPU after {BEFORE} on another / anew, {seeds} seeds")
        for kind, r in kinds.items():
            count = len(r["transfers"])
            print(
                f"{kind}: geometric mean {r['mean']:.3f}, worst {r['worst']:.2f} ({r['worst_transfer']}), "
                f"{r['above']} of {count} above {MOST:g}"
            )
            for t in r["transfers"]:
                print(f"  {t['name']:32}{t['ratio']:6.2f}  ({t['taught']:.2f} / {t['anew']:.2f})")
