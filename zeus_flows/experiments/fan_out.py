"""Who does the pieces of an experiment: this process, one after the other, or whoever else can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class FanOut(Protocol):
    """Does a piece of work for each item, in whatever order, and returns the results in that of the items.

    Work and items may go to other processes and machines: both must be picklable, and each item must carry its seeds.
    """

    def __call__(
        self, work: Callable[[T], R], items: Sequence[T], told: Callable[[T, R], None] | None = None
    ) -> list[R]:
        """Do it; `told` hears of each item in turn, once it and those before it are done."""


def in_turn(work: Callable[[T], R], items: Sequence[T], told: Callable[[T, R], None] | None = None) -> list[R]:
    """Do one after the other: the `FanOut` that needs nothing else.

    >>> in_turn(len, ["a", "bc"], lambda item, result: print(item, result))
    a 1
    bc 2
    [1, 2]
    """
    results = []
    for item in items:
        results.append(work(item))
        if told is not None:
            told(item, results[-1])
    return results


_proves: FanOut = in_turn
