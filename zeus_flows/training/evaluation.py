"""Evaluates a model and its rivals on one slice of the data, with the function that the job file names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from zeus_flows.core.gate import Question, read_scores
from zeus_flows.core.promotion import Bar, Evaluated, ModelVerdict, Version, judge
from zeus_flows.job_file import JobFile
from zeus_flows.training.failures import no_exits, what_happened
from zeus_flows.training.keeping import tracking_at
from zeus_flows.training.trainer import Measure, check_call, load_function, timed

log = logging.getLogger(__name__)

#: Characters of an exception that a verdict quotes.
_MOST: Final = 200


class Evaluation:
    """Evaluates a model and its rivals on one slice with the job's function.

    Args:
        evaluate: Returns the target's metric, or several by name.
        bars: The target's, then the guards'.
        among: How many of the last champions are held against.
        measure: Runs an evaluation; returns what that returned, its seconds and its joules.
        tracking_uri: Where MLflow is, for `open_model`.
    """

    def __init__(
        self,
        evaluate: Callable[[Question], object],
        bars: Sequence[Bar],
        among: int,
        *,
        measure: Measure = timed,
        tracking_uri: str | None = None,
    ) -> None:
        self._evaluate, self._bars, self.among = evaluate, tuple(bars), among
        self._measure, self._tracking_uri = measure, tracking_uri

    def of(self, version: Version, rivals: Sequence[Version], *, gone: Callable[[Version], bool]) -> ModelVerdict:
        """Return the verdict on a version, on its own slice.

        Args:
            version: Who is judged.
            rivals: Whom it is held against.
            gone: Returns whether a version was deleted.
        """
        took = [0.0, 0.0]
        own = self._evaluated(version, version.recurrence, took)
        against = [
            Evaluated(rival, broken="it was deleted", gone=True)
            if gone(rival)
            else self._evaluated(rival, version.recurrence, took)
            for rival in rivals
            if not own.broken
        ]
        verdict = judge(own, against, self._bars, among=self.among, slice_of=version.recurrence)
        return replace(verdict, time_s=took[0], energy_j=took[1])

    def _evaluated(self, version: Version, slice_of: int, took: list[float]) -> Evaluated:
        question = Question(slice_of, *version.order, version.batch_size, version.uri)
        try:
            with tracking_at(self._tracking_uri), no_exits():
                returned, time_s, energy_j = self._measure(lambda: self._evaluate(question))
            _, scores = read_scores(returned, self._bars[0].metric)
        except Exception as error:
            log.warning("version %d could not be evaluated", version.number, exc_info=error)
            return Evaluated(version, broken=what_happened(error)[:_MOST])
        took[0], took[1] = took[0] + time_s, took[1] + energy_j
        wanted = {bar.metric for bar in self._bars}
        return Evaluated(version, {name: value for name, value in scores.items() if name in wanted})


def load_evaluation(
    job_file: JobFile, *, measure: Measure = timed, tracking_uri: str | None = None
) -> Evaluation | None:
    """Return what evaluates a job's models: the function of `model.promote`, else the gate's; None without either.

    Raises:
        ConfigError: its function cannot be imported.
    """
    if job_file.model is None:
        return None
    promote, gate, target = job_file.model.promote, job_file.gate, job_file.target
    if promote.function is not None:
        function, parameters, key = promote.function, promote.parameters, "model.promote"
    elif gate is not None:
        function, parameters, key = gate.function, gate.parameters, "gate"
    else:
        return None
    evaluate = load_function(function, key=f"{key}.function")
    check_call(evaluate, parameters, key=f"{key}.parameters", first="question")
    bars = [Bar(target.metric, target.better == "lower", promote.margin)]
    bars += [Bar(name, guard.better == "lower", guard.margin) for name, guard in promote.guards.items()]
    return Evaluation(
        lambda question: evaluate(question, **parameters),
        bars,
        promote.champions,
        measure=measure,
        tracking_uri=tracking_uri,
    )
