"""Choosing a setting of the knob, a power limit or a clock, from a profile (section 4.2)."""

from __future__ import annotations

from collections.abc import Iterable

from zeus_flows.core.cost import price
from zeus_flows.core.job import Job, Selector
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power_profile import Part, PowerProfile, SettingMeasurement
from zeus_flows.errors import MeasurementError


def cost_per_sample(job: Job, profile: PowerProfile, measurement: SettingMeasurement, *, host_w: float = 0.0) -> float:
    """Return the cost of one training sample at one setting, by the job's objective."""
    rates = price(job, profile.gpu.max_power_w)
    return rates.of(measurement.average_power_w + host_w, 1.0) / measurement.samples_per_s


def epoch_at(
    profile: PowerProfile, at: SettingMeasurement, *, samples_per_epoch: float, overheads: Overheads = NOTHING
) -> Part:
    """Return what an epoch takes at one setting, evaluation and the rest included; the GPUs' own energy."""
    time_s = samples_per_epoch / at.samples_per_s
    beside = overheads.per_epoch(at.setting, profile)
    return Part(1, time_s * at.average_power_w + beside.energy_j, time_s + beside.time_s)


def run_at(
    profile: PowerProfile,
    at: SettingMeasurement,
    *,
    epochs: float,
    evaluations: float,
    samples_per_epoch: float,
    overheads: Overheads = NOTHING,
) -> Part:
    """Return what a run of so many epochs and evaluations takes at one setting; the GPUs' own energy."""
    time_s = epochs * samples_per_epoch / at.samples_per_s
    once, evaluation = overheads.once_each, overheads.evaluation_at(at.setting, profile)
    rest = overheads.rest.each
    return Part(
        1,
        once.energy_j + time_s * at.average_power_w + evaluations * evaluation.energy_j + epochs * rest.energy_j,
        once.time_s + time_s + evaluations * evaluation.time_s + epochs * rest.time_s,
    )


def best_setting(
    job: Job, profile: PowerProfile, *, samples_per_epoch: float = 1.0, overheads: Overheads = NOTHING
) -> SettingMeasurement:
    """Return the measurement at the best setting (eq. 7), by the job's selector.

    It holds during evaluation too, so whole epochs are compared. Ties go to the greater setting, which is never slower.

    Raises:
        MeasurementError: the profile has no measurement.
    """
    if not profile.measurements:
        raise MeasurementError(f"the profile of batch size {profile.batch_size} has no measurement")
    rates, whole = price(job, profile.gpu.max_power_w), bool(overheads)
    epochs = {
        m: epoch_at(profile, m, samples_per_epoch=samples_per_epoch, overheads=overheads)
        for m in (profile.measurements if whole else ())
    }
    candidates: Iterable[SettingMeasurement] = profile.measurements
    if job.selector is Selector.MAX_SLOWDOWN:
        seconds = {m: epochs[m].time_s if whole else 1 / m.samples_per_s for m in profile.measurements}
        fastest_s = min(seconds.values())
        candidates = [m for m in profile.measurements if seconds[m] <= job.slowdown * fastest_s]

    def cost_then_setting(m: SettingMeasurement) -> tuple[float, float]:
        if not whole:
            return rates.of(m.average_power_w, 1.0) / m.samples_per_s, -m.setting
        epoch = epochs[m]
        return rates.of(epoch.energy_j + overheads.host_w * epoch.time_s, epoch.time_s), -m.setting

    return min(candidates, key=cost_then_setting)


def epoch_cost(job: Job, profile: PowerProfile, *, samples_per_epoch: float, overheads: Overheads = NOTHING) -> float:
    """Return EpochCost(b) at the best setting (eq. 7): steps, evaluation and the rest."""
    at = best_setting(job, profile, samples_per_epoch=samples_per_epoch, overheads=overheads)
    if not overheads:
        return samples_per_epoch * cost_per_sample(job, profile, at)
    epoch = epoch_at(profile, at, samples_per_epoch=samples_per_epoch, overheads=overheads)
    rates = price(job, profile.gpu.max_power_w)
    return rates.of(epoch.energy_j + overheads.host_w * epoch.time_s, epoch.time_s)
