"""The drift gate's verdict: a recurrence is skipped where the newest model still meets the target on the new slice.

Only reading goes into it, so it is pure: what was asked, what the evaluation returned, how old the model may become.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeus_flows.core.job import Mode


@dataclass(frozen=True, slots=True)
class Question:
    """What a gate is asked: whether the newest model is good enough for the slice of a recurrence.

    Attributes:
        recurrence: The recurrence that would train; which slice of the data is new.
        trained_in: The recurrence that trained the newest model.
        attempt: The attempt in it that reached the target.
        batch_size: What it trained with.
        model_uri: Where the model is, for `zeus_flows.open_model`; empty where the job keeps none.
        last_trained: The recurrence that last reached the target, where the model it brought did not become champion.
    """

    recurrence: int
    trained_in: int
    attempt: int
    batch_size: int
    model_uri: str = ""
    last_trained: int | None = None

    @property
    def age(self) -> int:
        """How many recurrences ago a model was trained, whatever became of it."""
        return self.recurrence - max(self.trained_in, self.last_trained or 0)


@dataclass(frozen=True, slots=True)
class GateCheck:
    """What a gate found.

    Attributes:
        question: What it was asked.
        metric: The target's metric.
        value: Its value on the new slice; None where the evaluation broke or had nothing to say.
        passes: Whether the value meets the target.
        skips: Whether the recurrence is skipped.
        text: The verdict, as a sentence.
        scores: Everything the evaluation returned, by name.
        time_s: How long it took.
        energy_j: What the GPUs drew meanwhile; 0 where that was not measured.
    """

    question: Question
    metric: str
    value: float | None
    passes: bool
    skips: bool
    text: str
    scores: Mapping[str, float] = field(default_factory=dict)
    time_s: float = 0.0
    energy_j: float = 0.0

    @property
    def verdict(self) -> str:
        """One word: `skip` or `retrain`."""
        return "skip" if self.skips else "retrain"


def judge(question: Question, *, passes: bool, max_age: int | None, mode: Mode) -> tuple[bool, str]:
    """Return whether the recurrence is skipped, and the reason's end.

    >>> judge(Question(9, 7, 1, 64), passes=True, max_age=None, mode=Mode.FULL)
    (True, 'so nothing is trained')
    >>> judge(Question(9, 7, 1, 64), passes=True, max_age=2, mode=Mode.FULL)
    (False, 'but it is 2 recurrences old (max_age 2)')
    >>> judge(Question(9, 7, 1, 64), passes=True, max_age=None, mode=Mode.OBSERVE)
    (False, 'but the mode is observe: nothing is skipped')
    """
    if not passes:
        return False, "so a new one is trained"
    if mode is not Mode.FULL:
        return False, f"but the mode is {mode}: nothing is skipped"
    if max_age is not None and question.age >= max_age:
        return False, f"but it is {question.age} recurrences old (max_age {max_age})"
    return True, "so nothing is trained"


def read_scores(returned: object, metric: str) -> tuple[float, dict[str, float]]:
    """Return the metric's value and all scores from what an evaluation returned: a number, or numbers by name.

    >>> read_scores({"accuracy": 0.9, "log_loss": 0.3}, "accuracy")
    (0.9, {'accuracy': 0.9, 'log_loss': 0.3})

    Raises:
        ValueError: it is neither, or the metric is not among them.
    """
    scores: Mapping[Any, Any] = returned if isinstance(returned, Mapping) else {metric: returned}
    try:
        numbers = {str(name): float(value) for name, value in scores.items()}
    except (TypeError, ValueError):
        kind = type(returned).__name__
        raise ValueError(f"it returned a {kind}, not a number or numbers by name") from None
    if metric not in numbers:
        raise ValueError(f"it returned {', '.join(numbers) or 'nothing'}, and not the target's metric {metric}")
    if math.isnan(numbers[metric]):
        raise ValueError(f"{metric} is not a number")
    return numbers[metric], numbers
