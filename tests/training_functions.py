"""Train functions that tests name in job files."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from zeus_flows import Question
from zeus_flows.training.session import Session


def noisy(session: Session, *, epochs: float = 4.0) -> None:
    """Reach the target after about `epochs` epochs, sooner with small batches; no model, no time."""
    needed = round(epochs * (0.7 + session.batch_size / 200) * random.Random(session.seed).uniform(0.8, 1.2))
    for epoch in session.epochs():
        for _ in session.steps([0] * (1024 // session.batch_size)):
            pass
        session.report_metric(epoch / max(1, needed))


def loud(session: Session) -> None:
    """Print in every way there is, and reach the target."""
    print("printed")
    sys.stdout.write("written\n")
    os.write(1, b"to the number of the stream\n")
    subprocess.run(["echo", "by a child"], check=True)
    noisy(session)


def never(session: Session) -> None:
    """Train and never reach the target."""
    for _ in session.epochs():
        list(session.steps([0] * 4))
        session.report_metric(0.0)


def crash(session: Session) -> None:
    """Break in the first epoch."""
    for _ in session.epochs():
        raise ZeroDivisionError("the user's bug")


def verbose_crash(session: Session) -> None:
    """Break deep down, with much to say."""

    def deeper(levels: int) -> None:
        if levels == 0:
            raise ValueError('"x"' * 5_000 + "xxx\x00\x1b")
        deeper(levels - 1)

    for _ in session.epochs():
        deeper(50)


def hungry(session: Session, *, fits: int = 32, epochs: float = 4.0) -> None:
    """Need more memory than there is at batch sizes above `fits`."""
    if session.batch_size > fits:
        raise torch.OutOfMemoryError("CUDA out of memory")
    noisy(session, epochs=epochs)


def hungry_when_evaluating(session: Session, *, fits: int = 32) -> None:
    """Train at any batch size, and need more memory than there is to evaluate above `fits`."""
    for _ in session.epochs():
        list(session.steps(range(400)))
        if session.batch_size > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        session.report_metric(1.0)


def fragile(session: Session, *, breaks_in: list[int]) -> None:
    """Break in the middle of given epochs, once each; go on from the last checkpoint."""
    saved = session.load() or {"steps": 0, "broken": 0}
    steps, broken = int(saved["steps"]), int(saved["broken"])
    for epoch in session.epochs():
        if epoch in breaks_in[broken:]:
            raise ConnectionError(f"the data went away in epoch {epoch}")
        list(session.steps([0] * 8))
        steps += 1
        session.report_metric(steps / 6)
        session.save({"steps": steps, "broken": sum(epoch + 1 >= e for e in breaks_in)})


def endless(session: Session, *, step_s: float = 0.01) -> None:
    """Train until told to stop."""
    for _ in session.epochs():
        for _batch in session.steps([0] * 200):
            time.sleep(step_s)
        session.report_metric(0.0)


def evaluate(question: Question, *, progress: float = 1.0, breaks: bool = False) -> float:
    """Find the newest model as good as told: a drift gate."""
    if breaks:
        raise FileNotFoundError("model.pt")
    return progress


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
