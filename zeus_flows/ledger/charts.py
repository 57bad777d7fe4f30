"""The numbers that runs show in MLflow's charts. Nothing is decided on them: decisions read the records."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

from mlflow.entities import Metric

from zeus_flows.core.cost import observed_cost
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.records import Job, Observation
from zeus_flows.ledger.protocol import EpochReport

Values = Mapping[str, float | None]


def of_epoch(report: EpochReport) -> Values:
    """Return what an attempt's run shows of one epoch; the slash gives them a section of their own."""
    return {
        "zf.epoch/energy_j": report.energy_j,
        "zf.epoch/time_s": report.time_s,
        "zf.epoch/power_limit_w": report.power_limit_w,
        "zf.epoch/metric": report.metric,
    }


def of_attempt(job: Job, observation: Observation) -> Values:
    """Return what an attempt's run shows of its outcome."""
    return {
        "zf.batch_size": float(observation.batch_size),
        "zf.power_limit_w": observation.power_limit_w,
        "zf.energy_to_accuracy_j": observation.energy_j,
        "zf.time_to_accuracy_s": observation.time_s,
        "zf.cost_j": observed_cost(job, observation),
        "zf.epochs": float(observation.epochs),
        "zf.converged": float(observation.converged),
    }


def of_recurrence(job: Job, observations: Sequence[Observation]) -> Values:
    """Return a recurrence's point of its drift window's series: sums over the attempts, and how the last one went."""
    last = observations[-1]
    return {
        "zf.cost_j": sum(observed_cost(job, o) for o in observations),
        "zf.energy_to_accuracy_j": sum(o.energy_j for o in observations),
        "zf.time_to_accuracy_s": sum(o.time_s for o in observations),
        "zf.batch_size": float(last.batch_size),
        "zf.power_limit_w": last.power_limit_w,
        "zf.attempts": float(len(observations)),
    }


def of_check(check: GateCheck) -> Values:
    """Return what a drift gate's run, and its drift window's series, show of what it found."""
    return {
        "zf.gate/value": check.value,
        "zf.gate/skipped": float(check.skips),
        "zf.gate/age": float(check.question.age),
        "zf.gate/time_s": check.time_s,
    }


def of_scores(check: GateCheck) -> Values:
    """Return what an evaluation returned, under names that MLflow takes: they are the user's own. The first 100 scores.

    >>> from zeus_flows.core.gate import Question
    >>> of_scores(GateCheck(Question(2, 1, 1, 8), "auc", 0.9, True, True, "", {"f1@5/../x": 0.5}))
    {'zf.gate/f1_5_x': 0.5}
    """
    first = list(check.scores.items())[:100]
    return {f"zf.gate/{re.sub(r'[^A-Za-z0-9_-]+', '_', name)[:100] or '_'}": value for name, value in first}


def metrics(values: Values, *, step: int, at_s: float | None = None) -> list[Metric]:
    """Return those values that there are as MLflow's metrics."""
    at_ms = int((time.time() if at_s is None else at_s) * 1000)
    return [Metric(name, value, at_ms, step) for name, value in values.items() if value is not None]
