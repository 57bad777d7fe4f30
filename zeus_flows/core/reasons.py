"""Why a batch size was chosen: for people, and told only when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self


class Word(StrEnum):
    """One of a set of words that are stored. A word that another version wrote is read as it stands."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        word = str.__new__(cls, value)
        word._name_ = word._value_ = value
        return word


class ArmStatus(Word):
    """What is known of an arm."""

    UNTRIED = "untried"
    KNOWN = "known"  # it has reached the target
    STOPPED = "stopped"  # it has not reached it so far
    PRUNED = "pruned"  # it is not tried any more
    DEAD = "dead"  # not even the longest run reached it
    INFEASIBLE = "infeasible"  # it does not fit the GPU
    OUT_OF_REACH = "out of reach"  # too far from what was tried


class ReasonKind(Word):
    """Why a batch size was chosen, in a word."""

    FIRST_RUN = "first-run"  # nothing has reached the target yet
    EXPLORE = "explore"  # to learn what it costs
    EXPLOIT = "exploit"  # the best known
    RETRY = "retry"  # after an attempt of the same recurrence that was stopped
    ACCUMULATE = "accumulate"  # again in smaller micro-batches, after it ran out of memory
    PRUNING = "pruning"  # next in Algorithm 3's rounds
    SAMPLED = "sampled"  # drew the least cost
    IN_FLIGHT = "in-flight"  # the best known, while another recurrence explores
    HELD_BACK = "held-back"  # the best known, as budget or deadline leave no room to explore
    LATE = "late"  # the fastest known, as the model would not be ready in time
    CONTROL = "control"  # the default, to be compared with
    MODE = "mode"  # the default, as the job's mode has it
    BASELINE = "baseline"  # the default, as the policy has it
    ONLY_ARM = "only-arm"  # no other can run
    DEGRADED = "degraded"  # the default, while MLflow is away
    IMPORTED = "imported"  # it ran before the job was tuned
    WRITTEN = "written"  # an earlier process chose it
    ALONE = "alone"  # no job decided


@dataclass(frozen=True, slots=True)
class ArmBelief:
    """What a policy thought of one arm when it decided.

    Attributes:
        batch_size: The arm.
        runs: Runs that reached the target.
        expected_cost_j: Expected cost of a run; None where the policy has no estimate.
        spread: Standard deviation of the log of that cost (relative uncertainty); None where unknown.
        sampled_cost_j: What Thompson sampling drew; None where the policy does not sample.
        status: What is known of it, in a word.
        chance_best: Probability that this arm is the cheapest; None where the policy does not estimate it.
        gain_j: What trying the arm now is expected to save over running the best known one, its own cost
            and what it may teach included; None where the policy does not weigh it.
        noise: Standard deviation of the log of one run's cost around the arm's mean; None where unknown.
        stopped: Runs that were stopped, or ended without reaching the target.
    """

    batch_size: int
    runs: int
    expected_cost_j: float | None = None
    spread: float | None = None
    sampled_cost_j: float | None = None
    status: ArmStatus = ArmStatus.UNTRIED
    chance_best: float | None = None
    gain_j: float | None = None
    noise: float | None = None
    stopped: int = 0


Explanation = tuple[str, tuple[ArmBelief, ...]]  # a reason's text and arms


class _Told:
    """Holds the function that makes a reason's text and arms."""

    __slots__ = ("_tell",)


@dataclass(frozen=True, slots=True)
class Reason(_Told):
    """Why this batch size: a word for grouping, a sentence for a person, the numbers behind it.

    >>> reason = Reason.later(ReasonKind.EXPLOIT, lambda: ("64 is the best known", ()))
    >>> reason == Reason(ReasonKind.EXPLOIT, "64 is the best known")
    True
    """

    kind: ReasonKind
    text: str
    arms: tuple[ArmBelief, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def later(
        cls, kind: ReasonKind, tell: Callable[[], Explanation], numbers: Mapping[str, float] | None = None
    ) -> Reason:
        """Return a reason whose text and arms are made on first access.

        Most reasons of a replay are never read: not telling them saves an eighth of its time.

        Args:
            kind: As ever.
            tell: Returns text and arms, the same whenever it is called.
            numbers: As ever.
        """
        reason = object.__new__(cls)
        _set(reason, "kind", kind)
        _set(reason, "numbers", {} if numbers is None else numbers)
        _set(reason, "_tell", tell)
        return reason

    if not TYPE_CHECKING:  # a type checker would take any attribute to exist

        def __getattr__(self, name: str) -> Any:
            if name not in ("text", "arms"):
                raise AttributeError(name)
            text, arms = self._tell()
            _set(self, "text", text)
            _set(self, "arms", arms)
            return text if name == "text" else arms


_set = object.__setattr__  # frozen records, while they are made
