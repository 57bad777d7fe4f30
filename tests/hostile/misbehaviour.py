"""Train functions that do what no train function should. Add one, and a line to `test_train_function.py`."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from typing import Any

from tests.training_functions import noisy
from zeus_flows.training.session import Session

#: Longer than anybody waits here, and not for ever.
LONG_S = 45.0


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


class Unspeakable(Exception):
    """Has no text: asking for it raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def unspeakable(session: Session) -> None:
    """Break with something that cannot be told."""
    for _ in session.epochs():
        raise Unspeakable


def circular(session: Session) -> None:
    """Break with an exception that is its own cause."""
    for _ in session.epochs():
        error = RuntimeError("round and round")
        error.__cause__ = error
        raise error


def surrogate(session: Session) -> None:
    """Break with a text that no database takes."""
    for _ in session.epochs():
        raise ValueError("half \ud800 a character\0 and \x1b[31m colour")


def enormous(session: Session) -> None:
    """Break with much to say."""
    for _ in session.epochs():
        raise ValueError("x" * 5_000_000)


class Order(BaseException):
    """No error of the usual kind."""


def orders(session: Session) -> None:
    """Break with what `except Exception` does not catch."""
    for _ in session.epochs():
        raise Order("out of the way")


def converges_then(session: Session, *, what: str) -> None:
    """Reach the target, and then do harm."""
    noisy(session)
    assert session.converged
    match what:
        case "closes all files":
            os.closerange(3, 4096)
        case "deletes the state directory":
            shutil.rmtree(os.environ["ZEUS_FLOWS_STATE_DIR"])
        case "leaves a thread":
            threading.Thread(target=time.sleep, args=(LONG_S,), name="left").start()
        case "forks":
            if os.fork() == 0:
                time.sleep(LONG_S)
                os._exit(0)
        case "forks and comes back":
            os.fork()
        case "prints much, moves away and hears no signal":
            for _ in range(20):
                print("x" * 1_000_000)
            os.chdir("/")
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        case "closes standard output":
            sys.stdout.close()
            sys.stderr.close()
        case _:
            raise AssertionError(what)


def leaves(session: Session) -> None:
    """End the process with a word."""
    exits(session, code="so long")


def deaf(session: Session) -> None:
    """Train on, whatever is raised here."""
    for _ in session.epochs():
        print("training", flush=True)
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            with contextlib.suppress(BaseException):
                time.sleep(0.05)


def rowdy(session: Any) -> None:
    """Train on several ranks: print much, fork away, leave a thread, hear no SIGTERM; and reach the target."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for epoch in session.epochs():
        list(session.steps([0] * 4))
        for _ in range(5):
            print("x" * 1_000_000)
        session.report_metric(float(epoch))
    if os.fork() == 0:
        os.setsid()
        time.sleep(LONG_S)
        os._exit(0)
    threading.Thread(target=time.sleep, args=(LONG_S,)).start()
