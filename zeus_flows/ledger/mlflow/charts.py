"""The numbers that runs show in MLflow's charts. Nothing is decided on them: decisions read the records.

Where joules mean nothing (no sensor, a shared GPU) no number is called one: cost is in seconds, and energy is left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mlflow.entities import Metric

from zeus_flows.core import policy
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.power_profile import Part
from zeus_flows.core.records import EnergySource, Observation, Outcome
from zeus_flows.core.savings import Savings
from zeus_flows.ledger.mlflow import names

Values = Mapping[str, float | None]


def of_epoch(report: EpochReport, *, joules: bool = True) -> Values:
    """Return what an attempt's run shows of one epoch; the slash gives them a section of their own.

    The metric is there twice: under a name that all jobs share, and under the user's own.
    """
    own = {named(report.metric_name): report.metric} if report.metric_name else {}
    took = {names.EPOCH_ENERGY_J: report.energy_j if joules else None, names.EPOCH_TIME_S: report.time_s}
    return {
        **_rounded(took),
        names.EPOCH_SETTING[report.knob]: report.setting,
        names.EPOCH_METRIC: report.metric,
        **own,
    }


def of_attempt(job: Job, observation: Observation) -> Values:
    """Return what an attempt's run shows of its outcome."""
    joules = _in_joules(job, observation)
    shown = {
        names.BATCH_SIZE: float(observation.batch_size),
        names.SETTING[observation.knob]: observation.setting,
        names.ENERGY_TO_ACCURACY_J: observation.energy_j if joules else None,
        names.HOST_ENERGY_J: observation.host_energy_j if joules and observation.host_energy_j > 0 else None,
        names.TIME_TO_ACCURACY_S: observation.time_s,
        **_cost(job, [observation]),
        names.EPOCHS: float(observation.epochs),
        names.CONVERGED: float(observation.converged),
        **_parts(observation, joules=joules),
    }
    return _rounded(shown)


def of_saving(job: Job, observation: Observation, saved: Savings) -> Values:
    """Return what an attempt saved: what the default was expected to take then, without what the attempt took.

    One that was stopped has only cost; one that was to change nothing has saved nothing. Where the default is not
    known, or an attempt broke, nothing is said.

    Args:
        job: Whose.
        observation: The attempt's outcome.
        saved: What is known of the default once it is folded.
    """
    unknown = saved.from_now_on is None or saved.mode in (Mode.OFF, Mode.OBSERVE)
    if saved.from_now_on is None or unknown or observation.outcome is Outcome.FAILED or not observation.energy_complete:
        return {}
    ((_, cost),) = _cost(job, [observation]).items()
    assert cost is not None
    default = saved.from_now_on.baseline.cost_j if observation.converged else 0.0
    return _rounded(
        {names.SAVED_S if saved.in_seconds else names.SAVED_J: 0.0 if observation.control else default - cost}
    )


def of_recurrence(job: Job, observations: Sequence[Observation]) -> Values:
    """Return a recurrence's point of its drift window's series: sums over the attempts, and how the last one went."""
    last = observations[-1]
    host_j = sum(o.host_energy_j for o in observations)
    joules = all(_in_joules(job, o) for o in observations)
    shown = {
        **_cost(job, observations),
        names.ENERGY_TO_ACCURACY_J: sum(o.energy_j for o in observations) if joules else None,
        names.HOST_ENERGY_J: host_j if joules and host_j > 0 else None,
        names.TIME_TO_ACCURACY_S: sum(o.time_s for o in observations),
        names.BATCH_SIZE: float(last.batch_size),
        names.SETTING[last.knob]: last.setting,
        names.ATTEMPTS: float(len(observations)),
    }
    return _rounded(shown)


def of_savings(saved: Savings) -> dict[str, float]:
    """Return what a drift window's series shows of savings; cost in joules, or in seconds where there are none.

    Without a baseline there are none but what is lost and skipped.
    """
    figures: dict[str, float] = {}
    if saved.so_far is not None:
        total, unit = saved.so_far.total, "s" if saved.in_seconds else "j"
        figures[names.SAVED_TIME_S] = total.amount.time_s
        if not saved.in_seconds:
            figures[names.SAVED_ENERGY_J] = total.amount.energy_j
            figures[names.SAVED_ENERGY_LOW_J] = total.low.energy_j
            figures[names.SAVED_ENERGY_HIGH_J] = total.high.energy_j
        figures[names.saved_cost(unit)] = total.amount.cost_j
        figures[names.saved_cost_low(unit)] = total.low.cost_j
        figures[names.saved_cost_high(unit)] = total.high.cost_j
        figures[names.SAVED_COST_PERCENT] = round(total.amount.percent_of(saved.so_far.baseline).cost_j, 1)
        for line in saved.so_far.lines:
            figures[names.saved_by(line.name.replace(" ", "_"), unit)] = line.amount.cost_j
        figures[names.SAVED_RECURRENCES] = float(saved.so_far.recurrences)
    figures[names.SAVED_LOST_RECURRENCES] = float(saved.apart.lost.count)
    figures[names.SAVED_SKIPPED_RECURRENCES] = float(saved.apart.skipped.count)
    return {name: value for name, value in _rounded(figures).items() if value is not None}


class SavingsOnce:
    """What was saved by a state, computed once: an attempt's run and its recurrence's point both show it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last: tuple[tuple[int, tuple[int, int]], Savings] | None = None

    def saved(self, state: policy.State) -> Savings:
        """Return what was saved; the same fold ends with the same observation and has as many."""
        key = (state.observations, state.order)
        if self._last is None or self._last[0] != key:
            self._last = (key, policy.saved(self._job, state))
        return self._last[1]


def of_check(check: GateCheck) -> Values:
    """Return what a drift gate's run, and its drift window's series, show of what it found."""
    return {
        names.GATE_VALUE: check.value,
        names.GATE_SKIPPED: float(check.skips),
        names.GATE_AGE: float(check.question.age),
        names.GATE_TIME_S: check.time_s,
        names.GATE_ENERGY_J: check.energy_j or None,
    }


def of_scores(check: GateCheck) -> Values:
    """Return what an evaluation returned, under names that MLflow takes: they are the user's own. The first 100 scores.

    >>> from zeus_flows.core.gate import Question
    >>> of_scores(GateCheck(Question(2, 1, 1, 8), "auc", 0.9, True, True, "", {"f1@5/../x": 0.5}))
    {'zf.gate/f1_5_x': 0.5}
    """
    first = list(check.scores.items())[:100]
    return {names.gate_score(re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:100] or "_"): value for name, value in first}


def named(name: str) -> str:
    """Return a user's own name as one that MLflow takes and that is none of ours.

    >>> named("val/accuracy"), named("f1 @ 5"), named("../x"), named("zf.cost_j")
    ('val/accuracy', 'f1_5', 'x', 'zf_cost_j')
    """
    parts = (re.sub(r"[^A-Za-z0-9_.-]+", "_", part)[:100].strip(".") for part in name.split("/"))
    safe = "/".join([part for part in parts if part][:2])
    return re.sub(f"^{re.escape(names.PREFIX)}", "zf_", safe, flags=re.IGNORECASE) or "_"


def metrics(values: Values, *, step: int, at_s: float | None = None) -> list[Metric]:
    """Return those values that there are as MLflow's metrics."""
    at_ms = int((time.time() if at_s is None else at_s) * 1000)
    return [Metric(name, value, at_ms, step) for name, value in values.items() if value is not None]


def _rounded(values: Values) -> dict[str, float | None]:
    """Return values with joules and seconds of five digits, as a table can show them; records have all of theirs."""
    return {
        name: float(f"{value:.5g}") if value is not None and name.endswith(("_j", "_s")) else value
        for name, value in values.items()
    }


def _in_joules(job: Job, observation: Observation) -> bool:
    return not job.in_seconds and observation.energy_source is not EnergySource.NONE


def _cost(job: Job, observations: Sequence[Observation]) -> Values:
    """Return what attempts cost together, under a name that says its unit."""
    if all(_in_joules(job, o) for o in observations):
        return {names.COST_J: sum(observed_cost(job, o) for o in observations)}
    return {names.COST_S: sum(observed_cost(replace(job, in_seconds=True), o) for o in observations)}


def _parts(observation: Observation, *, joules: bool) -> Values:
    """Return what the parts of an attempt took; nothing where they were not measured."""
    if observation.parts is None:
        return {}
    beside = observation.parts.together
    training = Part(
        observation.epochs,
        max(observation.energy_j - beside.energy_j, 0.0),
        max(observation.time_s - beside.time_s, 0.0),
    )
    parts = {
        "once": observation.parts.once,
        "evaluation": observation.parts.evaluations,
        "rest": observation.parts.rest,
        "training": training,
    }
    seconds = {names.part(name, "s"): part.time_s for name, part in parts.items()}
    return seconds | ({names.part(name, "j"): part.energy_j for name, part in parts.items()} if joules else {})
