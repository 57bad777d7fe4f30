"""Train functions that do what no train function should. Add one, and a line to `test_train_function.py`."""

from __future__ import annotations

import logging
import os
import sys

from tests.training_functions import noisy
from zeus_flows.training.session import Session


def tells_secrets(session: Session, *, uri: str) -> None:
    """Say where runs go in every way there is, and break with it."""
    import mlflow

    mlflow.set_tracking_uri(uri)
    with mlflow.start_run():
        logging.getLogger("prefect.task_runs").warning("runs go to %s", uri)
    for _ in session.epochs():
        raise ConnectionError(f"no answer from {uri} with {os.environ['MY_API_KEY']}")


def needs(session: Session, *, data_path: str, rows: int = 10) -> None:
    """Train, given parameters."""
    noisy(session)


def exits(session: Session, *, code: int | str | None = 0) -> None:
    """End the process in the middle of an epoch."""
    for _ in session.epochs():
        sys.exit(code)
