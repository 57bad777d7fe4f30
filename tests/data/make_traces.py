"""Writes `tests/data/traces`: small traces in the published format, made from the built-in models of three workloads.

    python -m tests.data.make_traces

They stand for nothing that was measured. With them, what reads, replays and compares traces is tested in any clone.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from zeus_flows.experiments.replay.traces import POWER_COLUMNS, SAMPLES_PER_EPOCH, TRAIN_COLUMNS
from zeus_flows.experiments.replay.workloads import JOBS, model_trace

FOLDER = Path(__file__).parent / "traces"
WORKLOADS = ("librispeech", "cifar100", "movielens")
GPU = "v100"
#: A second target of one workload, which three quarters of the epochs reach.
EASIER = {"cifar100": 0.5}


def write(folder: Path) -> None:
    """Write both files anew."""
    train: list[Sequence[object]] = []
    power: list[Sequence[object]] = []
    for workload in WORKLOADS:
        spec, trace = JOBS[workload], model_trace(workload, GPU)
        targets = {spec.target: 1.0} | ({EASIER[workload]: 0.75} if workload in EASIER else {})
        for b in trace.batch_sizes:
            job = (spec.dataset, spec.network, b, spec.optimizer)
            for target, share in targets.items():
                for run, epochs in enumerate(trace.epochs[b], start=1):
                    train.append((*job, 0.001, run, target, "nan" if epochs is None else round(share * epochs)))
            for m in trace.profiles[b].measurements:
                seconds = SAMPLES_PER_EPOCH / m.samples_per_s
                power.append((*job, f"{m.setting:g}", f"{seconds:.6g}", f"{m.average_power_w:.6g}"))
    _write(folder / "summary_train.csv", TRAIN_COLUMNS, train)
    _write(folder / f"summary_power_{GPU}.csv", POWER_COLUMNS, power)


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(columns)
        out.writerows(rows)


if __name__ == "__main__":
    write(FOLDER)
