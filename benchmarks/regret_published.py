"""Regret and replay speed of our policies over the published package's, on the traces it was published with."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scores import Goals, geometric

from zeus_flows.core.records import decision_seed
from zeus_flows.experiments.replay.comparison import dearest, default_run
from zeus_flows.experiments.replay.replaying import Replay, replay, replay_job
from zeus_flows.experiments.replay.shifts import mean
from zeus_flows.experiments.replay.traces import Trace, read_trace
from zeus_flows.experiments.replay.workloads import JOBS
from zeus_flows.recurrence.loop import Recurrence

RECURRENCES = 50
BETA, ETA = 2.0, 0.5
POLICIES = ("lookahead", "thompson", "zeus", "zeus-paper")
GPUS = ("v100", "p100")
RESAMPLES = 2_000
BUDGET = 0.05


class Published:
    """The published package's simulator on one power trace."""

    def __init__(self, folder: Path, gpu: str) -> None:
        try:
            import pandas
            from zeus._legacy.job import Job
            from zeus._legacy.policy.optimizer import JITPowerLimitOptimizer, PruningGTSBatchSizeOptimizer
            from zeus._legacy.simulate import Simulator
        except ImportError as error:
            sys.exit(f"{error}; install the peers with: pip install 'zeus-flows[bench]'")
        self._train = pandas.read_csv(folder / "summary_train.csv")
        self._power = pandas.read_csv(folder / f"summary_power_{gpu}.csv")
        self._job, self._simulator = Job, Simulator
        self._limits, self._optimizer = JITPowerLimitOptimizer, PruningGTSBatchSizeOptimizer

    def simulate(self, trace: Trace, seed: int, *, our_draws: bool = False) -> list[Any]:
        """Return the history of one simulation; `our_draws` gives every decision the draws that ours would have."""
        spec = JOBS[trace.workload]
        job = self._job(
            *(spec.dataset, spec.network, spec.optimizer, spec.target, spec.max_epochs), trace.default_batch_size
        )
        optimizer = (_seeded(self._optimizer) if our_draws else self._optimizer)(seed=seed, verbose=False)
        simulator = self._simulator(
            self._train, self._power, optimizer, self._limits(verbose=False), seed=seed, verbose=False
        )
        with contextlib.redirect_stdout(io.StringIO()):
            history: list[Any] = simulator.simulate_one_job(job, RECURRENCES, BETA, ETA)
        return history


def _seeded(base: type) -> Any:
    """Return the published optimizer with its random numbers drawn afresh, by our seed, for every decision."""

    class Seeded(base):  # type: ignore[misc]
        def register_job(self, job: Any, batch_sizes: list[int]) -> None:
            super().register_job(job, batch_sizes)
            self._recurrence, self._attempt = 1, 1

        def _draws(self) -> np.random.Generator:
            return np.random.default_rng(decision_seed(self.seed, self._recurrence, self._attempt))

        def predict(self, job: Any) -> int:
            if job in self.mabs:
                self.mabs[job].rng = self._draws()
            return int(super().predict(job))

        def _construct_mab(self, job: Any, batch_sizes: list[int]) -> None:
            super()._construct_mab(job, batch_sizes)
            self.mabs[job].rng = self._draws()

        def observe(self, job: Any, batch_size: int, cost: float, converged: bool | None = None) -> None:
            super().observe(job, batch_size, cost, converged)
            self._recurrence, self._attempt = (
                (self._recurrence + 1, 1) if converged else (self._recurrence, self._attempt + 1)
            )

    return Seeded


def published_regret(history: Sequence[Any], trace: Trace, best_j: float) -> float:
    cost: float = sum(ETA * h.energy + (1 - ETA) * trace.gpu.max_power_w * h.time for h in history)
    return cost / best_j - RECURRENCES


def agree(history: Sequence[Any], trace: Trace, seed: int) -> bool:
    """Return whether `zeus-paper` makes the same runs as the published package, given the same draws."""
    ours: list[tuple[int, float, bool]] = []

    def watch(recurrence: Recurrence) -> None:
        ours.extend((o.batch_size, o.energy_j, o.converged) for _, o in recurrence.attempts if o.energy_j > 0)

    replay(trace, replay_job(trace, "zeus-paper", eta=ETA, beta=BETA), recurrences=RECURRENCES, seed=seed, watch=watch)
    theirs = [(int(h.bs), float(h.energy), bool(h.reached)) for h in history]
    return len(ours) == len(theirs) and all(
        a[0] == b[0] and math.isclose(a[1], b[1], rel_tol=1e-9) and a[2] == b[2]
        for a, b in zip(ours, theirs, strict=True)
    )


@dataclass(frozen=True)
class Ratio:
    """A policy's regret over the published one's: all workloads, each, and each left out."""

    value: float
    low: float
    high: float
    workloads: dict[str, float]
    left_out: dict[str, float]


Table = dict[str, NDArray[np.float64]]  # workload -> regret of each seed


def ratio(ours: Table, theirs: Table) -> Ratio:
    names = list(theirs)
    each = {w: float(ours[w].mean() / theirs[w].mean()) for w in names}
    rng = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES):
        picked = rng.choice(names, len(names))
        values = []
        for w in picked:
            a, b = rng.choice(ours[w], len(ours[w])).mean(), rng.choice(theirs[w], len(theirs[w])).mean()
            values.append(max(a, 1e-3) / max(b, 1e-3))
        resampled.append(geometric(values))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Ratio(
        value=geometric(list(each.values())),
        low=float(low),
        high=float(high),
        workloads=each,
        left_out={w: geometric([v for name, v in each.items() if name != w]) for w in names},
    )


def least_seconds(go: Callable[[], object], goes: int) -> float:
    """Return the least CPU time of some goes."""
    best = math.inf
    for _ in range(goes):
        began = time.process_time()
        go()
        best = min(best, time.process_time() - began)
    return best


def measure_gpu(folder: Path, gpu: str, seeds: int) -> dict[str, Any]:
    published = Published(folder, gpu)
    traces = {w: read_trace(folder, w, gpu, spec) for w, spec in JOBS.items()}
    regret: dict[str, Table] = {p: {} for p in ("published", *POLICIES, "lookahead with budget")}
    last: dict[str, dict[str, float]] = {p: {} for p in POLICIES}
    saved: dict[str, float] = {}
    dearest_share: dict[str, float] = {}
    dearest_single: dict[str, float] = {}
    dearest_ever: dict[str, float] = {}
    agreed = compared = 0
    for w, trace in traces.items():
        print(f"  {gpu} {w}", file=sys.stderr)
        best_j = trace.best_cost_j(replay_job(trace, "zeus-paper", eta=ETA))
        theirs = [published_regret(published.simulate(trace, s), trace, best_j) for s in range(seeds)]
        regret["published"][w] = np.array(theirs)
        for s in range(min(seeds, 5)):
            agreed += agree(published.simulate(trace, s, our_draws=True), trace, s)
            compared += 1
        for p in POLICIES:
            job = replay_job(trace, p, eta=ETA, beta=BETA)
            runs = [replay(trace, job, recurrences=RECURRENCES, seed=s) for s in range(seeds)]
            regret[p][w] = np.array([r.regret for r in runs])
            last[p][w] = mean(r.last(r.last_costs_j) / r.best_cost_j for r in runs)
            if p == "zeus-paper":
                energy = mean(r.last(r.last_energies_j) for r in _figure6(trace, seeds))
                saved[w] = 100 * (1 - energy / default_run(trace, job).energy_j)
        job = replay_job(trace, "lookahead", eta=ETA, beta=BETA, exploration_budget=BUDGET)
        runs = [replay(trace, job, recurrences=RECURRENCES, seed=s) for s in range(seeds)]
        regret["lookahead with budget"][w] = np.array([r.regret for r in runs])
        default_j = default_run(trace, job).cost_j
        dearest_share[w] = dearest(runs, default_j)
        dearest_single[w] = max(dearest([r], default_j) for r in runs)
        dearest_ever[w] = dearest(runs, default_j, since=2)
    return {
        "agreement": {"runs": compared, "identical": agreed},
        "published_regret": {w: float(v.mean()) for w, v in regret["published"].items()},
        "ratios": {p: ratio(regret[p], regret["published"]).__dict__ for p in regret if p != "published"},
        "last_five_cost": {p: {"mean": mean(v.values()), **v} for p, v in last.items()},
        "zeus_paper_energy_saved_percent": saved,
        "dearest_with_budget": dearest_share,
        "dearest_single_run_with_budget": dearest_single,
        "dearest_ever_with_budget": dearest_ever,
        **measure_speed(published, traces.values()),
    }


def measure_speed(published: Published, traces: Collection[Trace]) -> dict[str, dict[str, float]]:
    """Return microseconds of CPU time a recurrence takes, and how many times faster than published that is."""
    seconds = {"published": 0.0, **dict.fromkeys(POLICIES, 0.0)}
    for trace in traces:
        seconds["published"] += least_seconds(partial(published.simulate, trace, 1), 3)
        for p in POLICIES:
            go = partial(replay, trace, replay_job(trace, p), recurrences=RECURRENCES, seed=1)
            seconds[p] += least_seconds(go, 8)
    return {
        "speed": {p: seconds["published"] / seconds[p] for p in POLICIES},
        "microseconds": {p: 1e6 * s / (RECURRENCES * len(traces)) for p, s in seconds.items()},
    }


def show_speed(folder: Path, gpus: Sequence[str]) -> None:
    for gpu in gpus:
        traces = [read_trace(folder, w, gpu, spec) for w, spec in JOBS.items()]
        r = measure_speed(Published(folder, gpu), traces)
        figures = ", ".join(f"{p} {v:.1f} ({r['microseconds'][p]:.0f} us)" for p, v in r["speed"].items())
        print(f"{gpu}: speed / published ({r['microseconds']['published']:.0f} us a recurrence): {figures}")


def _figure6(trace: Trace, seeds: int) -> list[Replay]:
    count = 2 * len(trace.batch_sizes) * len(trace.power_limits_w)
    job = replay_job(trace, "zeus-paper", eta=ETA, beta=BETA)
    return [replay(trace, job, recurrences=count, seed=s) for s in range(min(seeds, 5))]


def goals(gpus: dict[str, Any], goal: Goals) -> None:
    for gpu, r in gpus.items():
        ratios = r["ratios"]
        goal.at_most(f"lookahead, {gpu}", ratios["lookahead"]["value"], 0.30)
        goal.at_most(f"lookahead, {gpu}, worst workload", max(ratios["lookahead"]["workloads"].values()), 1.0)
        goal.at_most(f"thompson, {gpu}", ratios["thompson"]["value"], 0.45 if gpu == "v100" else 0.50)
        goal.at_most(f"thompson, {gpu}, worst workload", max(ratios["thompson"]["workloads"].values()), 1.3)
        for p in ("lookahead", "thompson"):
            goal.at_most(f"{p}, {gpu}, last five cost / best arm", r["last_five_cost"][p]["mean"], 1.01)
        goal.at_most(f"lookahead with a budget of 5 %, {gpu}", ratios["lookahead with budget"]["value"], 0.45)
        for what, key in (
            ("mean over seeds, from the 10th recurrence on", "dearest_with_budget"),
            ("every single run, from the 10th recurrence on", "dearest_single_run_with_budget"),
            ("mean over seeds, from the 2nd recurrence on", "dearest_ever_with_budget"),
        ):
            goal.at_most(f"cumulative cost / default with that budget, {what}, {gpu}", max(r[key].values()), 1.05)
        goal.at_least(f"replay speed of zeus-paper, {gpu}", r["speed"]["zeus-paper"], 100)
        for p in ("lookahead", "thompson"):
            goal.at_least(f"replay speed of {p}, {gpu}", r["speed"][p], 12)
        same = r["agreement"]
        goal.at_least(f"runs identical to the published package, {gpu}", same["identical"] / same["runs"], 1.0)


def show(gpus: dict[str, Any], seeds: int) -> None:
    for gpu, r in gpus.items():
        print(f"\n{gpu}: cumulative regret at {RECURRENCES} recurrences / published, {seeds} seeds")
        print(
            f"{'':24}{'all':>7} {'95 % interval':>15}  "
            + " ".join(f"{w[:11]:>12}" for w in JOBS)
            + "   left out: worst"
        )
        for p, v in r["ratios"].items():
            each = " ".join(f"{v['workloads'][w]:12.2f}" for w in JOBS)
            interval = f"{v['low']:.2f} to {v['high']:.2f}"
            print(f"{p:24}{v['value']:7.3f} {interval:>15}  {each}   {max(v['left_out'].values()):.3f}")
        each = " ".join(f"{r['published_regret'][w]:12.2f}" for w in JOBS)
        print(f"{'published, regret':24}{'':7} {'':>15}  {each}")
        print("speed / published: " + ", ".join(f"{p} {v:.1f}" for p, v in r["speed"].items()))
        saved = r["zeus_paper_energy_saved_percent"].values()
        print(f"zeus-paper, last-five energy saved: {min(saved):.1f} % to {max(saved):.1f} %")
        same = r["agreement"]
        print(f"zeus-paper, simulations identical to the published package: {same['identical']} of {same['runs']}")
