"""Regret over `zeus-paper`'s on several sources: the published traces, and those that recipes describe.

A cell is a job: a workload on a GPU from a default batch size. Every policy replays it with the same seeds; the figures
at 20 and at 50 recurrences are the beginnings of the replays of 200. A cell's ratio is that of mean regrets, each at
least `FLOOR`: where both are next to nothing, their ratio says nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from scores import Goals, geometric
from sources import Cell, cells, recipes

from zeus_flows.experiments.replay.comparison import default_run
from zeus_flows.experiments.replay.replaying import replay, replay_job
from zeus_flows.experiments.replay.shifts import mean
from zeus_flows.experiments.replay.traces import read_trace
from zeus_flows.experiments.replay.workloads import JOBS
from zeus_flows.recurrence.loop import Recurrence

PUBLISHED = "published"  # the source without a recipe: the published traces, from the paper's default batch sizes
GPUS = ("v100", "p100")
REGRET_AT = (20, 50, 200)
COST_AT = (10, 20, 50)
PEER = "zeus-paper"
OURS = ("lookahead", "thompson")
POLICIES = (PEER, "zeus", *OURS)
FLOOR = 0.05  # of a best run
NEARLY_BEST = 1.03  # expected cost of the default batch size over the best one's
CHEAPER = 0.9  # a neighbour's expected cost over that of the default batch size, from which on it has to be found
SOON = 15  # recurrences in which it has to be
SHORT = 5.0  # epochs of a short job, at its best batch size


@dataclass(frozen=True, slots=True)
class Aim:
    """What a source's ratios are held to, at most; `above` is a share of cells above 1.1."""

    mean: Mapping[int, float]
    worst: float | None = None
    above: float | None = None


AIMS = {
    PUBLISHED: Aim({50: 0.28, 200: 0.31}),
    "mlperf": Aim(dict.fromkeys(REGRET_AT, 0.30), worst=1.1),
    "lcbench": Aim(dict.fromkeys(REGRET_AT, 0.50), worst=2.0, above=0.03),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What a policy did to a cell.

    Attributes:
        regret: At each number of recurrences, of each seed, in units of the best arm's expected cost.
        cost: At each number of recurrences, mean cumulative cost over that of Default: b0 at the greatest limit.
        best_epochs: Mean epochs of the best arm.
        default_cost: Expected cost of b0 at its best limit, in units of the best arm's.
        neighbours: Runs times adjacent arms of b0 that are at least 10 % cheaper.
        completed: Of them, those in which that arm reached the target soon.
        as_cheap: Of them, those in which it or an arm at least as cheap did.
        alarms: Belief resets; nothing changes in a cell, so all are false.
        recurrences: In all runs together.
    """

    source: str
    cell: str
    workload: str
    policy: str
    regret: dict[int, tuple[float, ...]]
    cost: dict[int, float]
    best_epochs: float
    default_cost: float
    neighbours: int
    completed: int
    as_cheap: int
    alarms: int
    recurrences: int


def gather(traces: Path, data: Path, *, skip: Collection[str] = (), half: str | None = None) -> dict[str, list[Cell]]:
    """Return the cells of every source; of those with a recipe one half of the workloads, where one is asked for."""
    found = {}
    if PUBLISHED not in skip:
        found[PUBLISHED] = [
            Cell(f"{w}, {gpu}", f"{w}, {gpu}", read_trace(traces, w, gpu, spec))
            for gpu in GPUS
            for w, spec in JOBS.items()
        ]
    for recipe in recipes():
        if recipe.name not in skip:
            found[recipe.name] = take_half(cells(recipe, data), half)
    return found


def take_half(every: Sequence[Cell], half: str | None) -> list[Cell]:
    """Return the cells of every other workload by name: `design` has the first, `kept` the second; None: all."""
    names = sorted({cell.workload for cell in every})
    taken = {None: names, "design": names[::2], "kept": names[1::2]}[half]
    return [cell for cell in every if cell.workload in taken]


def measure(
    found: Mapping[str, Sequence[Cell]], *, seeds: int, processes: int, policies: tuple[str, ...] = POLICIES
) -> list[Result]:
    """Replay every cell with every policy."""
    tasks = [(source, cell, seeds, policies) for source, some in found.items() for cell in some]
    if not tasks:
        sys.exit("there is no cell to measure: every source is skipped, or has no workload in this half")
    results: list[Result] = []
    for done, (cell, some) in enumerate(_each(tasks, processes), start=1):
        results += some
        print(f"  {done} of {len(tasks)}: {cell}", file=sys.stderr)
    order = {(source, cell.name): n for n, (source, cell, *_) in enumerate(tasks)}
    return sorted(results, key=lambda r: (order[r.source, r.cell], POLICIES.index(r.policy)))


_Task = tuple[str, Cell, int, tuple[str, ...]]


def _each(tasks: Sequence[_Task], processes: int) -> Iterator[tuple[str, list[Result]]]:
    if processes < 2:
        yield from map(_all_policies, tasks)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap_unordered(_all_policies, tasks)


def _all_policies(task: _Task) -> tuple[str, list[Result]]:
    source, cell, seeds, policies = task
    return cell.name, [run(source, cell, policy, seeds) for policy in policies]


def run(source: str, cell: Cell, policy: str, seeds: int) -> Result:
    """Replay one cell with one policy, once for each seed."""
    trace = cell.trace
    job, b0, arms = replay_job(trace, policy), trace.default_batch_size, trace.batch_sizes
    expected = trace.expected_costs(job)
    best = min(arms, key=lambda b: expected[b])
    beside = [arms[n] for n in (arms.index(b0) - 1, arms.index(b0) + 1) if 0 <= n < len(arms)]
    neighbours = [b for b in beside if expected[b] <= CHEAPER * expected[b0]]
    default_j = default_run(trace, job).cost_j
    spent: list[list[float]] = []
    completed = as_cheap = alarms = 0
    for seed in range(seeds):
        reached: dict[int, int] = {}
        resets: list[float] = []

        def watch(recurrence: Recurrence, reached: dict[int, int] = reached, resets: list[float] = resets) -> None:
            for _, o in recurrence.attempts:
                if o.converged:
                    reached.setdefault(o.batch_size, recurrence.number)
            numbers = recurrence.attempts[0][0].decision.reason.numbers
            resets.append(numbers.get("resets", resets[-1] if resets else 0.0))

        replayed = replay(trace, job, recurrences=REGRET_AT[-1], seed=seed, watch=watch)
        spent.append(list(accumulate(replayed.costs_j)))
        soon = [b for b, number in reached.items() if number <= SOON]
        completed += sum(b in soon for b in neighbours)
        as_cheap += sum(any(expected[a] <= expected[b] for a in soon) for b in neighbours)
        alarms += sum(b > a for a, b in pairwise(resets))
    return Result(
        source,
        cell.name,
        cell.workload,
        policy,
        regret={t: tuple(s[t - 1] / expected[best] - t for s in spent) for t in REGRET_AT},
        cost={t: mean(s[t - 1] for s in spent) / (t * default_j) for t in COST_AT},
        best_epochs=trace.mean_epochs(best),
        default_cost=expected[b0] / expected[best],
        neighbours=seeds * len(neighbours),
        completed=completed,
        as_cheap=as_cheap,
        alarms=alarms,
        recurrences=seeds * REGRET_AT[-1],
    )


def ratios(results: Sequence[Result], policy: str, at: int) -> dict[str, dict[str, float]]:
    """Return a policy's regret over the peer's: source -> cell -> ratio."""
    peer = {(r.source, r.cell): max(mean(r.regret[at]), FLOOR) for r in results if r.policy == PEER}
    found: dict[str, dict[str, float]] = {}
    for r in results:
        if r.policy == policy:
            found.setdefault(r.source, {})[r.cell] = max(mean(r.regret[at]), FLOOR) / peer[r.source, r.cell]
    return found


def told(values: Mapping[str, float]) -> dict[str, Any]:
    """Return what is told of the ratios of some cells."""
    worst = max(values, key=lambda name: values[name])
    return {
        "mean": geometric(values.values()),
        "worst": values[worst],
        "worst_cell": worst,
        "above_1": mean(v > 1.0 for v in values.values()),
        "above_1.1": mean(v > 1.1 for v in values.values()),
        "cells": len(values),
    }


def without_each(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the geometric mean of the sources' means, and the worst cell, with each source left out in turn."""
    found = {}
    for out in sources:
        left = [s for name, s in sources.items() if name != out]
        if left:
            found[out] = {"mean": geometric([s["mean"] for s in left]), "worst": max(s["worst"] for s in left)}
    return found


def costs(results: Sequence[Result]) -> dict[Any, Any]:
    """Return cumulative cost over Default: of all cells, and of those whose default batch size is nearly the best."""
    near = [r for r in results if r.default_cost <= NEARLY_BEST]
    found: dict[Any, Any] = {"cells": len(results), "nearly_best_cells": len(near)}
    for at in COST_AT:
        worst = max(results, key=lambda r: r.cost[at])
        found[at] = {
            "mean": mean(r.cost[at] for r in results),
            "worst": worst.cost[at],
            "worst_cell": worst.cell,
            "nearly_best_mean": mean(r.cost[at] for r in near),
            "nearly_best_worst": max((r.cost[at] for r in near), default=float("nan")),
        }
    return found


def alarms(results: Sequence[Result]) -> dict[str, float]:
    """Return false alarms for each 100 recurrences of short and of long jobs; not a number where there are none."""
    found = {}
    for name, some in (
        ("short", [r for r in results if r.best_epochs <= SHORT]),
        ("long", [r for r in results if r.best_epochs > SHORT]),
    ):
        count = sum(r.recurrences for r in some)
        found[name] = 100 * sum(r.alarms for r in some) / count if count else float("nan")
    return found


def neighbours(results: Sequence[Result]) -> dict[str, float]:
    """Return in which share of runs cheaper neighbours of the default were completed soon."""
    count = sum(r.neighbours for r in results)
    return {
        "runs": count,
        "completed": sum(r.completed for r in results) / count if count else float("nan"),
        "as_cheap": sum(r.as_cheap for r in results) / count if count else float("nan"),
    }


def workloads(results: Sequence[Result], policy: str, at: int) -> dict[str, dict[str, float]]:
    """Return source -> workload -> geometric mean of its cells' ratios."""
    of = {(r.source, r.cell): r.workload for r in results}
    found: dict[str, dict[str, list[float]]] = {}
    for source, values in ratios(results, policy, at).items():
        for cell, value in values.items():
            found.setdefault(source, {}).setdefault(of[source, cell], []).append(value)
    return {source: {w: geometric(v) for w, v in each.items()} for source, each in found.items()}


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return all that is told, by policy; each cell's results are with it."""
    sources = list(dict.fromkeys(r.source for r in results))
    found: dict[str, Any] = {"sources": sources, "policies": {}, "zeus_by_workload": workloads(results, "zeus", 200)}
    for policy in POLICIES[1:]:
        of = [r for r in results if r.policy == policy]
        groups = {s: [r for r in of if r.source == s] for s in sources} | {"all": of}
        at = {t: {s: told(v) for s, v in ratios(results, policy, t).items()} for t in REGRET_AT}
        found["policies"][policy] = {
            "regret": at,
            "left_out": {t: without_each(v) for t, v in at.items()},
            "cost": {name: costs(some) for name, some in groups.items()},
            "neighbours": {name: neighbours(some) for name, some in groups.items()},
            "alarms": {name: alarms(some) for name, some in groups.items()},
        }
    return found | {"cells": [asdict(r) for r in results]}


def goals(found: Mapping[str, Any], goal: Goals) -> None:
    for policy in OURS:
        p = found["policies"][policy]
        for source, aim in AIMS.items():
            for at, most in aim.mean.items():
                if source not in found["sources"]:
                    continue
                r = p["regret"][at][source]
                where = f"{policy}, {source}, at {at}"
                goal.at_most(f"{where}, regret / {PEER}", r["mean"], most)
                if aim.worst is not None:
                    goal.at_most(f"{where}, worst cell", r["worst"], aim.worst)
                if aim.above is not None:
                    goal.at_most(f"{where}, share of cells above 1.1", r["above_1.1"], aim.above)
        at_50, soon = p["cost"]["all"][50], p["neighbours"]["all"]
        if p["cost"]["all"]["nearly_best_cells"]:
            for what, key in (("mean", "nearly_best_mean"), ("worst cell", "nearly_best_worst")):
                goal.at_most(f"{policy}, b0 nearly best, cost / Default at 50, {what}", at_50[key], 1.02)
        if soon["runs"]:
            text = f"{policy}, cheaper neighbours of b0 completed within {SOON} recurrences"
            goal.at_least(text, soon["completed"], 0.99)
        for kind, value in p["alarms"]["all"].items():
            if value == value:
                goal.at_most(f"{policy}, false alarms in 100 recurrences, {kind} jobs", value, 0.3)
    for source, each in found["zeus_by_workload"].items():
        goal.at_most(f"zeus, {source}, at 200, worst workload, regret / {PEER}", max(each.values()), 1.15)


def show(found: Mapping[str, Any], seeds: int) -> None:
    for policy, p in found["policies"].items():
        print(f"\n{policy}: cumulative regret / {PEER}, {seeds} seeds; geometric mean over cells")
        print(f"{'':12}{'cells':>6}" + "".join(f"{f'at {t}':>8}{'worst':>7}{'> 1':>6}{'> 1.1':>6}" for t in REGRET_AT))
        for source in found["sources"]:
            at = [p["regret"][t][source] for t in REGRET_AT]
            print(f"{source:12}{at[0]['cells']:6}" + "".join(_ratios(r) for r in at))
        for source in p["left_out"][REGRET_AT[0]]:
            left = [p["left_out"][t][source] for t in REGRET_AT]
            figures = "".join(f"{v['mean']:8.3f}{v['worst']:7.2f}{'':12}" for v in left)
            print(f"{f'no {source}':12}{'':6}{figures}")
        for source in found["sources"]:
            worst = (f"at {t} {p['regret'][t][source]['worst_cell']}" for t in REGRET_AT)
            print(f"worst of {source}: " + "; ".join(worst))
        print(f"{policy}: cumulative cost / Default: mean, worst cell; where b0 is nearly the best: mean, worst")
        for source, cost in p["cost"].items():
            figures = "".join(
                f" | at {t} {c['mean']:.3f} {c['worst']:.3f}; {c['nearly_best_mean']:.3f} {c['nearly_best_worst']:.3f}"
                for t, c in ((t, cost[t]) for t in COST_AT)
            )
            print(f"{source:12}{cost['cells']:4} and {cost['nearly_best_cells']:3} cells{figures}")
        if policy in OURS:
            _show_finds(policy, p)


def _ratios(r: Mapping[str, float]) -> str:
    return f"{r['mean']:8.3f}{r['worst']:7.2f}{100 * r['above_1']:4.0f} %{100 * r['above_1.1']:4.0f} %"


def _show_finds(policy: str, p: Mapping[str, Any]) -> None:
    print(
        f"{policy}: cheaper neighbours of b0 completed within {SOON} recurrences (or an arm as cheap); "
        f"false alarms in 100 recurrences, jobs up to {SHORT:g} epochs and longer"
    )
    for source, soon in p["neighbours"].items():
        found = f"{100 * soon['completed']:6.1f} % ({100 * soon['as_cheap']:.1f} %) of {soon['runs']:5}"
        kinds = p["alarms"][source]
        print(f"{source:12}{found} | {kinds['short']:.2f} {kinds['long']:.2f}")
