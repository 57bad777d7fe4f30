"""What an attempt is called: its run, or a token while it has none because MLflow was away when it was decided."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(r"(?P<recurrence>.+)-(?P<number>\d+)")


@dataclass(frozen=True, slots=True)
class ByRun:
    """An attempt, or the check of a drift gate, that has a run."""

    run_id: str

    def __str__(self) -> str:
        """Return its name as text, which `read_ref` reads."""
        return self.run_id


@dataclass(frozen=True, slots=True)
class ByToken:
    """An attempt that had no run when it was named.

    Attributes:
        recurrence: The token of its recurrence, which may have no number either.
        number: Which attempt of the recurrence, from 1.
    """

    recurrence: str
    number: int

    def __str__(self) -> str:
        """Return its name as text, which `read_ref` reads."""
        return f"{self.recurrence}-{self.number}"


AttemptRef = ByRun | ByToken


def read_ref(text: str) -> AttemptRef | None:
    """Return the attempt that a text names; None for an empty one. MLflow's run ids have no dash.

    >>> read_ref("0a1b"), read_ref("5f3c.2-1"), read_ref("")
    (ByRun(run_id='0a1b'), ByToken(recurrence='5f3c.2', number=1), None)
    """
    if not text:
        return None
    match = _TOKEN.fullmatch(text)
    return ByToken(match["recurrence"], int(match["number"])) if match else ByRun(text)
