"""What a training that broke is told as: a line and a traceback that can always be made, kept and shown.

The train function is somebody else's. What it raises may have a text that cannot be made, that no database takes, or
that holds a password; the attempt must be closed all the same.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from zeus_flows.errors import TrainFunctionFailed
from zeus_flows.masking import masked

#: What an observation may hold of an exception: an MLflow param has room for 6,000 characters in all.
MOST_DETAIL: Final = 500
MOST_TRACEBACK: Final = 2_000
_MOST_READ: Final = 20_000


def text_of(error: BaseException) -> str:
    """Return an exception's text; that it cannot be made, where `str` raises."""
    try:
        return str(error)[:_MOST_READ]
    except BaseException:
        return "(its text cannot be made)"


def what_happened(error: BaseException) -> str:
    """Return an exception as a line for people, without secrets."""
    number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "signal", None)
    if isinstance(error, Exception) or not isinstance(number, int):
        text = _plain(masked(f"{type(error).__name__}: {text_of(error)}"))
    else:
        text = f"cancelled: the process was told to stop ({signal.Signals(number).name})"
    return text if len(text) <= MOST_DETAIL else text[: MOST_DETAIL - 1] + "…"


def traceback_text(error: BaseException, began: TracebackType | None) -> str:
    """Return an exception's traceback from a frame on, without secrets; its end where it is long."""
    lines = traceback.format_exception(type(error), error, began or error.__traceback__)
    text = _plain(masked("".join(lines)[-10 * _MOST_READ :])).strip()
    return text if len(text) <= MOST_TRACEBACK else "…" + text[1 - MOST_TRACEBACK :]


def presentable(error: BaseException) -> BaseException:
    """Return an exception that may be raised where others log and store it: itself, mostly.

    Another stands in for one whose text holds a secret, is endless, or cannot be made.
    """
    try:
        told = "".join((str(error), repr(error), *traceback.format_exception(error)))
        if len(told) <= 10 * _MOST_READ and masked(told) == told:
            return error
    except BaseException:  # noqa: S110
        pass
    stand_in = TrainFunctionFailed(f"the train function failed: {what_happened(error)}")
    return stand_in.with_traceback(error.__traceback__)


@contextmanager
def no_exits() -> Iterator[None]:
    """Raise an exit that training asks for as the failure it is: whether a process ends is not training's to say.

    An interrupt that a framework has made an exit of, as Lightning does, is raised as what it was.
    """
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        code = _plain(masked(repr(error.code)))[:MOST_DETAIL]
        failed = TrainFunctionFailed(f"the train function called sys.exit({code}); return from it instead")
        raise failed.with_traceback(error.__traceback__) from None


def _plain(text: str) -> str:
    """Return a text without what databases refuse and terminals obey."""
    return "".join(c for c in text if c.isprintable() or c == "\n")
