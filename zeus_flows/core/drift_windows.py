"""Drift windows: the recurrences between two boundaries, what ended each, and what was believed at its end.

A boundary is a function of the history, like everything else: the policy forgot what it knew of epochs (`drift`), or
a window of N recurrences is full (`full`). Boundaries that people make (a reset by hand, a new fingerprint) are
written where they are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from zeus_flows.core import policy
from zeus_flows.core.belief import EpochsBelief
from zeus_flows.core.job import Job
from zeus_flows.core.policy import State
from zeus_flows.core.reasons import ArmBelief, ArmStatus
from zeus_flows.core.records import Ask, Observation
from zeus_flows.core.surprise import ENOUGH, GREAT_SURPRISE, SURPRISE_IN_A_ROW, surprise


class Cause(StrEnum):
    """What begins a drift window, which is what ended the one before."""

    FIRST = "first"
    FINGERPRINT = "fingerprint"
    RESET = "reset"
    DRIFT = "drift"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Boundary:
    """What ends a drift window.

    Attributes:
        recurrence: The window's last recurrence.
        kind: `DRIFT` or `FULL`.
        text: The evidence, as a sentence.
        numbers: The evidence, as numbers.
    """

    recurrence: int
    kind: Cause
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DriftWindow:
    """The recurrences between two boundaries.

    Attributes:
        number: From 1.
        first: Its first recurrence.
        last: Its last one so far.
        ended_by: Its boundary; None while it is open.
        beliefs: What the policy thinks of every arm after its last recurrence, as it would explain a decision.
        best: The batch size it thinks cheapest among those that have reached the target; None before any has.
    """

    number: int
    first: int
    last: int
    ended_by: Boundary | None = None
    beliefs: tuple[ArmBelief, ...] = ()
    best: int | None = None


def boundary(
    job: Job, before: State, after: State, observations: Sequence[Observation], *, recurrences: int
) -> Boundary | None:
    """Return the boundary that a recurrence makes, or None.

    Args:
        job: Whose.
        before: The state before the recurrence's first observation.
        after: The state after its last one.
        observations: Of the recurrence.
        recurrences: How many the window has, this one included.
    """
    if not observations:
        return None
    number = observations[-1].recurrence
    if _resets(after) > _resets(before):
        return _drift(job, before, observations)
    if job.window is not None and recurrences >= job.window:
        text = f"the window of {job.window} recurrences is full"
        return Boundary(number, Cause.FULL, text, {"recurrences": float(recurrences)})
    return None


def beliefs(job: Job, state: State) -> tuple[ArmBelief, ...]:
    """Return what the policy thinks of every arm, as it would explain its next decision."""
    ask = Ask(recurrence=state.order[0] + 1, attempt=1, seed=0, gpu=state.gpu)
    return policy.decide(job, state, ask).reason.arms


def best_arm(arms: Iterable[ArmBelief]) -> int | None:
    """Return the arm that is thought cheapest among those that have reached the target.

    >>> best_arm([ArmBelief(b, 1, cost, status=ArmStatus.KNOWN) for b, cost in ((32, 900.0), (64, 800.0))])
    64
    """
    known = [a for a in arms if a.status is ArmStatus.KNOWN and a.expected_cost_j is not None]
    return min(known, key=lambda a: (a.expected_cost_j or math.inf, a.batch_size)).batch_size if known else None


def fold_windows(job: Job, observations: Iterable[Observation]) -> tuple[DriftWindow, ...]:
    """Return the drift windows of a history, the open one last."""
    state, windows, first, count = policy.initial(job), list[DriftWindow](), 0, 0
    ordered = sorted(observations, key=lambda o: o.order)
    for number, group in groupby(ordered, key=lambda o: o.recurrence):
        attempts = list(group)
        before = state
        for observation in attempts:
            state = policy.advance(job, state, observation)
        first, count = first or number, count + 1
        ended = boundary(job, before, state, attempts, recurrences=count)
        if ended is not None:
            windows.append(_window(job, state, len(windows) + 1, first, number, ended))
            first, count = 0, 0
    if count:
        windows.append(_window(job, state, len(windows) + 1, first, ordered[-1].recurrence, None))
    return tuple(windows)


def _window(job: Job, state: State, number: int, first: int, last: int, ended: Boundary | None) -> DriftWindow:
    arms = beliefs(job, state)
    return DriftWindow(number, first, last, ended, arms, best_arm(arms))


def _resets(state: State) -> int:
    return state.belief.resets if isinstance(state.belief, EpochsBelief) else 0


def _drift(job: Job, before: State, observations: Sequence[Observation]) -> Boundary:
    """Return the evidence behind a reset: the run that brought it about, and what was believed of it."""
    state = before
    for observation in observations:
        after = policy.advance(job, state, observation)
        if _resets(after) > _resets(state):
            break
        state = after
    belief: EpochsBelief = state.belief
    arm = belief.batch_sizes.index(observation.batch_size)
    known = belief.posterior
    mean, seen = float(known.mean[arm]), math.log(max(observation.epochs, 1))
    off = surprise(seen, mean=mean, variance=float(known.variance[arm]), noise=float(known.noise[arm]))
    surprises = belief.surprises.add(off)
    if abs(off) > GREAT_SURPRISE:
        rule = f"more than {GREAT_SURPRISE:g} deviations off at once"
    elif surprises.twice:
        rule = f"the second run in a row more than {SURPRISE_IN_A_ROW:g} deviations off to the same side"
    else:
        rule = f"runs have kept to one side for long enough (cumulative sum above {ENOUGH:g})"
    text = (
        f"batch size {observation.batch_size} took {observation.epochs} epochs where about {math.exp(mean):.1f} were "
        f"expected ({off:+.1f} standard deviations): {rule}"
    )
    numbers = {
        "batch_size": float(observation.batch_size),
        "epochs": float(observation.epochs),
        "expected_epochs": math.exp(mean),
        "surprise": off,
        "rise": surprises.rise,
        "fall": surprises.fall,
    }
    return Boundary(observation.recurrence, Cause.DRIFT, text, numbers)
