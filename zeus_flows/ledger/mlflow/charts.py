"""The numbers that runs show in MLflow's charts. Nothing is decided on them: decisions read the records.

Where joules mean nothing (no sensor, a shared GPU) no number is called one: cost is in seconds, and energy is left out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mlflow.entities import Metric

from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.gate import GateCheck
from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import Part
from zeus_flows.core.records import EnergySource, Observation

Values = Mapping[str, float | None]


def of_epoch(report: EpochReport, *, joules: bool = True) -> Values:
    """Return what an attempt's run shows of one epoch; the slash gives them a section of their own.

    The metric is there twice: under a name that all jobs share, and under the user's own.
    """
    own = {named(report.metric_name): report.metric} if report.metric_name else {}
    return {
        "zf.epoch/energy_j": report.energy_j if joules else None,
        "zf.epoch/time_s": report.time_s,
        "zf.epoch/power_limit_w": report.power_limit_w,
        "zf.epoch/metric": report.metric,
        **own,
    }


def of_attempt(job: Job, observation: Observation) -> Values:
    """Return what an attempt's run shows of its outcome."""
    joules = _in_joules(job, observation)
    return {
        "zf.batch_size": float(observation.batch_size),
        "zf.power_limit_w": observation.power_limit_w,
        "zf.energy_to_accuracy_j": observation.energy_j if joules else None,
        "zf.host_energy_j": observation.host_energy_j if joules and observation.host_energy_j > 0 else None,
        "zf.time_to_accuracy_s": observation.time_s,
        **_cost(job, [observation]),
        "zf.epochs": float(observation.epochs),
        "zf.converged": float(observation.converged),
        **_parts(observation, joules=joules),
    }


def of_recurrence(job: Job, observations: Sequence[Observation]) -> Values:
    """Return a recurrence's point of its drift window's series: sums over the attempts, and how the last one went."""
    last = observations[-1]
    host_j = sum(o.host_energy_j for o in observations)
    joules = all(_in_joules(job, o) for o in observations)
    return {
        **_cost(job, observations),
        "zf.energy_to_accuracy_j": sum(o.energy_j for o in observations) if joules else None,
        "zf.host_energy_j": host_j if joules and host_j > 0 else None,
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
        "zf.gate/energy_j": check.energy_j or None,
    }


def of_scores(check: GateCheck) -> Values:
    """Return what an evaluation returned, under names that MLflow takes: they are the user's own. The first 100 scores.

    >>> from zeus_flows.core.gate import Question
    >>> of_scores(GateCheck(Question(2, 1, 1, 8), "auc", 0.9, True, True, "", {"f1@5/../x": 0.5}))
    {'zf.gate/f1_5_x': 0.5}
    """
    first = list(check.scores.items())[:100]
    return {f"zf.gate/{re.sub(r'[^A-Za-z0-9_-]+', '_', name)[:100] or '_'}": value for name, value in first}


def named(name: str) -> str:
    """Return a user's own name as one that MLflow takes and that is none of ours.

    >>> named("val/accuracy"), named("f1 @ 5"), named("../x"), named("zf.cost_j")
    ('val/accuracy', 'f1_5', 'x', 'zf_cost_j')
    """
    parts = (re.sub(r"[^A-Za-z0-9_.-]+", "_", part)[:100].strip(".") for part in name.split("/"))
    safe = "/".join([part for part in parts if part][:2])
    return re.sub(r"^zf\.", "zf_", safe, flags=re.IGNORECASE) or "_"


def metrics(values: Values, *, step: int, at_s: float | None = None) -> list[Metric]:
    """Return those values that there are as MLflow's metrics."""
    at_ms = int((time.time() if at_s is None else at_s) * 1000)
    return [Metric(name, value, at_ms, step) for name, value in values.items() if value is not None]


def _in_joules(job: Job, observation: Observation) -> bool:
    return not job.in_seconds and observation.energy_source is not EnergySource.NONE


def _cost(job: Job, observations: Sequence[Observation]) -> Values:
    """Return what attempts cost together, under a name that says its unit."""
    if all(_in_joules(job, o) for o in observations):
        return {"zf.cost_j": sum(observed_cost(job, o) for o in observations)}
    return {"zf.cost_s": sum(observed_cost(replace(job, in_seconds=True), o) for o in observations)}


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
    seconds = {f"zf.part/{name}_s": part.time_s for name, part in parts.items()}
    return seconds | ({f"zf.part/{name}_j": part.energy_j for name, part in parts.items()} if joules else {})
