"""Figures that follow from the traces alone, without any policy: every (batch size, power limit) is known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeus_flows.core.power import best_setting
from zeus_flows.experiments.paper.result import Chart, ChartKind, Claim, GuideLine, Result, range_claim
from zeus_flows.experiments.replay.replaying import replay_job
from zeus_flows.experiments.replay.traces import Trace

PROFILED_S = 5.0  # seconds of profiling for each power limit (section 5)
RISE = 0.05  # a curve that rises by less than this share has not turned: runs vary by more


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a run at one batch size and power limit is expected to take."""

    batch_size: int
    power_limit_w: float
    time_s: float
    energy_j: float


def configurations(trace: Trace) -> list[Configuration]:
    """Return every configuration that always reaches the target."""
    found = []
    for b in trace.batch_sizes:
        epochs = trace.mean_epochs(b)
        if math.isfinite(epochs):
            for m in trace.profiles[b].measurements:
                time_s = epochs * trace.samples_per_epoch / m.samples_per_s
                found.append(Configuration(b, m.setting, time_s, time_s * m.average_power_w))
    return found


def baseline(trace: Trace) -> Configuration:
    """Return b0 at the greatest power limit; the largest batch size that always gets there, where b0 does not."""
    known = configurations(trace)
    sizes = [c.batch_size for c in known]
    b = trace.default_batch_size if trace.default_batch_size in sizes else max(sizes)
    return max((c for c in known if c.batch_size == b), key=lambda c: c.power_limit_w)


def front(known: Sequence[Configuration]) -> list[Configuration]:
    """Return the Pareto front, fastest first: nothing else is both faster and cheaper."""
    best: list[Configuration] = []
    for c in sorted(known, key=lambda c: (c.time_s, c.energy_j)):
        if not best or c.energy_j < best[-1].energy_j:
            best.append(c)
    return best


def potential(traces: Sequence[Trace]) -> Result:
    """Figures 1 and 15: the least energy by batch size, by power limit and by both, over the baseline's."""
    rows: list[tuple[str, str, str, float]] = []
    for trace in traces:
        known, base = configurations(trace), baseline(trace)
        least = {
            "batch size": [c for c in known if c.power_limit_w == base.power_limit_w],
            "power limit": [c for c in known if c.batch_size == base.batch_size],
            "both": known,
        }
        for tuned, among in least.items():
            energy_j = min(c.energy_j for c in among)
            rows.append((trace.workload, trace.gpu.model, tuned, round(energy_j / base.energy_j, 4)))
    published = {"batch size": (3.4, 65.0), "power limit": (3.0, 31.5), "both": (23.8, 74.7)}
    claims = [
        range_claim(
            f"least energy on V100 by {tuned}: saved",
            ends,
            [100 * (1 - share) for _, gpu, what, share in rows if gpu == "v100" and what == tuned],
            tolerance=3.0,
        )
        for tuned, ends in published.items()
        if any(gpu == "v100" for _, gpu, _, _ in rows)
    ]
    greatest = max(share for _, _, what, share in rows if what == "both")
    claims.append(
        Claim(
            "something can be saved in every workload on every GPU",
            "on 4 GPUs",
            f"at least {100 * (1 - greatest):.1f} % on {len({row[1] for row in rows})}",
            "more than 5 %",
            greatest < 0.95,
        )
    )
    columns = ("workload", "gpu", "tuned", "energy over the default's")
    chart = Chart(ChartKind.BARS, "workload", columns[3], "tuned", "gpu", level=1.0)
    return Result(columns, tuple(rows), chart, tuple(claims))


def pareto(traces: Sequence[Trace]) -> Result:
    """Figures 2 and 16: energy over time of every configuration, the front, and b0 at full power."""
    rows: list[tuple[str, str, int, float, float, float, float]] = []
    dearer, lines = [], list[GuideLine]()
    for trace in traces:
        known = configurations(trace)
        best = front(known)
        base = baseline(trace)
        lines += _power_boundaries(trace.workload, known)
        for c in known:
            what = "default" if c == base else "front" if c in best else "other"
            watts = c.energy_j / c.time_s
            rows.append((trace.workload, what, c.batch_size, c.power_limit_w, c.time_s, c.energy_j, round(watts, 1)))
        blind = max(known, key=lambda c: (c.batch_size, c.power_limit_w))
        dearer.append(max(c.energy_j for c in best) / blind.energy_j)
    claims = [
        Claim(
            "all of the front takes less energy than the largest batch size at full power",
            "in every workload",
            f"at most {max(dearer):.2f} of it",
            "at most 1",
            max(dearer) <= 1.0,
        )
    ]
    for trace in traces:
        if trace.workload == "librispeech" and trace.gpu.model == "v100":
            claims += _librispeech(configurations(trace))
    columns = ("workload", "configuration", "batch size", "limit (W)", "TTA (s)", "ETA (J)", "average power (W)")
    chart = Chart(ChartKind.POINTS, "TTA (s)", "ETA (J)", "configuration", "workload")
    return Result(columns, tuple(rows), chart, tuple(claims), tuple(lines))


def _power_boundaries(panel: str, known: Sequence[Configuration]) -> Iterator[GuideLine]:
    """Yield the two lines of constant average power that hold every configuration (section 2.3)."""
    longest_s = max(c.time_s for c in known)
    for watts in (min(c.energy_j / c.time_s for c in known), max(c.energy_j / c.time_s for c in known)):
        yield GuideLine(f"{watts:.0f} W", panel, (0.0, 0.0), (longest_s, watts * longest_s))


def _librispeech(known: Sequence[Configuration]) -> Iterator[Claim]:
    """Yield what section 2.3 says about DeepSpeech2 on a V100."""
    watts = [c.energy_j / c.time_s for c in known]
    yield range_claim("DeepSpeech2: average power", (90.0, 210.0), watts, tolerance=10.0, unit="W")
    energy, time = min(known, key=lambda c: c.energy_j), min(known, key=lambda c: c.time_s)
    for what, c, at in (("energy", energy, (32, 100.0)), ("time", time, (48, 250.0))):
        ours = (c.batch_size, c.power_limit_w)
        yield Claim(
            f"DeepSpeech2: least {what}", f"b {at[0]}, {at[1]:g} W", f"b {ours[0]}, {ours[1]:g} W", "0", ours == at
        )


def eta_sweep(traces: Sequence[Trace]) -> Result:
    """Figure 11: where the least cost lies as eta goes from 0 to 1, and the line of that cost for each eta."""
    rows: list[tuple[str, float, int, float, float, float, str]] = []
    lines, below = list[GuideLine](), 0
    for trace in traces:
        known = configurations(trace)
        best = front(known)
        for tenths in range(11):
            eta = tenths / 10
            max_power_w = trace.gpu.max_power_w
            c = min(known, key=lambda c: eta * c.energy_j + (1 - eta) * max_power_w * c.time_s)
            on = "yes" if c in best else "no"
            rows.append((trace.workload, eta, c.batch_size, c.power_limit_w, c.time_s, c.energy_j, on))
            if 0 < eta < 1:
                line = _iso_cost(trace.workload, known, c, per_second_j=(1 - eta) / eta * max_power_w)
                lines.append(line)
                below += sum(other.energy_j < _height(line, other.time_s) * (1 - 1e-9) for other in known)
    off = sum(row[-1] == "no" for row in rows)
    claims = (
        Claim("every eta lands on the Pareto front", "close to it", f"{off} of {len(rows)} off it", "0", off == 0),
        Claim(
            "lines of constant cost envelop the front", "an envelope", f"{below} points below a line", "0", below == 0
        ),
    )
    columns = ("workload", "eta", "batch size", "limit (W)", "TTA (s)", "ETA (J)", "on the front")
    chart = Chart(ChartKind.LINES, "TTA (s)", "ETA (J)", "workload", "workload")
    return Result(columns, tuple(rows), chart, claims, tuple(lines))


def _iso_cost(panel: str, known: Sequence[Configuration], at: Configuration, *, per_second_j: float) -> GuideLine:
    """Return the line along which eq. 2 has the cost of `at`, where a second is worth so many joules."""
    first_s, last_s = min(c.time_s for c in known), max(c.time_s for c in known)
    ends = [(t, at.energy_j + per_second_j * (at.time_s - t)) for t in (first_s, last_s)]
    return GuideLine("constant cost", panel, ends[0], ends[1])


def _height(line: GuideLine, x: float) -> float:
    """Return a line's y at an x.

    >>> _height(GuideLine("", "", (0.0, 1.0), (2.0, 5.0)), 1.0)
    3.0
    """
    (x0, y0), (x1, y1) = line.begin, line.end
    return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def over_batch_size(traces: Sequence[Trace]) -> Result:
    """Figures 5 and 17: energy to accuracy of each batch size at its best limit; the range of its repetitions."""
    rows: list[tuple[str, int, float, float, float]] = []
    turns = []
    for trace in traces:
        curve = []
        for b in trace.batch_sizes:
            if not math.isfinite(trace.mean_epochs(b)):
                continue
            runs = [e for e in trace.epochs[b] if e is not None]
            profile = trace.profiles[b].measurements
            joules = min(trace.samples_per_epoch / m.samples_per_s * m.average_power_w for m in profile)
            curve.append(trace.mean_epochs(b) * joules)
            rows.append((trace.workload, b, curve[-1], min(runs) * joules, max(runs) * joules))
        turns.append((trace.workload, _convex(curve)))
    bent = [name for name, ok in turns if not ok]
    claim = Claim(
        "energy falls and then rises with the batch size",
        "convex in every workload",
        f"in {len(turns) - len(bent)} of {len(turns)}" + (f"; not in {', '.join(bent)}" if bent else ""),
        f"steps of {100 * RISE:g} %",
        not bent,
    )
    columns = ("workload", "batch size", "ETA (J)", "least run", "greatest run")
    chart = Chart(ChartKind.LINES, columns[1], columns[2], columns[0], columns[0], columns[3], columns[4])
    return Result(columns, tuple(rows), chart, (claim,))


def _convex(curve: Sequence[float]) -> bool:
    """Return whether values fall and then rise; steps smaller than `RISE` are neither.

    >>> _convex([3.0, 2.0, 2.05, 1.0, 2.0]), _convex([1.0, 2.0, 1.0])
    (True, False)
    """
    risen = False
    for a, b in pairwise(curve):
        if risen and b < a * (1 - RISE):
            return False
        risen = risen or b > a * (1 + RISE)
    return True


def over_limit(traces: Sequence[Trace]) -> Result:
    """Figure 18: energy to accuracy at b0 for each power limit."""
    rows: list[tuple[str, float, float]] = []
    below = 0
    for trace in traces:
        base = baseline(trace)
        same = [c for c in configurations(trace) if c.batch_size == base.batch_size]
        rows += [(trace.workload, c.power_limit_w, c.energy_j) for c in sorted(same, key=lambda c: c.power_limit_w)]
        below += min(same, key=lambda c: c.energy_j).power_limit_w < base.power_limit_w
    ours = f"{below} of {len(traces)} workloads"
    claim = Claim("the least energy lies below the greatest limit", "it may", ours, "all", below == len(traces))
    columns = ("workload", "limit (W)", "ETA (J)")
    return Result(
        columns, tuple(rows), Chart(ChartKind.LINES, columns[1], columns[2], "workload", "workload"), (claim,)
    )


def overhead(traces: Sequence[Trace]) -> Result:
    """Section 6.5: what five seconds at each limit add to a run of b0 at its best limit.

    The samples of those seconds count as trained; switching limits is taken to cost nothing.
    """
    rows: list[tuple[str, float, float]] = []
    for trace in traces:
        b = baseline(trace).batch_size
        at = best_setting(replay_job(trace, "power"), trace.profiles[b], samples_per_epoch=trace.samples_per_epoch)
        time_s = trace.mean_epochs(b) * trace.samples_per_epoch / at.samples_per_s
        each = trace.profiles[b].measurements
        instead_s = sum(PROFILED_S * m.samples_per_s / at.samples_per_s for m in each)
        more_s = PROFILED_S * len(each) - instead_s
        more_j = sum(PROFILED_S * m.average_power_w for m in each) - instead_s * at.average_power_w
        energy_j = time_s * at.average_power_w
        rows.append((trace.workload, round(100 * more_j / energy_j, 4), round(100 * more_s / time_s, 4)))
    published = {"librispeech": ((0.01, 0.03), 0.1), "cifar100": ((-2.8, 0.6), 1.0)}
    claims = []
    for name, joules, seconds in rows:
        if name in published:
            (energy, time), tolerance = published[name]
            met = abs(joules - energy) <= tolerance and abs(seconds - time) <= tolerance
            text = ("{:+.2f} % energy, {:+.2f} % time").format
            claims.append(
                Claim(f"{name}: profiling adds", text(energy, time), text(joules, seconds), f"{tolerance:g}", met)
            )
    columns = ("workload", "energy added (%)", "time added (%)")
    chart = Chart(ChartKind.BARS, "workload", columns[2], "", level=0.0)
    return Result(columns, tuple(rows), chart, tuple(claims))
