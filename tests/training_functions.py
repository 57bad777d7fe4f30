"""Train functions that tests name in job files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from zeus_flows.training.session import Session


def noisy(session: Session, *, epochs: float = 4.0) -> None:
    """Reach the target after about `epochs` epochs, sooner with small batches; no model, no time."""
    needed = round(epochs * (0.7 + session.batch_size / 200) * random.Random(session.seed).uniform(0.8, 1.2))
    for epoch in session.epochs():
        for _ in session.steps([0] * (1024 // session.batch_size)):
            pass
        session.report_metric(epoch / max(1, needed))


def never(session: Session) -> None:
    """Train and never reach the target."""
    for _ in session.epochs():
        list(session.steps([0] * 4))
        session.report_metric(0.0)


def crash(session: Session) -> None:
    """Break in the first epoch."""
    for _ in session.epochs():
        raise ZeroDivisionError("the user's bug")


def write_job(path: Path, function: str = "noisy", **changes: Any) -> Path:
    """Write a job file for one of these functions."""
    fields: dict[str, Any] = {
        "name": "nightly",
        "train": {"function": f"tests.training_functions:{function}"},
        "target": {"metric": "progress", "value": 1.0, "better": "higher"},
        "batch_sizes": [16, 32, 64, 128],
        "default_batch_size": 128,
        "max_epochs": 20,
        "device": "simulated-v100",
    }
    path.write_text(yaml.safe_dump(fields | changes))
    return path
