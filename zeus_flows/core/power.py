"""Choosing a power limit from a profile (section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable

from zeus_flows.core.cost import cost_rate
from zeus_flows.core.records import Job, LimitMeasurement, PowerProfile, Selector
from zeus_flows.errors import MeasurementError


def cost_per_sample(job: Job, profile: PowerProfile, measurement: LimitMeasurement) -> float:
    """Return the cost of one training sample at one power limit, by the job's objective, in joules."""
    rate = cost_rate(
        average_power_w=measurement.average_power_w,
        eta=job.objective_eta,
        max_power_w=profile.gpu.max_power_w,
    )
    return rate / measurement.samples_per_s


def best_limit(job: Job, profile: PowerProfile) -> LimitMeasurement:
    """Return the measurement at the best power limit (eq. 7), by the job's selector.

    Ties go to the greater limit, which is never slower.

    Raises:
        MeasurementError: the profile has no measurement.
    """
    if not profile.measurements:
        raise MeasurementError(f"the profile of batch size {profile.batch_size} has no measurement")
    candidates: Iterable[LimitMeasurement] = profile.measurements
    if job.selector is Selector.MAX_SLOWDOWN:
        fastest = max(m.samples_per_s for m in profile.measurements)
        candidates = [m for m in profile.measurements if m.samples_per_s * job.slowdown >= fastest]
    eta, max_power_w = job.objective_eta, profile.gpu.max_power_w

    def cost_then_limit(m: LimitMeasurement) -> tuple[float, float]:
        rate = cost_rate(average_power_w=m.average_power_w, eta=eta, max_power_w=max_power_w)
        return rate / m.samples_per_s, -m.power_limit_w

    return min(candidates, key=cost_then_limit)


def epoch_cost(job: Job, profile: PowerProfile, *, samples_per_epoch: int) -> float:
    """Return EpochCost(b) at the best power limit, in joules (eq. 7)."""
    return samples_per_epoch * cost_per_sample(job, profile, best_limit(job, profile))
