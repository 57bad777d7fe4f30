"""Regret after shifts of what is trained on, and in settings other than the paper's."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scores import Goals, geometric

from zeus_flows.experiments.replay.replaying import replay, replay_job
from zeus_flows.experiments.replay.shifts import SHIFTS, VARIANTS, DriftResult, across, mean, possible
from zeus_flows.experiments.replay.traces import Trace, read_trace
from zeus_flows.experiments.replay.workloads import JOBS, MODELS, model_trace

RECURRENCES = 50


def measure_drift(folder: Path, gpu: str, seeds: int) -> list[dict[str, Any]]:
    traces = [read_trace(folder, w, gpu, spec) for w, spec in JOBS.items()]
    rows: list[dict[str, Any]] = []
    for variant in VARIANTS:
        print(f"  drift {variant.name}", file=sys.stderr)
        results: dict[str, list[DriftResult]] = {}
        cells: dict[str, float] = {}
        for shift in SHIFTS:
            for trace in (t for t in traces if possible(t, shift)):
                runs = [across(trace, shift, variant, before=25, after=25, seed=s) for s in range(seeds)]
                results.setdefault(shift.name, []).extend(runs)
                cells[f"{shift.name}, {trace.workload}"] = mean(r.regret for r in runs)
        moved = [r for name, runs in results.items() if name != "none" for r in runs]
        still = results["none"]
        delays = [r.delay for r in moved if r.delay is not None]
        rows.append(
            {
                "variant": variant.name,
                "regret": {name: mean(r.regret for r in runs) for name, runs in results.items()},
                "cells": cells,
                "false_alarms_per_100": 100 * sum(r.false_alarms for r in still) / (50 * len(still)),
                "delay": mean(delays),
                "noticed": len(delays) / len(moved),
                "unconverged": sum(r.unconverged for r in moved),
            }
        )
    return rows


def elsewhere(folder: Path) -> Iterator[tuple[str, Trace, dict[str, Any]]]:
    """Yield settings other than the paper's: eta, default batch sizes, targets, and modelled GPUs.

    They are no held-out set: all but the targets were looked at while `thompson` was given its present form.
    """
    for gpu in ("v100", "p100"):
        for w, spec in JOBS.items():
            trace = read_trace(folder, w, gpu, spec)
            for eta in (0.0, 1.0):
                yield f"{gpu}, eta {eta:g}", trace, {"eta": eta}
            usable = [b for b in trace.batch_sizes if math.isfinite(trace.mean_epochs(b))]
            for name, b in (("smallest", usable[0]), ("middle", usable[len(usable) // 2]), ("largest", usable[-1])):
                yield f"{gpu}, b0 {name}", read_trace(folder, w, gpu, spec, default_batch_size=b), {}
    with (folder / "summary_train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for w, spec in JOBS.items():
        which = (spec.dataset, spec.network, spec.optimizer)
        targets = {float(r["target_metric"]) for r in rows if (r["dataset"], r["network"], r["optimizer"]) == which}
        others = sorted(targets - {spec.target}, key=lambda t: abs(t - spec.target))
        for target in others[:4]:
            trace = read_trace(folder, w, "v100", spec, target=target)
            if math.isfinite(trace.mean_epochs(trace.default_batch_size)):
                yield "v100, other targets", trace, {}
    for gpu in ("a40", "rtx6000"):
        for w in MODELS:
            yield f"{gpu}, modelled", model_trace(w, gpu), {}


def measure_elsewhere(folder: Path, seeds: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return ratios to `zeus-paper`, which makes the published package's decisions, in other settings."""
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for name, trace, changes in elsewhere(folder):
        means = {}
        for p in ("zeus-paper", "lookahead", "thompson"):
            job = replay_job(trace, p, **changes)
            runs = (replay(trace, job, recurrences=RECURRENCES, seed=s) for s in range(seeds))
            means[p] = max(mean(r.regret for r in runs), 1e-3)
        for p in ("lookahead", "thompson"):
            found.setdefault(name, {}).setdefault(p, []).append((means[p] / means["zeus-paper"], trace.workload))
    return {
        name: {
            p: {"value": geometric([v for v, _ in cells]), "worst": max(cells)[0], "worst_workload": max(cells)[1]}
            for p, cells in policies.items()
        }
        for name, policies in found.items()
    }


def goals(drift: list[dict[str, Any]], goal: Goals) -> None:
    rows = {row["variant"]: row for row in drift}
    moved = [s.name for s in SHIFTS if s.name != "none"]
    peer = rows["zeus-paper, window 10"]
    for name in ("lookahead, reset", "thompson, reset"):
        ours = rows[name]
        goal.at_most(
            f"after shifts, mean regret of {name} / zeus-paper, window 10",
            mean(ours["regret"][s] for s in moved) / mean(peer["regret"][s] for s in moved),
            0.7,
        )
        goal.at_most(f"the same, worst shift, {name}", max(ours["regret"][s] / peer["regret"][s] for s in moved), 1.3)
        goal.at_most(f"recurrences without the target after shifts, {name}", ours["unconverged"], 0)


def show_drift(rows: list[dict[str, Any]], gpu: str) -> None:
    print(f"\ndrift ({gpu}): regret in the 25 recurrences after a shift at the 25th")
    names = [s.name for s in SHIFTS]
    print(f"{'':24}" + " ".join(f"{n[:14]:>15}" for n in names) + "  alarms/100  noticed  delay  failed")
    for row in rows:
        cells = " ".join(f"{row['regret'][n]:15.2f}" for n in names)
        alarms = f"{row['false_alarms_per_100']:12.2f} {100 * row['noticed']:6.0f} % {row['delay']:6.1f}"
        print(f"{row['variant']:24}{cells}{alarms} {row['unconverged']:7}")


def show_elsewhere(settings: dict[str, dict[str, dict[str, Any]]], seeds: int) -> None:
    print(f"\nelsewhere: regret / zeus-paper in other settings than the paper's, {seeds} seeds")
    for name, policies in settings.items():
        figures = (f"{p} {v['value']:.2f} (worst {v['worst']:.2f}, {v['worst_workload']})" for p, v in policies.items())
        print(f"{name:24}" + ", ".join(figures))
