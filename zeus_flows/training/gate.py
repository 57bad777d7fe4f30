"""Asks a job's drift gate: runs the function that evaluates the newest model on the new slice.

def evaluate(question):
    model = build()
    open_model(question.model_uri).load_into(model)  # the champion, as the train function kept it
    return accuracy(model, rows(question.recurrence))

A gate may save a training; it must never cost a model. So whatever goes wrong in it, the recurrence trains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from zeus_flows.core.gate import GateCheck, Question, judge, read_scores
from zeus_flows.core.job import Mode
from zeus_flows.job_file import JobFile, Target
from zeus_flows.training.failures import no_exits, what_happened
from zeus_flows.training.keeping import tracking_at
from zeus_flows.training.trainer import Measure, check_call, load_function, timed

log = logging.getLogger(__name__)


class Gate:
    """A drift gate that calls a function: it evaluates the newest model and compares its score with the target.

    Args:
        evaluate: Returns the metric on the new slice, or several by name; None where there is nothing to evaluate.
        target: What the model has to meet.
        max_age: Train again at the latest when the model is so many recurrences old.
        measure: Runs the evaluation; returns what that returned, its seconds and its joules.
    """

    def __init__(
        self,
        evaluate: Callable[[Question], object],
        target: Target,
        *,
        max_age: int | None = None,
        measure: Measure = timed,
    ) -> None:
        self._evaluate, self._target, self._max_age, self._measure = evaluate, target, max_age, measure

    def check(self, question: Question, mode: Mode) -> GateCheck:
        """Evaluate the newest model. An evaluation that fails is reported, and the recurrence is not skipped."""
        metric, whose = self._target.metric, _whose(question)
        began = time.monotonic()
        try:
            with no_exits():
                returned, time_s, energy_j = self._measure(lambda: self._evaluate(question))
            read = None if returned is None else read_scores(returned, metric)
        except Exception as error:
            check = self.broken(question, error, time_s=time.monotonic() - began)
            log.warning("gate of recurrence %d: %s", question.recurrence, check.text, exc_info=error)
            return check
        if read is None:
            text = f"{whose} was not evaluated: the gate's function returned None, so a new one is trained"
            return GateCheck(question, metric, None, False, False, text, time_s=time_s, energy_j=energy_j)
        value, scores = read
        passes = self._target.reached(value)
        skips, end = judge(question, passes=passes, max_age=self._max_age, mode=mode)
        sign = "≥" if self._target.better == "higher" else "≤"
        does = "still meets" if passes else "misses"
        text = (
            f"{whose} {does} the target on the new slice ({metric} {value:.4g}, {sign} {self._target.value:g}), {end}"
        )
        return GateCheck(question, metric, value, passes, skips, text, scores, time_s, energy_j)

    def broken(self, question: Question, error: BaseException, *, time_s: float = 0.0) -> GateCheck:
        """Return the record of an evaluation that an exception ended."""
        text = f"{_whose(question)} could not be evaluated ({what_happened(error)}), so it decides nothing"
        return GateCheck(question, self._target.metric, None, False, False, text, time_s=time_s)


def _whose(question: Question) -> str:
    return f"the model of recurrence {question.trained_in}"


def load_gate(job_file: JobFile, *, measure: Measure = timed, tracking_uri: str | None = None) -> Gate | None:
    """Return the gate that a job file names; None where it names none.

    Args:
        job_file: The job.
        measure: See `Gate`.
        tracking_uri: Where MLflow is, for `open_model`.

    Raises:
        ConfigError: its function cannot be imported, or does not take its parameters.
    """
    section = job_file.gate
    if section is None:
        return None
    function = load_function(section.function, key="gate.function")
    check_call(function, section.parameters, key="gate.parameters", first="question")

    def evaluate(question: Question) -> object:
        with tracking_at(tracking_uri):
            return function(question, **section.parameters)

    return Gate(evaluate, job_file.target, max_age=section.max_age, measure=measure)
