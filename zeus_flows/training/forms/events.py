"""A session driven by the events of a framework that has a training loop of its own.

A callback tells what happens, in the framework's order, and asks `stops` when it may stop. What is measured, booked and
decided is the session's: it is told what a train function's loop would have told it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any

from zeus_flows.core.records import Outcome
from zeus_flows.errors import TrainingError
from zeus_flows.training.session import Session, current_session

log = logging.getLogger(__name__)


class EventLoop:
    """One attempt's loop, as a framework's events tell it.

    Args:
        session: Whose loop it is.
        samples: Samples per epoch; 0 where only the end of an epoch will tell.
        batch_size: Samples that an optimizer step takes, gradient accumulation included.
    """

    def __init__(self, session: Session, *, samples: int, batch_size: int) -> None:
        self._session = session
        self._batches = _LengthOnly(samples, batch_size)
        self._steps: Iterator[None] | None = None
        self._evaluation: AbstractContextManager[None] | None = None
        self._in_epoch = self._stepped = self._evaluated = self._reported = False
        self._names: set[str] = set()
        self._over = not session.begin_training()

    @property
    def stops(self) -> bool:
        """Whether training is to stop now: at the target, the cut or max_epochs, or where the metric is NaN."""
        return self._over or self._session.outcome is not None

    @property
    def reported(self) -> bool:
        """Whether the job's metric has come, in whichever epoch."""
        return self._reported

    def begin_epoch(self) -> None:
        """Tell that an epoch begins."""
        if self._in_epoch:
            self.end_epoch()
        if not self._over:
            self._session.begin_epoch()
            self._in_epoch = True

    def step(self) -> None:
        """Tell that an optimizer step begins: its first batch is there, and the step before it is done."""
        if self._steps is None:
            if not self._in_epoch:
                return
            self._stepped = True
            self._steps = self._session.steps(self._batches)
        if self._evaluation is not None:
            self._leave_evaluation()
        next(self._steps)

    def end_steps(self) -> None:
        """Tell that an epoch has no more steps."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()  # type: ignore[attr-defined]

    def begin_evaluation(self) -> None:
        """Tell that the model is evaluated from now on. One before the first step is part of the start-up."""
        if self._in_epoch and self._stepped and self._evaluation is None:
            self._evaluation = self._session.evaluation()
            self._evaluation.__enter__()

    def end_evaluation(self, metrics: Mapping[str, Any], *names: str) -> bool:
        """Tell that an evaluation is over; return whether it gave the job's metric.

        Args:
            metrics: What it found.
            names: What the job's metric may be called there, likeliest first.
        """
        self._leave_evaluation()
        if not self._in_epoch or not self._stepped:
            return False
        self._evaluated = True
        return self.report(metrics, *names)

    def report(self, metrics: Mapping[str, Any], *names: str) -> bool:
        """Report the job's metric, where it is among these; return whether it is."""
        self._names.update(metrics)
        name = next((name for name in names if name in metrics), None)
        if name is None:
            return False
        self._reported = True
        self._session.report_metric(float(metrics[name]))
        return True

    def end_epoch(self, *, evaluates: bool = True) -> None:
        """Tell that an epoch is over.

        Args:
            evaluates: Whether an evaluation may come in a later epoch, where none has come yet.

        Raises:
            TrainingError: the job's metric has not come, and would not come later either.
        """
        if not self._in_epoch:
            return
        self._leave_evaluation()
        self.end_steps()
        if not self._reported and self._stepped and (self._evaluated or not evaluates):
            raise self._no_metric()
        self._in_epoch = False
        self._over = not self._session.end_epoch()

    def end(self) -> None:
        """Tell that training is over.

        Raises:
            TrainingError: the job's metric has never come.
        """
        self.end_epoch()
        if not self._reported and self._stepped and self._session.outcome is not Outcome.STOPPED:
            raise self._no_metric()
        if not self._over:
            log.warning(
                "training ended by itself, before the target and before the job's max_epochs (%d): where another "
                "callback or a limit of steps stops it, that is no outcome that says anything of batch size %d",
                self._session.max_epochs,
                self._session.batch_size,
            )

    def _leave_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            evaluation.__exit__(None, None, None)

    def _no_metric(self) -> TrainingError:
        wanted, among = self._session.target.metric, ", ".join(sorted(self._names))
        found = f"what there was: {among}" if among else "none was evaluated"
        return TrainingError(
            f"the job's target is about {wanted!r}, and no such metric has come ({found}): "
            "log or return it in each evaluation, or name another one as `target.metric` in the job file"
        )


class _LengthOnly:
    """A loader's length without its batches: the framework has those."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.dataset = range(samples) if samples else None
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[None]:
        return repeat(None)


def session_of(callback: object, session: Session | None) -> Session | None:
    """Return the session that a callback is to serve: the one it was given, or the one of the job that runs now."""
    found = session or current_session()
    if found is None:
        log.warning("%s does nothing: no job of zeus_flows runs this training", type(callback).__name__)
    return found


def check_batch_size(session: Session, *, micro: int, accumulated: int, processes: int, write: str) -> None:
    """Make sure that a framework trains as the job decided.

    Args:
        session: What was decided.
        micro: Samples in one of the framework's batches.
        accumulated: Batches that an optimizer step takes.
        processes: Processes that train together.
        write: What to write instead.

    Raises:
        TrainingError: it would train with another batch size, or in several processes.
    """
    if processes > 1:
        raise TrainingError(f"{processes} processes train together: a job's training is one process")
    parts = session.parts(heeded=False)
    if micro * accumulated == session.batch_size and micro <= parts.micro_batch_size:
        return
    if parts.wanted:
        write = write.replace("session.batch_size", "session.micro_batch_size")
    decided = f" in micro-batches of {parts.micro_batch_size}" if parts.steps > 1 else ""
    steps = f"{micro} x {accumulated} = {micro * accumulated}" if accumulated > 1 else f"{micro}"
    raise TrainingError(
        f"the job decided batch size {session.batch_size}{decided}, and an optimizer step would take {steps} samples: "
        f"{write}"
    )
