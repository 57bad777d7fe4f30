"""D(b, p): what a run to the target is expected to take at a batch size and a setting, by what an era has shown.

That is the mean epochs of b in this era, at what an epoch takes by profile and overheads (or by what runs took, where
there is no profile). Epochs do not depend on the GPU, so all runs count for them; costs are by GPU, and scaled to what
the batch size's runs took where they did not profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from zeus_flows.core.account import Account, Era
from zeus_flows.core.amounts import Ran, Took
from zeus_flows.core.cost import Price, price
from zeus_flows.core.gaussian import Floats
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import NOTHING as NO_OVERHEADS
from zeus_flows.core.overheads import Overheads, nearest
from zeus_flows.core.power import best_setting, run_at
from zeus_flows.core.power_profile import PowerProfile

Profiles = Mapping[tuple[int, str], PowerProfile]  # by (batch size, Gpu.key)
Known = Mapping[tuple[int, str], Overheads]


@dataclass(frozen=True, slots=True)
class RunTotals:
    """What is to be done: so many runs, their epochs, samples and evaluations, each added up."""

    runs: float = 0.0
    epochs: float = 0.0
    samples: float = 0.0
    evaluations: float = 0.0

    @classmethod
    def of(cls, ran: Ran) -> RunTotals:
        """Return what runs did."""
        return cls(ran.runs, ran.epochs, ran.samples, ran.evaluations)


@dataclass(frozen=True, slots=True)
class Epochs:
    """What runs of one batch size took on average, in this era."""

    runs: int
    epochs: float
    evaluations: float

    def work(self, runs: float, data: float) -> RunTotals:
        """Return what so many runs are expected to do, with data sets of that size in all."""
        return RunTotals(runs, runs * self.epochs, data * self.epochs, runs * self.evaluations)


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What runs take on one GPU; figures are energy, time, cost and the host's energy.

    Attributes:
        rates: Prices of joules and seconds.
        before: The setting that was there before; None where it is not known.
        ran: The era's runs on this GPU.
        profiles: Complete profiles, by batch size.
        best: Their best settings.
        overheads: By batch size.
        host_w: What the machine draws beside its GPUs.
        scales: What runs took over what was expected of them, energy and time, by batch size.
        scaled_by: The shares of settings in the runs that a batch size is scaled by.
    """

    rates: Price
    before: float | None
    ran: tuple[Ran, ...]
    profiles: Mapping[int, PowerProfile]
    best: Mapping[int, float]
    overheads: Mapping[int, Overheads]
    host_w: float
    scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    scaled_by: Mapping[int, Mapping[float, float]] = field(default_factory=dict)

    def figures(self, energy_j: float, time_s: float, host_j: float) -> Floats:
        """Return energy, time, cost and the host's energy."""
        all_j = energy_j + host_j
        return np.array([all_j, time_s, self.rates.of(all_j, time_s), host_j])

    def took(self, took: Took | Ran) -> Floats:
        """Return what something took."""
        return self.figures(took.energy_j, took.time_s, took.host_j)

    def takes(self, batch_size: int, setting: float | None, work: RunTotals) -> Floats | None:
        """Return what work is expected to take at a setting (None: the one before); None where that is unknown."""
        known = self._by_profile(batch_size, setting, work)
        if known is None:
            known = self._by_rate(batch_size, work)
            return None if known is None else self.figures(*known, self.host_w * known[1])
        energy, time = self.scales.get(batch_size, (1.0, 1.0))
        return self.figures(energy * known[0], time * known[1], self.host_w * time * known[1])

    def grows(self, batch_size: int, setting: float | None, work: RunTotals) -> Floats:
        """Return the part that grows with the epochs: everything except what a run takes once."""
        whole, once = self.takes(batch_size, setting, work), self.takes(batch_size, setting, RunTotals(work.runs))
        return np.zeros(4) if whole is None or once is None else whole - once

    def knows(self, batch_size: int) -> bool:
        """Return whether the cost of a run at a batch size is known on this GPU."""
        return self.takes(batch_size, None, RunTotals(1, 1, 1, 0)) is not None

    def _by_profile(self, batch_size: int, setting: float | None, work: RunTotals) -> tuple[float, float] | None:
        profile, at_setting = self.profiles.get(batch_size), self.setting_at(batch_size, setting)
        if profile is None or at_setting is None:
            return None
        at = nearest(profile, at_setting)
        overheads = self.overheads.get(batch_size, NO_OVERHEADS)
        one = run_at(
            profile,
            at,
            epochs=work.epochs,
            evaluations=work.evaluations,
            samples_per_epoch=work.samples / work.epochs if work.epochs else 0.0,
            overheads=overheads,
        )
        more, once = work.runs - 1, overheads.once_each
        return one.energy_j + more * once.energy_j, one.time_s + more * once.time_s

    def _by_rate(self, batch_size: int, work: RunTotals) -> tuple[float, float] | None:
        """Return what work takes by what runs took, where there is no profile."""
        alike = [r for r in self.ran if r.batch_size == batch_size]
        samples = sum(r.samples for r in alike)
        if not samples:
            return None
        share = work.samples / samples
        return share * sum(r.energy_j for r in alike), share * sum(r.time_s for r in alike)

    def setting_at(self, batch_size: int, setting: float | None) -> float | None:
        """Return the setting in the profile that stands for one (None: the one before); None without a profile."""
        if (profile := self.profiles.get(batch_size)) is None:
            return None
        setting = setting if setting is not None else self.before
        return nearest(profile, math.inf if setting is None else setting).setting

    def scaled(self) -> RunCosts:
        """Return the costs scaled to the runs that did not profile. A batch size without any uses those of others."""
        pairs: dict[int, list[tuple[float, float, float, float]]] = {}
        limits: dict[int, dict[float, float]] = {}
        for r in self.ran:
            setting = self.setting_at(r.batch_size, r.setting)
            expected = None if r.profiled else self._by_profile(r.batch_size, r.setting, RunTotals.of(r))
            if expected is not None and setting is not None:
                pairs.setdefault(r.batch_size, []).append((r.energy_j, expected[0], r.time_s, expected[1]))
                shares = limits.setdefault(r.batch_size, {})
                shares[setting] = shares.get(setting, 0.0) + expected[1]
        everything = [pair for alike in pairs.values() for pair in alike]
        return replace(
            self,
            scales={b: _ratios(pairs.get(b, everything)) for b in self.profiles},
            scaled_by={b: {w: t / sum(of.values()) for w, t in of.items()} for b, of in limits.items()},
        )


def _ratios(pairs: Sequence[tuple[float, float, float, float]]) -> tuple[float, float]:
    """Return energy and time over what was expected of them; 1 where that is not known."""
    energy_j, expected_j, time_s, expected_s = (math.fsum(pair[i] for pair in pairs) for i in range(4))
    return (
        energy_j / expected_j if energy_j and expected_j else 1.0,
        time_s / expected_s if time_s and expected_s else 1.0,
    )


def costs_on(job: Job, account: Account, era: Era, gpu: str, *, profiles: Profiles, overheads: Known) -> RunCosts:
    """Return what runs take on one GPU, by what is known now."""
    complete = {b: p for (b, key), p in profiles.items() if key == gpu and p.complete and p.measurements}
    here = {b: o for (b, key), o in overheads.items() if key == gpu}
    ran = tuple(r for r in era.ran.values() if r.gpu == gpu)
    runs = sum(r.runs for r in ran)
    data = sum(r.data for r in ran) / runs if runs else account.samples_per_epoch or 1.0
    time_s = sum(r.time_s for r in ran)
    host_w = sum(r.host_j for r in ran) / time_s if time_s else max((o.host_w for o in here.values()), default=0.0)
    best = {
        b: best_setting(job, p, samples_per_epoch=data, overheads=here.get(b, NO_OVERHEADS)).setting
        for b, p in complete.items()
    }
    b0 = complete.get(job.default_batch_size)
    greatest = max((m.setting for m in b0.measurements), default=None) if b0 is not None else None
    return RunCosts(
        rates=price(job, account.max_power_w.get(gpu, 0.0)),
        before=account.before.get(gpu, greatest),
        ran=ran,
        profiles=complete,
        best=best,
        overheads=here,
        host_w=host_w,
    ).scaled()


def epochs_of(era: Era) -> dict[int, Epochs]:
    """Return what runs of each batch size took on average."""
    sums: dict[int, list[float]] = {}
    for r in era.ran.values():
        of_one = sums.setdefault(r.batch_size, [0, 0.0, 0.0])
        for i, value in enumerate((r.runs, r.epochs, r.evaluations)):
            of_one[i] += value
    return {b: Epochs(int(n), epochs / n, evaluations / n) for b, (n, epochs, evaluations) in sums.items()}


def best_batch_size(job: Job, costs: RunCosts, epochs: Mapping[int, Epochs], *, data: float, tuned: bool = True) -> int:
    """Return the batch size whose runs are expected to cost least, of those that reached the target in this era."""

    def cost(batch_size: int) -> float:
        setting = costs.best.get(batch_size) if tuned else None
        expected = costs.takes(batch_size, setting, epochs[batch_size].work(1, data))
        return math.inf if expected is None else float(expected[2])

    return min((b for b in epochs if b in job.batch_sizes or b == job.default_batch_size), key=lambda b: (cost(b), b))
