"""Pruning exploration (section 4.4, Algorithm 3, lines 1 to 9).

Two forms. `next_in_round` looks only at how often each arm ran and whether it ever converged, so it does not
depend on the order in which reports arrive, cannot loop, and gives an arm that failed once a second chance.
`PublishedPruning` is the published state machine, for `zeus-paper`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

ROUNDS = 2


def next_in_round(
    arms: Sequence[int],
    *,
    start: int,
    round_number: int,
    runs: Callable[[int], int],
    converged: Callable[[int], bool],
) -> int | None:
    """Return the arm to run next in a pruning round, or None when the round is over.

    From `start` downwards until an arm fails, then upwards until one fails. Every arm met gets
    `round_number` runs, so a round asks for at most that many runs of each arm and then ends.

    Args:
        arms: Batch sizes, ascending.
        start: Where the round begins; it is never a reason to stop, even if it fails.
        round_number: 1 or 2.
        runs: How many runs an arm has.
        converged: Whether an arm ever reached the target.

    >>> seen = {64: True, 32: False}
    >>> next_in_round([16, 32, 64, 128], start=64, round_number=1,
    ...               runs=lambda b: int(b in seen), converged=lambda b: seen.get(b, False))
    128
    """
    if runs(start) < round_number:
        return start
    below = [b for b in reversed(arms) if b < start]
    above = [b for b in arms if b > start]
    for direction in (below, above):
        for arm in direction:
            if runs(arm) < round_number:
                return arm
            if not converged(arm):
                break
    return None


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
