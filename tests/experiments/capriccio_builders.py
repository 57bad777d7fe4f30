"""A drifting dataset that trains in milliseconds, and an experiment on it."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.processes import Forked

START = datetime(2026, 1, 1, 12)


def write_rows(path: Path, *, days: int = 10, a_day: int = 60, shift_at: int | None = None) -> Path:
    """Write a CSV with a time, a label, two numbers and a category; from day `shift_at` on labels are noisier."""
    rng = np.random.default_rng(3)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["when", "late", "x", "y", "where"])
        for day in range(days):
            for i in range(a_day):
                x, y = rng.normal(size=2)
                noise = 2.0 if shift_at is not None and day >= shift_at else 0.2
                late = int(x + 0.5 * y + rng.normal(scale=noise) > 0)
                out.writerow(
                    [(START + timedelta(days=day, minutes=i)).isoformat(), late, f"{x:.4f}", f"{y:.4f}", "ab"[i % 2]]
                )
    return path


def write_experiment(folder: Path, **changes: Any) -> Path:
    """Write a small experiment on such a file, which it writes too where it is not there."""
    data = folder / "rows.csv"
    if not data.exists():
        write_rows(data)
    fields: dict[str, Any] = {
        "name": "small",
        "data": {
            "kind": "csv",
            "path": "rows.csv",
            "time": "when",
            "label": "late",
            "numbers": ["x", "y"],
            "categories": ["where"],
        },
        "slices": {"days": 5},
        "model": {"kind": "mlp", "hidden": 4},
        "job": {
            "device": "simulated-v100",
            "batch_sizes": [16, 32, 64],
            "default_batch_size": 64,
            "target": {"metric": "balanced_accuracy", "value": 0.85, "better": "higher"},
            "max_epochs": 30,
            "learning_rate": {"base": 0.02},
            "simulation": {"half_batch": 30},
        },
        "contenders": {"window-4": {"policy": "zeus", "window": 4}, "drift-reset": {"policy": "thompson"}},
        "science": {"seeds": 2, "replays": 3, "placebo": True, "workers": 1},
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(fields | changes, sort_keys=False))
    return path


def start_together(script: str, *arguments: str, folders: Sequence[Mapping[str, Path]]) -> list[Forked]:
    """Start a script as on several machines, and let all go on when all have said that they are ready.

    Args:
        script: Prints `ready`, and waits for a line.
        arguments: Of the script.
        folders: Of each machine, where `ZEUS_FLOWS_<name>_DIR` is.
    """
    started = []
    for mine in folders:
        own = {f"ZEUS_FLOWS_{name}_DIR": str(folder) for name, folder in mine.items()}
        started.append(Forked(script, *arguments, env=os.environ | own))
    for process in started:
        process.wait_until_it_says("ready")
    for process in started:
        process.say("go")
    return started
