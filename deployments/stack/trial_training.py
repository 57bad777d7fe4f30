"""What the jobs of the trial train: nothing, for some seconds, and leave a witness of every stage in a file.

The trial copies this file beside its job files. Witnesses are independent of what Prefect and MLflow say.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from prefect import runtime

from zeus_flows.killpoints import listen
from zeus_flows.training.session import Session

WITNESSES = Path("witnesses")


def train(session: Session, *, job: str, hold_s: float = 0.0) -> None:
    """Reach the target after a few epochs of a second, sooner with small batches.

    Args:
        session: Of the attempt.
        job: The job's name, under which witnesses are left.
        hold_s: Seconds that the first observation is held back just before MLflow is told of it.
    """

    def said(stage: str) -> None:
        WITNESSES.mkdir(exist_ok=True)
        line = {"flow_run": runtime.flow_run.id, "recurrence": session.recurrence, "stage": stage, "at": time.time()}
        with (WITNESSES / f"{job}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def hold(point: str) -> None:
        if point == "before-observation":
            held = Path(f"{job}.held")
            if hold_s and not held.exists():
                held.touch()
                said("observing")
                time.sleep(hold_s)

    listen(hold)
    said("training")
    needed = round((6 + session.batch_size / 64) * random.Random(session.seed).uniform(0.8, 1.2))  # noqa: S311
    for epoch in session.epochs():
        steps = 1024 // session.batch_size
        for _ in session.steps([0] * steps):
            time.sleep(1.0 / steps)
        session.report_metric(epoch / needed)
    said("trained")
