"""Figures that compare policies over recurrences: replays of production's loop on the traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zeus_flows.experiments.paper.result import Chart, ChartKind, Claim, Result, range_claim
from zeus_flows.experiments.replay.comparison import default_run
from zeus_flows.experiments.replay.replaying import LAST, Replay, replay, replay_job
from zeus_flows.experiments.replay.traces import Trace

Say = Callable[[str], None]
POLICIES = ("grid", "zeus-paper", "thompson")
BETAS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
ETAS = (0.0, 0.25, 0.5, 0.75, 1.0)
SETTLED = 0.9  # share of the recurrences from a point on that run what the last ones run


def recurrences_of(trace: Trace) -> int:
    """Return how many recurrences are replayed: 2 |B| |P| (section 6.2)."""
    return 2 * len(trace.batch_sizes) * len(trace.power_limits_w)


def _runs(trace: Trace, policy: str, seeds: int, say: Say, *, offline: bool = False, **changes: object) -> list[Replay]:
    """Replay a policy with each seed."""
    say(f"{trace.workload} on {trace.gpu.model}, {policy} {' '.join(f'{k} {v}' for k, v in changes.items())}".rstrip())
    job, count = replay_job(trace, policy, **changes), recurrences_of(trace)
    return [replay(trace, job, recurrences=count, seed=seed, offline=offline) for seed in range(seeds)]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, 5th and 95th percentile over seeds."""
    low, high = np.percentile(values, [5, 95])
    return round(float(np.mean(values)), 4), round(float(low), 4), round(float(high), 4)


def geometric(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def last_five(traces: Sequence[Trace], seeds: int, say: Say) -> Result:
    """Figures 6 and 23: energy and time of the last five recurrences, over the default's."""
    rows: list[tuple[str, str, str, str, float, float, float]] = []
    for trace in traces:
        for policy in POLICIES:
            runs = _runs(trace, policy, seeds, say)
            default = default_run(trace, replay_job(trace, policy))
            energy = _spread([r.last(r.last_energies_j) / default.energy_j for r in runs])
            time = _spread([r.last(r.last_times_s) / default.time_s for r in runs])
            rows.append((trace.workload, trace.gpu.model, policy, "energy", *energy))
            rows.append((trace.workload, trace.gpu.model, policy, "time", *time))
    claims = []
    for what, ends in (("energy", (15.3, 75.8)), ("time", (-12.8, 60.1))):
        saved = [100 * (1 - r[4]) for r in rows if r[1:4] == ("v100", "zeus-paper", what)]
        if saved:
            claims.append(range_claim(f"Zeus, last five on V100: {what} saved", ends, saved, tolerance=5.0))
    columns = ("workload", "gpu", "policy", "of", "over the default's", "5 %", "95 %")
    chart = Chart(ChartKind.BARS, "workload", columns[4], "policy", "of", "5 %", "95 %", level=1.0)
    return Result(columns, tuple(rows), chart, tuple(claims))


def gpus(traces: Sequence[Trace], seeds: int, say: Say) -> Result:
    """Figure 14: geometric mean over workloads of the last five's energy over the default's, for each GPU."""
    every = last_five(traces, seeds, say)
    rows: list[tuple[str, str, float]] = []
    for gpu in sorted({str(c) for c in every.column("gpu")}):
        for policy in POLICIES:
            shares = [float(r[4]) for r in every.rows if r[1:4] == (gpu, policy, "energy")]
            rows.append((gpu, policy, round(geometric(shares), 4)))
    worst = max(r[2] for r in rows if r[1] == "zeus-paper")
    ours = f"at most {worst:.2f} of the default's on {len(rows) // len(POLICIES)}"
    claim = Claim("Zeus takes less energy on every GPU", "on 4 GPUs", ours, "below 0.9", worst < 0.9)
    columns = ("gpu", "policy", "energy over the default's")
    return Result(columns, tuple(rows), Chart(ChartKind.BARS, "gpu", columns[2], "policy", level=1.0), (claim,))


def settled_at(replay: Replay) -> int:
    """Return when a replay has converged: the first recurrence from which on nine of ten run what the end runs.

    That is the batch size of most of the last five. Draws stray for ever, so that not all of them can be asked for.
    """
    tail = replay.batch_sizes[-LAST:]
    final = max(set(tail), key=tail.count)
    same, first = 0, len(replay.batch_sizes)
    for count, b in enumerate(reversed(replay.batch_sizes), start=1):
        same += b == final
        if b == final and same >= SETTLED * count:
            first = len(replay.batch_sizes) - count + 1
    return first


def regret(traces: Sequence[Trace], seeds: int, say: Say) -> Result:
    """Figures 7 and 19: cumulative regret (eq. 8) in runs of the best configuration, and until convergence.

    Until convergence means until the recurrence of `settled_at`, for every policy alike; the
    paper does not say what it means by it.
    """
    rows: list[tuple[str, str, int, float, float, float]] = []
    until: dict[tuple[str, str], float] = {}
    for trace in traces:
        for policy in POLICIES:
            runs = _runs(trace, policy, seeds, say)
            total = np.cumsum([[c / r.best_cost_j - 1 for c in r.costs_j] for r in runs], axis=1)
            count = total.shape[1]
            for at in sorted({1, *range(5, count, max(5, count // 30)), count}):
                rows.append((trace.workload, policy, at, *_spread(total[:, at - 1].tolist())))
            ends = [settled_at(r) for r in runs]
            until[trace.workload, policy] = float(np.mean([total[i, at - 1] for i, at in enumerate(ends)]))
    ratios = {t.workload: until[t.workload, "grid"] / max(until[t.workload, "zeus-paper"], 1e-9) for t in traces}
    worst = max(ratios, key=ratios.__getitem__)
    least = min(ratios.values())
    claims = (
        Claim(
            "Grid's regret until convergence over Zeus's, worst case",
            "72",
            f"{ratios[worst]:.1f} ({worst})",
            "a factor of 1.5",
            48 <= ratios[worst] <= 108,
        ),
        Claim(
            "Zeus has less regret until convergence", "in every workload", f"at least {least:.1f} times", "1", least > 1
        ),
    )
    columns = ("workload", "policy", "recurrence", "cumulative regret", "5 %", "95 %")
    chart = Chart(ChartKind.LINES, columns[2], columns[3], "policy", "workload", "5 %", "95 %")
    return Result(columns, tuple(rows), chart, claims)


def betas(traces: Sequence[Trace], seeds: int, say: Say) -> Result:
    """Figure 12: cumulative energy of Zeus by early-stopping threshold, over that at beta 2."""
    energy = {
        (t.workload, beta): float(np.mean([sum(r.energies_j) for r in _runs(t, "zeus-paper", seeds, say, beta=beta)]))
        for t in traces
        for beta in BETAS
    }
    rows: list[tuple[str, float, float]] = []
    for beta in BETAS:
        shares = [energy[t.workload, beta] / energy[t.workload, 2.0] for t in traces]
        rows += [(t.workload, beta, round(share, 4)) for t, share in zip(traces, shares, strict=True)]
        rows.append(("geometric mean", beta, round(geometric(shares), 4)))
    means = {beta: share for name, beta, share in rows if name == "geometric mean"}
    best = min(means, key=means.__getitem__)
    ours = f"{means[best]:.3f} at {best:g}, 1 at 2"
    claim = Claim("beta 2 has the least geometric mean", "least at 2", ours, "within 1 %", means[best] >= 0.99)
    columns = ("workload", "beta", "energy over that at 2")
    return Result(columns, tuple(rows), Chart(ChartKind.LINES, "beta", columns[2], "workload", level=1.0), (claim,))


def ablations(traces: Sequence[Trace], seeds: int, say: Say) -> Result:
    """Figure 13: what Zeus takes in all without one of its parts, over what it takes with all of them.

    Without early stopping beta is infinite; without pruning a batch size that did not reach the target is kept;
    without just-in-time profiling each power limit is measured by a whole run.
    """
    without: Mapping[str, Callable[[Trace], list[Replay]]] = {
        "early stopping": lambda t: _runs(t, "zeus-paper", seeds, say, beta=math.inf),
        "pruning": lambda t: _runs(t, "zeus-paper-unpruned", seeds, say),
        "JIT profiling": lambda t: _runs(t, "zeus-paper", seeds, say, offline=True),
    }
    rows: list[tuple[str, str, str, float, float, float]] = []
    for trace in traces:
        whole = _runs(trace, "zeus-paper", seeds, say)
        energy_j, time_s = (float(np.mean([sum(v) for v in values])) for values in _totals(whole))
        for part, replayed in without.items():
            energies, times = _totals(replayed(trace))
            rows.append((trace.workload, part, "energy", *_spread([sum(v) / energy_j for v in energies])))
            rows.append((trace.workload, part, "time", *_spread([sum(v) / time_s for v in times])))
    means = {
        (part, of): round(geometric([r[3] for r in rows if r[1:3] == (part, of)]), 4)
        for part in without
        for of in ("energy", "time")
    }
    rows += [("geometric mean", part, of, mean, mean, mean) for (part, of), mean in means.items()]
    energy = {part: means[part, "energy"] for part in without}
    ours = ", ".join(f"{part} {mean:.2f}" for part, mean in energy.items())
    claim = Claim(
        "Zeus benefits mostly from early stopping",
        "greatest without it",
        f"energy without {ours}",
        "the greatest of three",
        max(energy, key=energy.__getitem__) == "early stopping",
    )
    columns = ("workload", "without", "of", "over all of Zeus", "5 %", "95 %")
    chart = Chart(ChartKind.BARS, "workload", columns[3], "without", "of", "5 %", "95 %", level=1.0)
    return Result(columns, tuple(rows), chart, (claim,))


def _totals(runs: Sequence[Replay]) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Return energies and times of every recurrence of each replay."""
    return [r.energies_j for r in runs], [r.times_s for r in runs]


def etas(traces: Sequence[Trace], seeds: int, say: Say) -> Result:
    """Figure 22: energy and time of Zeus's last five over the default's, by eta."""
    rows: list[tuple[str, float, str, float, float, float]] = []
    for eta in ETAS:
        shares: dict[str, list[float]] = {"energy": [], "time": []}
        for trace in traces:
            runs = _runs(trace, "zeus-paper", seeds, say, eta=eta)
            default = default_run(trace, replay_job(trace, "zeus-paper"))
            energy = _spread([r.last(r.last_energies_j) / default.energy_j for r in runs])
            time = _spread([r.last(r.last_times_s) / default.time_s for r in runs])
            rows += [(trace.workload, eta, "energy", *energy), (trace.workload, eta, "time", *time)]
            shares["energy"].append(energy[0])
            shares["time"].append(time[0])
        for of, values in shares.items():
            mean_share = round(geometric(values), 4)
            rows.append(("geometric mean", eta, of, mean_share, mean_share, mean_share))
    mean = {(eta, of): share for name, eta, of, share, _, _ in rows if name == "geometric mean"}
    ends = (ETAS[0], ETAS[-1])
    energy_ends, time_ends = [mean[e, "energy"] for e in ends], [mean[e, "time"] for e in ends]
    claim = Claim(
        "from eta 0 to 1 energy falls and time rises",
        "so in the mean",
        f"energy {energy_ends[0]:.2f} to {energy_ends[1]:.2f}, time {time_ends[0]:.2f} to {time_ends[1]:.2f}",
        "direction",
        energy_ends[1] < energy_ends[0] and time_ends[1] > time_ends[0],
    )
    columns = ("workload", "eta", "of", "over the default's", "5 %", "95 %")
    chart = Chart(ChartKind.LINES, "eta", columns[3], "workload", "of", level=1.0)
    return Result(columns, tuple(rows), chart, (claim,))
