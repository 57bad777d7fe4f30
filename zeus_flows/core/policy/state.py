"""What all policies remember alike: profiles, what does not fit a GPU, what was spent; and how one lesson is drawn."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zeus_flows.core.bandit import Runs
from zeus_flows.core.cost import attempt_cost
from zeus_flows.core.policy.base import Lesson
from zeus_flows.core.power import best_limit, cost_per_sample
from zeus_flows.core.records import Gpu, Job, Observation, Outcome, PowerProfile

Key = tuple[int, str]  # (batch size, Gpu.key)

MOST = 1e15  # joules, seconds, watts, samples: whatever is greater was not measured


@dataclass(frozen=True, slots=True)
class Spent:
    """What all attempts on one GPU took, failures and profiling included.

    Attributes:
        recurrences: How many recurrences began on it.
        samples: Their data sets' sizes, added up.
    """

    energy_j: float = 0.0
    time_s: float = 0.0
    recurrences: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Rate:
    """Energy and time of an arm's runs on one GPU, and the samples trained: an epoch cost without a profile."""

    energy_j: float = 0.0
    time_s: float = 0.0
    samples: float = 0.0


@dataclass(frozen=True, slots=True)
class State:
    """The fold of a job's observations.

    Attributes:
        observations: How many were folded.
        order: (recurrence, attempt) of the newest one folded.
        newest_model: Recurrence, attempt and batch size of the newest attempt that reached the target; None before.
        profiles: The newest profile of each (batch size, GPU); complete where there is a complete one.
        infeasible: Batch sizes that ran out of memory, by GPU.
        spent: What was spent, by GPU.
        current: Number, energy in joules and time in seconds of the newest recurrence so far.
        gpu: The GPU of the newest observation.
        samples_per_epoch: Its data set's size.
        rates: Epoch costs of arms without a complete profile.
        max_power_w: MAXPOWER of every GPU seen.
        sample_costs: For each GPU, the cost of one sample at each arm's best limit, from complete profiles.
        default_epochs: Epochs that the default batch size took, where it converged.
        belief: What the job's policy has learnt.
        settings: Hash of everything in the job that the fold depends on; a snapshot is of use only for the same.
    """

    belief: Any
    settings: str = ""
    default_epochs: Runs = field(default_factory=Runs)
    observations: int = 0
    order: tuple[int, int] = (0, 0)
    newest_model: tuple[int, int, int] | None = None
    profiles: Mapping[Key, PowerProfile] = field(default_factory=dict)
    infeasible: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    spent: Mapping[str, Spent] = field(default_factory=dict)
    current: tuple[int, float, float] = (0, 0.0, 0.0)
    gpu: Gpu | None = None
    samples_per_epoch: int | None = None
    rates: Mapping[Key, Rate] = field(default_factory=dict)
    max_power_w: Mapping[str, float] = field(default_factory=dict)
    sample_costs: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def profile(self, batch_size: int, gpu: Gpu) -> PowerProfile | None:
        """Return the profile of a batch size on a GPU, complete or to be completed."""
        return self.profiles.get((batch_size, gpu.key))

    def sample_cost(self, job: Job, batch_size: int, gpu_key: str) -> float | None:
        """Return the cost of one training sample, in joules: at the best limit, or else as it was measured."""
        known = self.sample_costs.get(gpu_key, _NOTHING).get(batch_size)
        if known is not None or (rate := self.rates.get((batch_size, gpu_key))) is None:
            return known
        return _rate_cost(job, rate, self.max_power_w[gpu_key])

    def arm_costs(self, job: Job, gpu_key: str) -> dict[int, float]:
        """Return `sample_cost` of every arm of the job that has one."""
        known = self.sample_costs.get(gpu_key, _NOTHING)
        costs = {b: known[b] for b in job.batch_sizes if b in known}
        for b, key in self.rates:
            wanted = key == gpu_key and b in job.batch_sizes and b not in costs
            if wanted and (cost := self.sample_cost(job, b, key)) is not None:
                costs[b] = cost
        return costs


_NOTHING: Mapping[int, float] = {}
_UNSPENT = Spent()
_FIELDS = tuple(f.name for f in dataclasses.fields(State))
_get_fields = operator.attrgetter(*_FIELDS)


def changed(state: State, changes: Mapping[str, Any]) -> State:
    """Return the state with some fields changed; `dataclasses.replace` takes three times as long."""
    return State(*map(changes.get, _FIELDS, _get_fields(state)))


def count(state: State, observation: Observation) -> dict[str, Any]:
    """Return the fields of the state that every observation changes, whatever it teaches."""
    recurrence, energy_j, time_s = state.current
    begins = observation.recurrence != recurrence
    if begins:
        recurrence, energy_j, time_s = observation.recurrence, 0.0, 0.0
    key = observation.gpu.key
    before = state.spent.get(key, _UNSPENT)
    spent = Spent(
        before.energy_j + observation.energy_j,
        before.time_s + observation.time_s,
        before.recurrences + begins,
        before.samples + begins * max(observation.samples_per_epoch, 0),
    )
    fields: dict[str, Any] = {
        "observations": state.observations + 1,
        "order": max(state.order, observation.order),
        "current": (recurrence, energy_j + observation.energy_j, time_s + observation.time_s),
        "spent": {**state.spent, key: spent},
    }
    if observation.outcome is Outcome.CONVERGED:
        fields["newest_model"] = (*observation.order, observation.batch_size)
    elif observation.outcome is Outcome.OUT_OF_MEMORY and not _has_run(state, observation):
        arms = {*state.infeasible.get(key, ()), observation.batch_size}
        fields["infeasible"] = {**state.infeasible, key: tuple(sorted(arms))}
    return fields


def _has_run(state: State, observation: Observation) -> bool:
    """Return whether the batch size has trained on this GPU: then it ran out of memory for another reason.

    Whether anything was measured does not matter: memory may run out before the first step.
    """
    b, key = observation.batch_size, observation.gpu.key
    profiled = observation.profile is not None and observation.profile.complete
    return profiled or (b, key) in state.rates or b in state.sample_costs.get(key, _NOTHING)


def believable(observation: Observation) -> bool:
    """Return whether the readings can be used at all."""
    return (
        observation.energy_complete
        and 0 <= observation.energy_j <= MOST
        and 0 <= observation.time_s <= MOST
        and 0 <= observation.epochs <= MOST
        and 0 < observation.gpu.max_power_w <= MOST
        and 0 < observation.samples_per_epoch <= MOST
    )


def measured(job: Job, state: State, observation: Observation) -> dict[str, Any]:
    """Return the fields of the state that a believable observation changes."""
    gpu, gpu_key = observation.gpu, observation.gpu.key
    key = (observation.batch_size, gpu_key)
    fields: dict[str, Any] = {"gpu": gpu, "samples_per_epoch": observation.samples_per_epoch}
    if state.max_power_w.get(gpu_key) != gpu.max_power_w:
        fields["max_power_w"] = {**state.max_power_w, gpu_key: gpu.max_power_w}
    if observation.converged and observation.batch_size == job.default_batch_size and observation.epochs:
        fields["default_epochs"] = state.default_epochs.add(observation.epochs, window=job.window)
    if observation.profile is not None and observation.profile.measurements:
        fields |= _profiled(job, state, observation.profile)
    known = observation.batch_size in fields.get("sample_costs", state.sample_costs).get(gpu_key, _NOTHING)
    if not known and observation.epochs > 0:
        rate = state.rates.get(key, Rate())
        more = Rate(
            rate.energy_j + observation.energy_j,
            rate.time_s + observation.time_s,
            rate.samples + observation.epochs * observation.samples_per_epoch,
        )
        fields["rates"] = {**state.rates, key: more}
    too_large = state.infeasible.get(gpu_key)
    if too_large and observation.converged and observation.batch_size >= too_large[0]:
        beyond = tuple(b for b in too_large if b > observation.batch_size)
        fields["infeasible"] = {**state.infeasible, gpu_key: beyond}
    return fields


def _profiled(job: Job, state: State, new: PowerProfile) -> dict[str, Any]:
    """Return the fields that a profile changes. A partial one is added to what is there; a complete one replaces."""
    key = (new.batch_size, new.gpu.key)
    old = state.profiles.get(key)
    if old is not None and not new.complete:
        if old.complete:
            return {}
        limits = {m.power_limit_w: m for m in (*old.measurements, *new.measurements)}
        new = replace(new, measurements=tuple(limits[w] for w in sorted(limits)))
    fields: dict[str, Any] = {"profiles": {**state.profiles, key: new}}
    if new.complete and (cost := _positive(cost_per_sample(job, new, best_limit(job, new)))) is not None:
        costs = {**state.sample_costs.get(new.gpu.key, _NOTHING), new.batch_size: cost}
        fields["sample_costs"] = {**state.sample_costs, new.gpu.key: costs}
    return fields


def sample_costs(job: Job, profiles: Mapping[Key, PowerProfile]) -> dict[str, dict[int, float]]:
    """Return, for each GPU, the cost of one sample at each arm's best limit, from complete profiles."""
    costs: dict[str, dict[int, float]] = {}
    for (batch_size, gpu_key), p in profiles.items():
        if p.complete and (cost := _positive(cost_per_sample(job, p, best_limit(job, p)))) is not None:
            costs.setdefault(gpu_key, {})[batch_size] = cost
    return costs


def lesson(job: Job, sample_costs: Mapping[str, Mapping[int, float]], observation: Observation) -> Lesson | None:
    """Return what a believable observation teaches about its arm, or None where it must not teach.

    A failure is nobody's fault; an unmeasured run and one that ran out of memory say nothing about cost; an arm
    that left the job's list is of no interest. An attempt that diverged never would have reached the target.

    Args:
        job: Whose objective counts.
        sample_costs: The state's, with what the observation measured.
        observation: What happened.
    """
    outcome, batch_size, gpu = observation.outcome, observation.batch_size, observation.gpu
    if outcome is Outcome.FAILED or outcome is Outcome.OUT_OF_MEMORY or batch_size not in job.batch_sizes:
        return None
    converged = outcome is Outcome.CONVERGED
    if converged and not observation.epochs:
        return None
    profiled = observation.profiling_time_s > 0
    per_sample = sample_costs.get(gpu.key, _NOTHING).get(batch_size) if profiled else None
    return Lesson(
        recurrence=observation.recurrence,
        batch_size=batch_size,
        epochs=job.max_epochs if outcome is Outcome.DIVERGED else observation.epochs,
        converged=converged,
        cost_j=attempt_cost(
            energy_j=observation.energy_j,
            time_s=observation.time_s,
            eta=job.objective_eta,
            max_power_w=gpu.max_power_w,
        ),
        epoch_cost_j=None if per_sample is None else per_sample * observation.samples_per_epoch,
        profiled=profiled,
        refused=observation.epochs_allowed == 0 and not converged,
        power_limit_w=observation.power_limit_w,
    )


def _rate_cost(job: Job, rate: Rate, max_power_w: float) -> float | None:
    cost = attempt_cost(energy_j=rate.energy_j, time_s=rate.time_s, eta=job.objective_eta, max_power_w=max_power_w)
    return _positive(cost / rate.samples)


def _positive(cost: float) -> float | None:
    return cost if 1 / MOST <= cost <= MOST else None
