"""What was saved against the default: b0 at the maximum power limit, trained to the same target.

Every saving has two parts that sum to it: what the power limit brings at b0, and what the batch size brings on
top. The default itself is not run again and again to be compared with; what it would have taken is estimated from
b0's runs and b0's profile, for each recurrence's own amount of data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zeus_flows.core.bandit import Runs
from zeus_flows.core.cost import attempt_cost
from zeus_flows.core.power import best_limit
from zeus_flows.core.records import EnergySource, Job, LimitMeasurement, Observation, PowerProfile


@dataclass(frozen=True, slots=True)
class Amount:
    """Energy in joules, time in seconds, and cost in joules by the job's objective."""

    energy_j: float = 0.0
    time_s: float = 0.0
    cost_j: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.energy_j + other.energy_j, self.time_s + other.time_s, self.cost_j + other.cost_j)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.energy_j - other.energy_j, self.time_s - other.time_s, self.cost_j - other.cost_j)

    def percent_of(self, whole: Amount) -> Amount:
        """Return each figure in percent of another's; 0 where there is nothing to compare with."""
        pairs = zip(_figures(self), _figures(whole), strict=True)
        return Amount(*(100 * part / of if of else 0.0 for part, of in pairs))


@dataclass(frozen=True, slots=True)
class Saving:
    """A saving, and its parts.

    Attributes:
        baseline: What the default would have taken: b0 at the maximum power limit.
        power: From (b0, maximum limit) to (b0, best limit).
        batch_size: From (b0, best limit) to what ran or would run; what exploring cost is in here.
    """

    baseline: Amount
    power: Amount
    batch_size: Amount

    @property
    def total(self) -> Amount:
        """Both parts together; negative where the default would have been cheaper."""
        return self.power + self.batch_size

    @property
    def percent(self) -> Amount:
        """The total in percent of the baseline."""
        return self.total.percent_of(self.baseline)


@dataclass(frozen=True, slots=True)
class Savings:
    """What was saved.

    Attributes:
        energy_source: Where the joules come from; simulated ones must be shown as such.
        recurrences: How many recurrences are compared: those on GPUs that b0 was profiled on.
        so_far: All their attempts (failed ones and profiling included) against the default.
        from_now_on: One run of the best known batch size at its best limit against the default.
        best_batch_size: That batch size.
    """

    energy_source: EnergySource
    recurrences: int
    so_far: Saving
    from_now_on: Saving
    best_batch_size: int


def savings(job: Job, observations: Iterable[Observation]) -> Savings | None:
    """Return what was saved, or None until b0 has a converged run and a complete profile.

    Args:
        job: What recurs.
        observations: Its history, of one energy source, in the order (recurrence, attempt).
    """
    history = list(observations)
    epochs = _mean_epochs(history)
    profiles = {(o.batch_size, o.gpu.key): o.profile for o in history if _complete(o.profile)}
    b0 = job.default_batch_size
    compared = [o for o in history if (b0, o.gpu.key) in profiles]
    if b0 not in epochs or not compared:
        return None

    baseline = tuned = Amount()
    begun: set[int] = set()
    for o in compared:
        if o.recurrence not in begun:
            begun.add(o.recurrence)
            at_b0 = profiles[b0, o.gpu.key]
            assert at_b0 is not None
            baseline += _run(job, at_b0, _maximum(at_b0), epochs[b0] * o.samples_per_epoch)
            tuned += _run(job, at_b0, best_limit(job, at_b0), epochs[b0] * o.samples_per_epoch)

    newest = compared[-1]
    here = {b: p for (b, key), p in profiles.items() if key == newest.gpu.key and p is not None and b in epochs}
    runs = {b: _run(job, p, best_limit(job, p), epochs[b] * newest.samples_per_epoch) for b, p in here.items()}
    offered = {b: run for b, run in runs.items() if b in job.batch_sizes}
    best = min(offered, key=lambda b: (offered[b].cost_j, b))
    once = _run(job, here[b0], _maximum(here[b0]), epochs[b0] * newest.samples_per_epoch)
    return Savings(
        energy_source=newest.energy_source,
        recurrences=len(begun),
        so_far=Saving(baseline, power=baseline - tuned, batch_size=tuned - _spent(job, compared)),
        from_now_on=Saving(once, power=once - runs[b0], batch_size=runs[b0] - runs[best]),
        best_batch_size=best,
    )


def _mean_epochs(history: Sequence[Observation]) -> dict[int, float]:
    epochs: dict[int, Runs] = {}
    for o in history:
        if o.converged:
            epochs[o.batch_size] = epochs.get(o.batch_size, Runs()).add(o.epochs)
    return {b: runs.mean for b, runs in epochs.items()}


def _complete(profile: PowerProfile | None) -> bool:
    return profile is not None and profile.complete and bool(profile.measurements)


def _maximum(profile: PowerProfile) -> LimitMeasurement:
    return max(profile.measurements, key=lambda m: m.power_limit_w)


def _run(job: Job, profile: PowerProfile, at: LimitMeasurement, samples: float) -> Amount:
    """Return what training on so many samples takes at one power limit."""
    time_s = samples / at.samples_per_s
    return _amount(job, time_s * at.average_power_w, time_s, profile.gpu.max_power_w)


def _spent(job: Job, observations: Iterable[Observation]) -> Amount:
    return sum((_amount(job, o.energy_j, o.time_s, o.gpu.max_power_w) for o in observations), Amount())


def _amount(job: Job, energy_j: float, time_s: float, max_power_w: float) -> Amount:
    cost_j = attempt_cost(energy_j=energy_j, time_s=time_s, eta=job.objective_eta, max_power_w=max_power_w)
    return Amount(energy_j, time_s, cost_j)


def _figures(amount: Amount) -> tuple[float, float, float]:
    return amount.energy_j, amount.time_s, amount.cost_j
