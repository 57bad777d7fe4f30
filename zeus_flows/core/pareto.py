"""Energy against time: what a run to the target is expected to take at every batch size and power limit (section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeus_flows.core.account import Account
from zeus_flows.core.expected import Known, Profiles, costs_on, epochs_of
from zeus_flows.core.job import Job


@dataclass(frozen=True, slots=True)
class SettingPoint:
    """A batch size at a power limit.

    Attributes:
        batch_size: Which.
        setting: The limit per GPU; None where the GPU knows none, or runs were not profiled.
        energy_j: Expected energy to the target, the machine beside its GPUs included.
        time_s: Expected time to the target.
        cost: By the job's objective: joules, or seconds where there are none.
        runs: Runs that reached the target in this drift window, on whichever GPU: epochs are their mean.
        is_default: The default batch size at the limit that was there before.
        is_best: The cheapest of all by the job's objective.
        on_front: No other takes both less energy and less time.
    """

    batch_size: int
    setting: float | None
    energy_j: float
    time_s: float
    cost: float
    runs: int
    is_default: bool = False
    is_best: bool = False
    on_front: bool = False


def settings_of_runs(
    job: Job, account: Account, *, profiles: Profiles, overheads: Known, gpu: str | None = None
) -> tuple[SettingPoint, ...]:
    """Return what is known of every batch size that reached the target in this drift window, on the newest GPU.

    Args:
        job: Whose.
        account: What its fold keeps.
        profiles: What is known of power limits.
        overheads: What runs take beside their steps.
        gpu: Another GPU, by its key.
    """
    era, gpu = account.era.add(account.newest), account.gpu if gpu is None else gpu
    costs = costs_on(job, account, era, gpu, profiles=profiles, overheads=overheads)
    data, found = account.samples_per_epoch, list[SettingPoint]()
    default_w = costs.setting_at(job.default_batch_size, None)
    for batch_size, epochs in sorted(epochs_of(era).items()):
        profile = costs.profiles.get(batch_size)
        limits = (None,) if profile is None else tuple(sorted(m.setting for m in profile.measurements))
        for setting in limits:
            takes = costs.takes(batch_size, setting, epochs.work(1, data))
            if takes is not None:
                default = batch_size == job.default_batch_size and setting == default_w
                energy_j, time_s, cost, _ = (float(value) for value in takes)
                found.append(SettingPoint(batch_size, setting, energy_j, time_s, cost, epochs.runs, is_default=default))
    return _marked(found)


def _marked(found: Sequence[SettingPoint]) -> tuple[SettingPoint, ...]:
    """Return the settings with the front and the cheapest marked."""
    best = min(found, key=lambda s: s.cost, default=None)
    marked, least_j = list[SettingPoint](), float("inf")
    for setting in sorted(found, key=lambda s: (s.time_s, s.energy_j)):
        front = setting.energy_j < least_j
        least_j = min(least_j, setting.energy_j)
        marked.append(replace(setting, on_front=front, is_best=setting is best))
    return tuple(sorted(marked, key=lambda s: (s.batch_size, s.setting or 0.0)))
