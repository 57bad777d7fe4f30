"""A page's params, read: which recurrence numbers are taken, what runs they have, which have ended."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from zeus_flows.core.records import Gap
from zeus_flows.ledger.mlflow import names

#: Recurrences on one page. A run with thousands of params is slow to read.
SIZE: Final = 100

_SKIPPED: Final = re.compile(r"skipped(?: (?P<time>[\d.e+-]+) s)?(?: (?P<energy>[\d.e+-]+) J)?")

#: How a recurrence ended: the value of its param `names.end`. One that was skipped says what asking took.
ENDED: Final = "ended"
DEAD: Final = "dead"


@dataclass(slots=True)
class Page:
    """What a page says.

    Attributes:
        claims: Recurrence -> who took it (JSON of a `Holder`).
        gates: Recurrence -> the run of its drift gate.
        attempts: (recurrence, attempt) -> its run.
        ended: Recurrences to which nothing will be added.
        gaps: Those of them that were skipped or declared dead.
        kept: Page -> what the snapshot that ends it is of; those without one are left out.
    """

    claims: dict[int, str] = field(default_factory=dict)
    attempts: dict[tuple[int, int], str] = field(default_factory=dict)
    gates: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    gaps: dict[int, Gap] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)

    def read(self, params: Mapping[str, str]) -> Page:
        """Add a page's params to what is known; return self."""
        for name, value in params.items():
            if not (match := names.PAGE_PARAM.fullmatch(name)):
                continue
            recurrence = int(match["recurrence"])
            if match["kind"] == "r":
                self.claims[recurrence] = value
            elif match["kind"] == "e":
                self.ended.add(recurrence)
                if gap := _gap(recurrence, value):
                    self.gaps[recurrence] = gap
            elif match["kind"] == "g":
                self.gates[recurrence] = value
            else:
                self.attempts[recurrence, int(match["attempt"])] = value
        return self

    def add(self, other: Page) -> None:
        """Add what another page says."""
        self.claims |= other.claims
        self.attempts |= other.attempts
        self.gates |= other.gates
        self.ended |= other.ended
        self.gaps |= other.gaps
        self.kept |= other.kept

    def closed_upto(self, start: int, still_open: Collection[int] = ()) -> int:
        """Return the last recurrence of the closed prefix: all after `start` have ended and have no open attempt.

        >>> page = Page({1: "a", 2: "b", 3: "c"}, ended={1, 2, 3})
        >>> page.closed_upto(0), page.closed_upto(0, still_open={2})
        (3, 1)
        """
        upto = start
        while upto + 1 in self.ended and upto + 1 not in still_open:
            upto += 1
        return upto

    def attempts_of(self, recurrence: int) -> dict[int, str]:
        """Return a recurrence's attempts by number."""
        return {attempt: run_id for (number, attempt), run_id in self.attempts.items() if number == recurrence}

    def newest_attempt(self) -> str | None:
        """Return the run of the newest attempt; None where there is none."""
        return self.attempts[max(self.attempts)] if self.attempts else None


def number_of(recurrence: int) -> int:
    """Return the page of a recurrence.

    >>> number_of(1), number_of(SIZE), number_of(SIZE + 1)
    (0, 0, 1)
    """
    return (recurrence - 1) // SIZE


def last_of(number: int) -> int:
    """Return the last recurrence of a page.

    >>> last_of(0) == SIZE
    True
    """
    return (number + 1) * SIZE


def skipped(*, time_s: float, energy_j: float = 0.0) -> str:
    """Return how a recurrence ended that a drift gate skipped: what asking took, joules where they are known.

    >>> skipped(time_s=1.25), skipped(time_s=1.25, energy_j=30.0)
    ('skipped 1.25 s', 'skipped 1.25 s 30 J')
    """
    joules = f" {energy_j:g} J" if 0 < energy_j < math.inf else ""
    return f"skipped {time_s if 0 <= time_s < math.inf else 0.0:g} s{joules}"


def _gap(recurrence: int, how: str) -> Gap | None:
    """Return what a recurrence's end says; None where it ended as planned."""
    if how == DEAD:
        return Gap(recurrence, skipped=False)
    if not (match := _SKIPPED.fullmatch(how)):
        return None
    try:
        return Gap(recurrence, True, float(match["time"] or 0), float(match["energy"] or 0))
    except ValueError:  # written by hand
        return Gap(recurrence, skipped=True)
