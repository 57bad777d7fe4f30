"""Which model is champion: a fold over verdicts that are written once, and never a question of who wrote last.

A model that reached the target is a challenger. A verdict says whether it may be champion: it is held, on one slice of
the data, against the last few champions and against whichever model was best when the last of them was judged. Where it
is worse than the best of these by more than a margin, in the target's metric or in a guard's, it is refused. As the
best is carried on from verdict to verdict, small losses do not add up.

The champion is the newest accepted one, by recurrence and attempt. A verdict that was written late counts only where it
compared with everything that was accepted before it; else its model is judged again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Bar:
    """By how much a model may be worse than the best, in one metric.

    Attributes:
        metric: The target's, or a guard's.
        lower_is_better: Which way is better.
        margin: In the metric's own unit.
    """

    metric: str
    lower_is_better: bool
    margin: float

    def worse_by(self, value: float, best: float) -> float:
        """Return by how much a value is worse than another; below 0 where it is better."""
        return value - best if self.lower_is_better else best - value


@dataclass(frozen=True, slots=True)
class Version:
    """A registered version of a job's model.

    Attributes:
        recurrence: The recurrence that trained it.
        attempt: The attempt in it.
        batch_size: What it trained with.
        number: The version's number.
        uri: Where it is, such as `models:/m-0123`.
    """

    recurrence: int
    attempt: int
    batch_size: int
    number: int
    uri: str

    @property
    def order(self) -> tuple[int, int]:
        """By which versions are older and newer, whatever their numbers."""
        return self.recurrence, self.attempt


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A version's scores on a slice.

    Attributes:
        version: Whose.
        scores: By name.
        broken: Why there are none.
        gone: Whether the version was deleted: then it is no rival any more.
    """

    version: Version
    scores: Mapping[str, float] = field(default_factory=dict)
    broken: str = ""
    gone: bool = False


@dataclass(frozen=True, slots=True)
class ModelVerdict:
    """Whether a version may be champion, and why. Written once.

    Attributes:
        accepted: Whether it may.
        reason: Why, as a sentence.
        scores: Its own, on the slice.
        against: The versions that it was held against, on the same slice.
        bars: In which metrics, and with which margins; none where nothing evaluates models.
        among: How many champions are held against.
        slice: The recurrence whose slice it was.
        time_s: Seconds that the evaluations took.
        energy_j: Joules, where they were measured.
    """

    accepted: bool
    reason: str
    scores: Mapping[str, float] = field(default_factory=dict)
    against: tuple[Evaluated, ...] = ()
    bars: tuple[Bar, ...] = ()
    among: int = 0
    slice: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0

    def best(self, version: Version) -> tuple[Version, ...]:
        """Return who was best in each metric when a version got this verdict; the newer one of equals."""
        all_of_them = (*self.against, Evaluated(version, self.scores))
        found = []
        for bar in self.bars:
            known = [e for e in all_of_them if math.isfinite(e.scores.get(bar.metric, math.nan))]
            if known:
                sign = -1 if bar.lower_is_better else 1
                found.append(max(known, key=lambda e: (sign * e.scores[bar.metric], e.version.order)).version)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version with the verdicts on it, in the order of their rounds. It compares with others of its fingerprint."""

    version: Version
    verdicts: tuple[ModelVerdict, ...] = ()
    fingerprint: str = ""

    @property
    def verdict(self) -> ModelVerdict | None:
        """The one that counts: the last."""
        return self.verdicts[-1] if self.verdicts else None


@dataclass(frozen=True, slots=True)
class Promotions:
    """What all verdicts come to.

    Attributes:
        accepted: Candidates that may be champion, oldest first.
        waiting: Candidates to be judged, oldest first: for the first time, or again.
    """

    accepted: tuple[Candidate, ...] = ()
    waiting: tuple[Candidate, ...] = ()

    @property
    def champion(self) -> Candidate | None:
        """The newest accepted one; None before the first."""
        return self.accepted[-1] if self.accepted else None


def fold(candidates: Iterable[Candidate]) -> Promotions:
    """Return who is accepted and who is to be judged. The order in which verdicts were written does not matter."""
    accepted, waiting = list[Candidate](), list[Candidate]()
    for candidate in sorted(candidates, key=lambda c: c.version.order):
        verdict = candidate.verdict
        if verdict is None:
            waiting.append(candidate)
        elif verdict.accepted:
            held_against = {evaluated.version.order for evaluated in verdict.against}
            rivals = rivals_of(candidate, accepted, verdict.among) if verdict.bars else ()
            whole = all(rival.order in held_against for rival in rivals)
            (accepted if whole else waiting).append(candidate)
    return Promotions(tuple(accepted), tuple(waiting))


def rivals_of(candidate: Candidate, accepted: Sequence[Candidate], among: int) -> tuple[Version, ...]:
    """Return what a candidate is held against, the newest first.

    Args:
        candidate: Who is judged.
        accepted: Who was accepted; only older ones of the same fingerprint count.
        among: How many of the last champions count.
    """
    older = [
        c for c in accepted if c.fingerprint == candidate.fingerprint and c.version.order < candidate.version.order
    ]
    if not older:
        return ()
    last = older[-1]
    found = {c.version.order: c.version for c in older[-among:]}
    if last.verdict is not None:
        found |= {version.order: version for version in last.verdict.best(last.version)}
    return tuple(version for _, version in sorted(found.items(), reverse=True))


def judge(
    own: Evaluated, against: Sequence[Evaluated], bars: Sequence[Bar], *, among: int, slice_of: int
) -> ModelVerdict:
    """Return the verdict on a version that was evaluated together with its rivals.

    Args:
        own: Its scores.
        against: Its rivals' scores.
        bars: The target's, then the guards'.
        among: How many champions count.
        slice_of: The recurrence whose slice it was.
    """

    def verdict(accepted: bool, reason: str) -> ModelVerdict:
        return ModelVerdict(accepted, reason, own.scores, tuple(against), tuple(bars), among, slice_of)

    if problem := _problem(own, bars):
        return verdict(False, f"it could not be evaluated: {problem}")
    there = [evaluated for evaluated in against if not evaluated.gone]
    if not there:
        return verdict(True, f"it is the first ({_told(own, bars)})")
    for rival in there:  # what cannot be compared with might be better
        if problem := _problem(rival, bars):
            cure = "delete it, or change the job's `version`, where it never will be"
            return verdict(False, f"version {rival.version.number} could not be evaluated: {problem} ({cure})")
    held = []
    for bar in bars:
        best = min(there, key=lambda e: bar.worse_by(e.scores[bar.metric], 0.0))
        mine, theirs = own.scores[bar.metric], best.scores[bar.metric]
        worse = bar.worse_by(mine, theirs)
        if worse > bar.margin and not math.isclose(worse, bar.margin, rel_tol=1e-9, abs_tol=1e-12):
            text = f"{bar.metric} {mine:.4g} is worse than {theirs:.4g} of version {best.version.number}"
            return verdict(False, f"{text} by more than the margin of {bar.margin:g}, on slice {slice_of}")
        held.append(f"{bar.metric} {mine:.4g} against {theirs:.4g} of version {best.version.number}")
    numbers = ", ".join(str(evaluated.version.number) for evaluated in there)
    among_them = f", the best of {numbers}" if len(there) > 1 else ""
    return verdict(True, f"{'; '.join(held)}{among_them}, on slice {slice_of}")


def too_late(champion: Version) -> ModelVerdict:
    """Return the verdict on a version that is older than the champion: nothing needs to be evaluated for it."""
    return ModelVerdict(
        False, f"it came too late: version {champion.number} of recurrence {champion.recurrence} is newer"
    )


def unevaluated() -> ModelVerdict:
    """Return the verdict on a version of a job that has nothing to evaluate models with."""
    return ModelVerdict(
        True, "it is the newest that reached the target; nothing evaluates models here, so nothing was compared"
    )


def _problem(evaluated: Evaluated, bars: Sequence[Bar]) -> str:
    """Return why scores cannot be compared; empty where they can."""
    if evaluated.broken:
        return evaluated.broken
    for bar in bars:
        if bar.metric not in evaluated.scores:
            return f"the evaluation returned {', '.join(evaluated.scores) or 'nothing'}, and not {bar.metric}"
        if not math.isfinite(evaluated.scores[bar.metric]):
            return f"{bar.metric} is {evaluated.scores[bar.metric]:g}"
    return ""


def _told(evaluated: Evaluated, bars: Sequence[Bar]) -> str:
    return ", ".join(f"{bar.metric} {evaluated.scores[bar.metric]:.4g}" for bar in bars)


# -- the alias -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Move:
    """That the alias `champion` was to be moved to a version.

    Attributes:
        to: The version's number.
        order: Its recurrence and attempt.
        done: Whether whoever moved it has seen to it that no older move overtook it.
    """

    to: int
    order: tuple[int, int]
    done: bool


def is_by_hand(alias: int | None, moves: Sequence[Move]) -> bool:
    """Return whether somebody else moved the alias, by the moves that were made, in their order.

    While a move is not done, whoever makes it may be held up and move the alias late: that is not taken for a hand.

    >>> is_by_hand(5, [Move(5, (5, 1), True), Move(7, (7, 1), True)])
    True
    >>> is_by_hand(5, [Move(5, (5, 1), False), Move(7, (7, 1), True)])
    False
    """
    done = [move for move in moves if move.done]
    expected = {move.to for move in moves if not move.done} | {done[-1].to if done else None}
    return alias not in expected


def moves_to(champion: Version, alias: int | None, moves: Sequence[Move]) -> bool:
    """Return whether the alias is to be moved to the champion. What a hand did stands until there is a newer one.

    Where the alias is there, but the move that put it there was never done, it is moved once more, so that it is.
    """
    done = [move for move in moves if move.done]
    if alias == champion.number:
        return not done or done[-1].to != alias
    return not (is_by_hand(alias, moves) and done and champion.order <= done[-1].order)
