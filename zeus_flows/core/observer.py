"""Observer Mode (section 5): what the best power limit, or another batch size that was tried, would have saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from zeus_flows.core.cost import attempt_cost
from zeus_flows.core.job import Job
from zeus_flows.core.power import best_limit, cost_per_sample
from zeus_flows.core.power_profile import LimitMeasurement, PowerProfile
from zeus_flows.core.records import Observation
from zeus_flows.core.savings import Amount


@dataclass(frozen=True, slots=True)
class WouldHaveSaved:
    """What an attempt would have saved at the best power limit of its own profile.

    Attributes:
        power_limit_w: The limit it trained at.
        best_limit_w: The best one, by the job's selector.
        spent: What its epochs take at the limit it trained at, by the profile.
        saved: How much less they would have taken at the best one; negative where more (time, mostly).
    """

    power_limit_w: float
    best_limit_w: float
    spent: Amount
    saved: Amount

    @property
    def sentence(self) -> str:
        """The saving in words.

        >>> WouldHaveSaved(250.0, 150.0, Amount(100.0, 10.0, 200.0), Amount(20.0, -1.0, 10.0)).sentence
        'at 150 W instead of 250 W it would have taken 20.0 % less energy, 10.0 % more time, 5.0 % less cost'
        """
        if self.best_limit_w == self.power_limit_w:
            return f"{self.power_limit_w:g} W is the best power limit for it already"
        share = self.saved.percent_of(self.spent)
        changes = (("energy", share.energy_j), ("time", share.time_s), ("cost", share.cost_j))
        parts = [f"{abs(saved):.1f} % {'less' if saved >= 0 else 'more'} {what}" for what, saved in changes]
        return f"at {self.best_limit_w:g} W instead of {self.power_limit_w:g} W it would have taken {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class TriedBatchSize:
    """What a batch size that has reached the target takes, against the default, both at their best limits.

    Attributes:
        batch_size: The batch size.
        runs: How often it reached the target.
        saved_percent: Share of the default's cost that it saves; negative where it is dearer.
        uncertainty_percent: One standard error of that share; None where every batch size ran only once.
    """

    batch_size: int
    runs: int
    saved_percent: float
    uncertainty_percent: float | None

    @property
    def sentence(self) -> str:
        """The saving in words.

        >>> TriedBatchSize(64, 3, 12.0, 4.0).sentence
        'batch size 64 would have cost 12 ± 4 % less (3 runs)'
        """
        sure = f" ± {self.uncertainty_percent:.0f}" if self.uncertainty_percent is not None else ""
        than = "less" if self.saved_percent >= 0 else "more"
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        return f"batch size {self.batch_size} would have cost {abs(self.saved_percent):.0f}{sure} % {than} ({runs})"


def would_have_saved(job: Job, observation: Observation) -> WouldHaveSaved | None:
    """Return what the best limit would have saved on an attempt; None where its profile does not tell."""
    profile = observation.profile
    if profile is None or not profile.complete or observation.power_limit_w is None:
        return None
    at = next((m for m in profile.measurements if m.power_limit_w == observation.power_limit_w), None)
    if at is None or len(profile.measurements) < 2:
        return None
    best = best_limit(job, profile)
    samples = observation.epochs * observation.samples_per_epoch
    spent = _run(job, profile, at, samples)
    return WouldHaveSaved(at.power_limit_w, best.power_limit_w, spent, spent - _run(job, profile, best, samples))


def tried_batch_sizes(job: Job, observations: Iterable[Observation]) -> tuple[TriedBatchSize, ...]:
    """Return what the batch sizes that were tried on the newest GPU save against the default, each with its doubt.

    Untried ones are not guessed at. The doubt comes from the run-to-run scatter of the epochs to the target.
    """
    history = list(observations)
    if not history:
        return ()
    gpu_key = history[-1].gpu.key
    per_sample: dict[int, float] = {}
    log_epochs: dict[int, list[float]] = {}
    for o in history:
        if o.converged and o.epochs:
            log_epochs.setdefault(o.batch_size, []).append(math.log(o.epochs))
        if o.gpu.key == gpu_key and o.profile is not None and o.profile.complete and o.profile.measurements:
            per_sample[o.batch_size] = cost_per_sample(job, o.profile, best_limit(job, o.profile))
    known = [b for b in sorted(log_epochs) if b in per_sample]
    b0 = job.default_batch_size
    if b0 not in known:
        return ()
    scatter = _pooled_variance(list(log_epochs.values()))
    tried = []
    for b in known:
        ratio = per_sample[b] * math.exp(fmean(log_epochs[b]) - fmean(log_epochs[b0])) / per_sample[b0]
        doubt = None
        if scatter is not None:
            doubt = 100 * ratio * math.sqrt(scatter * (1 / len(log_epochs[b]) + 1 / len(log_epochs[b0])))
        if b != b0:
            tried.append(TriedBatchSize(b, len(log_epochs[b]), 100 * (1 - ratio), doubt))
    return tuple(tried)


def _pooled_variance(groups: Sequence[Sequence[float]]) -> float | None:
    repeated = [group for group in groups if len(group) > 1]
    if not repeated:
        return None
    free = sum(len(group) - 1 for group in repeated)
    return sum((len(group) - 1) * variance(group) for group in repeated) / free


def _run(job: Job, profile: PowerProfile, at: LimitMeasurement, samples: float) -> Amount:
    time_s = samples / at.samples_per_s
    energy_j = time_s * at.average_power_w
    cost_j = attempt_cost(energy_j=energy_j, time_s=time_s, eta=job.objective_eta, max_power_w=profile.gpu.max_power_w)
    return Amount(energy_j, time_s, cost_j)
