"""The energy-time cost of training, and regret."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeus_flows.core.job import Job
from zeus_flows.core.records import Observation
from zeus_flows.errors import MeasurementError


def energy_to_accuracy(*, time_to_accuracy_s: float, average_power_w: float) -> float:
    """Return ETA = TTA x AvgPower, in joules (eq. 1).

    >>> energy_to_accuracy(time_to_accuracy_s=60.0, average_power_w=200.0)
    12000.0
    """
    return time_to_accuracy_s * average_power_w


def attempt_cost(*, energy_j: float, time_s: float, eta: float, max_power_w: float) -> float:
    """Return the energy-time cost of one attempt in joules (eq. 2).

    Time is priced at the power the GPUs could have drawn, so both terms are joules.

    >>> attempt_cost(energy_j=1_000.0, time_s=10.0, eta=0.5, max_power_w=300.0)
    2000.0

    Raises:
        MeasurementError: a reading is NaN, infinite or negative. One NaN would poison an arm's belief
            for a whole window, so it stops here.
    """
    if not (0 <= energy_j < math.inf and 0 <= time_s < math.inf and 0 <= max_power_w < math.inf):
        readings = {"energy_j": energy_j, "time_s": time_s, "max_power_w": max_power_w}
        name, value = next((n, v) for n, v in readings.items() if not 0 <= v < math.inf)
        raise MeasurementError(f"{name} must be finite and not negative, not {value!r}")
    return eta * energy_j + (1 - eta) * max_power_w * time_s


@dataclass(frozen=True, slots=True)
class Price:
    """What joules and seconds cost by a job's objective (eq. 2).

    Attributes:
        eta: The energy-time knob that counts.
        max_power_w: What a second is priced at; 1 where cost is in seconds.
    """

    eta: float
    max_power_w: float

    def of(self, energy_j: float, time_s: float) -> float:
        """Return the cost of some energy and time: in joules, or in seconds where joules mean nothing."""
        return self.eta * energy_j + (1 - self.eta) * self.max_power_w * time_s


def price(job: Job, max_power_w: float) -> Price:
    """Return a job's prices on GPUs of a greatest power.

    >>> price(Job("t", (8,), 8, 1, in_seconds=True), 250.0).of(energy_j=0.0, time_s=60.0)
    60.0
    """
    return Price(job.objective_eta, 1.0 if job.in_seconds else max_power_w)


def cost_rate(*, average_power_w: float, eta: float, max_power_w: float) -> float:
    """Return cost per second of training, in watts: the bracket of eq. 3 and the numerator of eq. 5 and 7."""
    return eta * average_power_w + (1 - eta) * max_power_w


def epochs_cost(*, epochs: float, average_power_w: float, epochs_per_s: float, eta: float, max_power_w: float) -> float:
    """Return C(b, p) = Epochs(b) x cost rate / Throughput(b, p), in joules (eq. 5)."""
    return epochs * cost_rate(average_power_w=average_power_w, eta=eta, max_power_w=max_power_w) / epochs_per_s


def observed_cost(job: Job, observation: Observation) -> float:
    """Return what an attempt cost by the job's objective, all of it: profiling, failures and the host included."""
    rates = price(job, observation.gpu.max_power_w)
    return attempt_cost(
        energy_j=observation.energy_j + observation.host_energy_j,
        time_s=observation.time_s,
        eta=rates.eta,
        max_power_w=rates.max_power_w,
    )
