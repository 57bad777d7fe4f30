"""Pruning exploration (section 4.4, Algorithm 3, lines 1 to 9).

Two forms. `next_to_explore` looks only at how often each arm reached the target and how often it failed, so it does
not depend on the order in which reports arrive, and cannot loop. `PublishedPruning` is the published state machine,
for `zeus-paper`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

ROUNDS = 2


class Tries(NamedTuple):
    """How often an arm reached the target, and how often it did not."""

    reached: int = 0
    failed: int = 0


class Step(NamedTuple):
    """The arm that pruning asks for, and the round that asks."""

    round_number: int
    arm: int


def next_to_explore(arms: Sequence[int], *, default: int, cheapest: int, tries: Callable[[int], Tries]) -> Step | None:
    """Return the next step of Algorithm 3's two rounds (lines 2 to 9), or None when both are over.

    The first round begins at b0, the second at the arm with the least cost observed (line 7), with what reached the
    target in the first (line 6). Both go downwards until an arm fails, then upwards until one fails. An arm that
    fails is dropped: no round asks for it again. The arm where a round begins is no reason to stop, even if it fails.

    Args:
        arms: Batch sizes, ascending.
        default: b0.
        cheapest: The arm with the least cost observed.
        tries: What became of an arm's runs.

    >>> seen = {64: Tries(reached=1), 32: Tries(failed=1)}
    >>> next_to_explore([16, 32, 64, 128], default=64, cheapest=64, tries=lambda b: seen.get(b, Tries()))
    Step(round_number=1, arm=128)
    """
    for number in range(1, ROUNDS + 1):
        start = default if number == 1 else cheapest
        kept = arms if number == 1 else [b for b in arms if tries(b).reached]
        arm = _next_in_round(kept, start=start, number=number, tries=tries) if start in kept else None
        if arm is not None:
            return Step(number, arm)
    return None


def _next_in_round(arms: Sequence[int], *, start: int, number: int, tries: Callable[[int], Tries]) -> int | None:
    if sum(tries(start)) < number:
        return start
    for direction in ([b for b in reversed(arms) if b < start], [b for b in arms if b > start]):
        for arm in direction:
            seen = tries(arm)
            if sum(seen) < number:
                return arm
            if seen.reached < number:
                break
    return None


def survivors(arms: Iterable[int], tries: Callable[[int], Tries]) -> list[int]:
    """Return the arms that reached the target in both rounds (line 6); those that ever did, where none is left.

    >>> seen = {32: Tries(1, 1), 64: Tries(2), 128: Tries(5, 1)}
    >>> survivors([16, 32, 64, 128], lambda b: seen.get(b, Tries()))
    [64, 128]
    """
    ever = [b for b in arms if tries(b).reached]
    return [b for b in ever if tries(b).reached >= ROUNDS] or ever


@dataclass(frozen=True, slots=True)
class PublishedPruning:
    """The published package's two pruning rounds, step by step, faults included.

    One failure prunes an arm and every arm beyond it, for ever.

    Attributes:
        arms: What is left, ascending.
        start: b0, and after a round the arm with the least cost observed in it.
        round_number: 1, 2, and 3 once pruning is over.
        upwards: Whether the round has turned.
        position: Index of the next arm within the direction.
        good: Arms that converged in this round.
        least_cost: Least cost of the round.
        origin: Where this round began.
    """

    arms: tuple[int, ...]
    start: int
    round_number: int = 1
    upwards: bool = False
    position: int = 0
    good: tuple[int, ...] = ()
    least_cost: float | None = None
    origin: int = 0

    @classmethod
    def begin(cls, arms: tuple[int, ...], start: int) -> PublishedPruning:
        """Return the beginning of the first round."""
        return cls(arms=arms, start=start, origin=start)._settle()

    @property
    def expecting(self) -> int | None:
        """The arm to explore next; None once pruning is over."""
        if self.round_number > ROUNDS:
            return None
        return self._direction()[self.position]

    def report(self, arm: int, *, cost: float, converged: bool) -> PublishedPruning:
        """Return the state after the expected arm's run; other arms change nothing."""
        if arm != self.expecting:
            return self
        if not converged:
            return replace(self, position=len(self._direction()))._settle()
        cheapest = self.least_cost is None or cost < self.least_cost
        return PublishedPruning(
            arms=self.arms,
            start=arm if cheapest else self.start,
            round_number=self.round_number,
            upwards=self.upwards,
            position=self.position + 1,
            good=(*self.good, arm),
            least_cost=cost if cheapest else self.least_cost,
            origin=self.origin,
        )._settle()

    def _direction(self) -> tuple[int, ...]:
        if self.upwards:
            return tuple([b for b in self.arms if b > self.origin])
        return tuple([b for b in reversed(self.arms) if b <= self.origin])

    def _settle(self) -> PublishedPruning:
        """Turn around at the end of a direction, and begin the next round at the end of both."""
        state = self
        while state.round_number <= ROUNDS and state.position >= len(state._direction()):
            if not state.upwards:
                state = replace(state, upwards=True, position=0)
                continue
            state = PublishedPruning(
                arms=tuple(sorted(state.good)),
                start=state.start,
                round_number=state.round_number + 1,
                origin=state.start,
            )
        return state
