"""What all policies remember alike: profiles, overheads, what does not fit a GPU, what was spent; and one lesson's way.

What an arm costs on a GPU is told from them: training by its profile, at the setting that is best for whole epochs, and
what lies beside the steps by its overheads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zeus_flows.core.account import Account
from zeus_flows.core.bandit import Runs
from zeus_flows.core.cost import attempt_cost, observed_cost, price
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import KEPT, NOTHING, Overheads, pooled
from zeus_flows.core.policy.base import Lesson
from zeus_flows.core.power import best_setting, cost_per_sample, epoch_at
from zeus_flows.core.power_profile import NO_PART, Gpu, Part, PowerProfile, knob_of
from zeus_flows.core.records import Observation, Outcome

Key = tuple[int, str]  # (batch size, Gpu.key)
MicroKey = tuple[int, int, str]  # (batch size, micro-batch, Gpu.key)

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
    host_energy_j: float = 0.0


@dataclass(frozen=True, slots=True)
class Shortage:
    """A batch size, or a micro-batch, that ran out of a GPU's memory.

    Attributes:
        batch_size: The samples that were to go through at once.
        recurrences: In how many recurrences it did.
        last: The newest of them.
        ran: It had trained there before; so it may be somebody else's fault, and is looked at again, rarely.
    """

    batch_size: int
    recurrences: int
    last: int
    ran: bool

    def retires(self, recurrence: int) -> bool:
        """Return whether the batch size, and larger ones, are left alone in a recurrence."""
        if not self.ran:
            return True
        wait = LOOK_AGAIN * 2 ** min(self.recurrences - SHORTAGES, 10)
        return self.recurrences >= SHORTAGES and recurrence - self.last < wait


SHORTAGES = 2  # recurrences in which a batch size that has trained before runs out of memory until it is retired
LOOK_AGAIN = 50  # recurrences after which it is tried again; twice as many after each time it runs out again


@dataclass(frozen=True, slots=True)
class ArmCost:
    """What a run of an arm costs on one GPU: once + epochs x (training + beside)."""

    training: float
    beside: float = 0.0
    once: float = 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Energy and time of an arm's steps on one GPU, and the samples trained: an epoch cost without a profile.

    Attributes:
        micro_batch_size: Samples that went through the GPU at once; None: the whole batch.
    """

    energy_j: float = 0.0
    time_s: float = 0.0
    samples: float = 0.0
    micro_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """The fold of a job's observations.

    Attributes:
        observations: How many were folded.
        order: (recurrence, attempt) of the newest one folded.
        newest_model: Recurrence, attempt and batch size of the newest attempt that reached the target; None before.
        profiles: The newest profile of each (batch size, GPU); complete where its micro-batch has a complete one.
        shelf: Profiles of other micro-batches than the newest, by batch size, micro-batch and GPU.
        shortages: Batch sizes and micro-batches that ran out of memory, ascending, by `Gpu.name`.
        overheads: What runs of each (batch size, GPU) take beside their steps.
        host: Energy and time of the machine beside its GPUs, where that was measured.
        settings_before: The setting of the knob that was there before, by GPU.
        account: Sums that savings are told from; None where nobody will ask, in a replay say.
        spent: What was spent, by GPU.
        current: Number, energy in joules and time in seconds of the newest recurrence so far.
        gpu: The GPU of the newest observation.
        samples_per_epoch: Its data set's size.
        rates: Epoch costs of arms without a complete profile.
        max_power_w: MAXPOWER of every GPU seen.
        sample_costs: For each GPU, the cost of one sample at each arm's best setting, from complete profiles.
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
    shelf: Mapping[MicroKey, PowerProfile] = field(default_factory=dict)
    shortages: Mapping[str, tuple[Shortage, ...]] = field(default_factory=dict)
    spent: Mapping[str, Spent] = field(default_factory=dict)
    current: tuple[int, float, float] = (0, 0.0, 0.0)
    gpu: Gpu | None = None
    samples_per_epoch: int | None = None
    rates: Mapping[Key, Rate] = field(default_factory=dict)
    max_power_w: Mapping[str, float] = field(default_factory=dict)
    sample_costs: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    overheads: Mapping[Key, Overheads] = field(default_factory=dict)
    host: Part = NO_PART
    settings_before: Mapping[str, float] = field(default_factory=dict)
    account: Account | None = None

    def profile(self, batch_size: int, gpu: Gpu, micro: int | None = None) -> PowerProfile | None:
        """Return the profile of a batch size in micro-batches on a GPU, complete or to be completed."""
        newest, micro = self.profiles.get((batch_size, gpu.key)), micro or batch_size
        return newest if newest is not None and newest.micro == micro else self.shelf.get((batch_size, micro, gpu.key))

    def host_w(self, job: Job) -> float:
        """Return what the machine draws beside its GPUs: as the job says, or as it was measured."""
        if job.host_power_w is not None:
            return job.host_power_w
        return self.host.energy_j / self.host.time_s if self.host.time_s else 0.0

    def overheads_of(self, job: Job, batch_size: int, gpu_key: str) -> tuple[Overheads, bool]:
        """Return what a run of an arm takes beside its steps, and whether that was seen at this very batch size.

        Otherwise it is believed from other batch sizes on the GPU, or from other GPUs; settings of another knob say
        nothing there.
        """
        host_w = self.host_w(job)
        own = self.overheads.get((batch_size, gpu_key))
        if own is not None:
            return (replace(own, host_w=host_w) if host_w else own), True
        near = [known for (_, key), known in self.overheads.items() if key == gpu_key]
        knob = knob_of(gpu_key)
        far = (o if knob_of(key) is knob else o.anywhere() for (_, key), o in self.overheads.items())
        known = pooled(near or far)
        return (replace(known, host_w=host_w) if host_w else known), False

    def all_overheads(self, job: Job) -> Mapping[Key, Overheads]:
        """Return what runs of each (batch size, GPU) take beside their steps, the host included."""
        host_w = self.host_w(job)
        if not host_w:
            return self.overheads
        keys = {**dict.fromkeys(self.profiles), **dict.fromkeys(self.rates), **dict.fromkeys(self.overheads)}
        return {key: replace(self.overheads.get(key, NOTHING), host_w=host_w) for key in keys}

    def arm_cost(self, job: Job, batch_size: int, gpu_key: str, samples: float) -> ArmCost | None:
        """Return what a run of an arm costs for a data set of some size; None where its steps were never measured."""
        if not self.overheads and not self.host_w(job):
            known = self.sample_costs.get(gpu_key, _NOTHING).get(batch_size)
            if known is None and (rate := self.rates.get((batch_size, gpu_key))) is not None:
                known = _rate_cost(job, rate, self.max_power_w[gpu_key], 0.0)
            return None if known is None else ArmCost(known * samples)
        overheads, _ = self.overheads_of(job, batch_size, gpu_key)
        profile = self.profiles.get((batch_size, gpu_key))
        if profile is not None and profile.complete and profile.measurements:
            return _whole_cost(job, profile, overheads, samples)
        if (rate := self.rates.get((batch_size, gpu_key))) is None:
            return None
        per_sample = _rate_cost(job, rate, self.max_power_w[gpu_key], overheads.host_w)
        if per_sample is None:
            return None
        rates = price(job, self.max_power_w[gpu_key])
        beside, once = overheads.per_epoch(self.settings_before.get(gpu_key, 0.0)), overheads.once_each
        return ArmCost(
            per_sample * samples,
            rates.of(beside.energy_j + overheads.host_w * beside.time_s, beside.time_s),
            rates.of(once.energy_j + overheads.host_w * once.time_s, once.time_s),
        )

    def arm_costs(self, job: Job, gpu_key: str, samples: float) -> dict[int, ArmCost]:
        """Return `arm_cost` of every arm of the job that has one."""
        if not self.overheads and not self.rates and not self.host_w(job):
            known = self.sample_costs.get(gpu_key, _NOTHING)
            return {b: ArmCost(known[b] * samples) for b in job.batch_sizes if b in known}
        costs = ((b, self.arm_cost(job, b, gpu_key, samples)) for b in job.batch_sizes)
        return {b: cost for b, cost in costs if cost is not None}

    def too_large(self, gpu: Gpu, recurrence: int) -> int | None:
        """Return the smallest batch size that is left alone on a GPU for want of memory; None where all fit."""
        return next((s.batch_size for s in self.shortages.get(gpu.name, ()) if s.retires(recurrence)), None)


def _whole_cost(job: Job, profile: PowerProfile, overheads: Overheads, samples: float) -> ArmCost | None:
    """Return what a run costs at the setting that is best for whole epochs."""
    rates, host_w = price(job, profile.gpu.max_power_w), overheads.host_w
    at = best_setting(job, profile, samples_per_epoch=samples, overheads=overheads)
    training = _positive(samples * cost_per_sample(job, profile, at, host_w=host_w))
    beside, once = overheads.per_epoch(at.setting, profile), overheads.once_each
    if training is None:
        return None
    return ArmCost(
        training,
        rates.of(beside.energy_j + host_w * beside.time_s, beside.time_s),
        rates.of(once.energy_j + host_w * once.time_s, once.time_s),
    )


_NOTHING: Mapping[int, float] = {}
_UNSPENT = Spent()


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
        before.host_energy_j + observation.host_energy_j,
    )
    fields: dict[str, Any] = {
        "observations": state.observations + 1,
        "order": max(state.order, observation.order),
        "current": (recurrence, energy_j + observation.energy_j, time_s + observation.time_s),
        "spent": {**state.spent, key: spent},
    }
    if observation.outcome is Outcome.CONVERGED:
        fields["newest_model"] = (*observation.order, observation.batch_size)
    elif observation.outcome is Outcome.OUT_OF_MEMORY:
        fields["shortages"] = {**state.shortages, observation.gpu.name: _short(state, observation)}
    return fields


def _short(state: State, observation: Observation) -> tuple[Shortage, ...]:
    """Return a GPU's shortages with one more."""
    b, known = observation.micro, state.shortages.get(observation.gpu.name, ())
    before = next((s for s in known if s.batch_size == b), None)
    ran = _has_run(state, observation) if before is None else before.ran
    times = 1 if before is None else before.recurrences + (before.last != observation.recurrence)
    others = [s for s in known if s.batch_size != b]
    return tuple(sorted([*others, Shortage(b, times, observation.recurrence, ran)], key=lambda s: s.batch_size))


def _has_run(state: State, observation: Observation) -> bool:
    """Return whether as many samples went through this GPU before: then memory may have run out for another reason.

    Whether anything was measured does not matter: memory may run out before the first step.
    """
    micro, key = observation.micro, observation.gpu.key
    profiled = observation.profile is not None and observation.profile.complete
    costs = state.sample_costs.get(key, _NOTHING)
    return (
        profiled
        or any(k == key and micro == (rate.micro_batch_size or b) for (b, k), rate in state.rates.items())
        or any(k == key and p.micro == micro and b in costs for (b, k), p in state.profiles.items())
        or any(k == key and m == micro and p.complete for (_, m, k), p in state.shelf.items())
    )


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
    """Return the fields of the state that a believable observation changes.

    Where somebody else set the power limit, only what was profiled before that counts.
    """
    gpu, gpu_key = observation.gpu, observation.gpu.key
    key = (observation.batch_size, gpu_key)
    fields: dict[str, Any] = {"gpu": gpu, "samples_per_epoch": observation.samples_per_epoch}
    if state.max_power_w.get(gpu_key) != gpu.max_power_w:
        fields["max_power_w"] = {**state.max_power_w, gpu_key: gpu.max_power_w}
    if observation.converged and observation.batch_size == job.default_batch_size and observation.epochs:
        fields["default_epochs"] = state.default_epochs.add(observation.epochs, window=job.window)
    if observation.profile is not None and observation.profile.measurements:
        fields |= _profiled(job, state, observation.profile)
    if observation.parts is not None:
        fields |= _beside(job, state, observation)
    known = observation.batch_size in fields.get("sample_costs", state.sample_costs).get(gpu_key, _NOTHING)
    broke_off = observation.outcome is Outcome.OUT_OF_MEMORY  # in the middle of an epoch, or before its first step
    if not known and observation.epochs > 0 and observation.foreign_limit_w is None and not broke_off:
        rate = state.rates.get(key, Rate())
        if rate.micro_batch_size != observation.micro_batch_size:
            rate = Rate()
        beside = observation.parts.together if observation.parts is not None else NO_PART
        more = Rate(
            rate.energy_j + max(observation.energy_j - beside.energy_j, 0.0),
            rate.time_s + max(observation.time_s - beside.time_s, 0.0),
            rate.samples + observation.epochs * observation.samples_per_epoch,
            observation.micro_batch_size,
        )
        fields["rates"] = {**state.rates, key: more}
    short = state.shortages.get(gpu.name)
    if short and observation.converged and observation.micro >= short[0].batch_size:
        beyond = tuple(s for s in short if s.batch_size > observation.micro)
        fields["shortages"] = {**state.shortages, gpu.name: beyond}
    return fields


def _beside(job: Job, state: State, observation: Observation) -> dict[str, Any]:
    """Return the fields that an attempt's parts change; those of one that broke off are not whole."""
    key = (observation.batch_size, observation.gpu.key)
    fields: dict[str, Any] = {}
    if observation.setting_before is not None:
        fields["settings_before"] = {**state.settings_before, observation.gpu.key: observation.setting_before}
    if job.host_power_w is None and observation.host_energy_j and observation.time_s:
        host = Part(1, observation.host_energy_j, observation.time_s)
        fields["host"] = state.host.times(KEPT) + host
    ended = observation.outcome not in (Outcome.FAILED, Outcome.OUT_OF_MEMORY)
    ended = ended and observation.foreign_limit_w is None
    if ended and observation.parts is not None and observation.parts.rest.count:
        known = state.overheads.get(key, NOTHING).add(observation.parts)
        fields["overheads"] = {**state.overheads, key: known}
    return fields


def _profiled(job: Job, state: State, new: PowerProfile) -> dict[str, Any]:
    """Return the fields that a profile changes. A partial one is added to what is there; a complete one replaces.

    One of a single setting comes from an attempt that might not tune: what is known of others stays. One of another
    micro-batch changes places with what is on the shelf.
    """
    key = (new.batch_size, new.gpu.key)
    old = state.profiles.get(key)
    fields: dict[str, Any] = {}
    if old is not None and old.micro != new.micro:
        shelf = {**state.shelf, (old.batch_size, old.micro, old.gpu.key): old}
        old = shelf.pop((new.batch_size, new.micro, new.gpu.key), None)
        costs = {b: cost for b, cost in state.sample_costs.get(new.gpu.key, _NOTHING).items() if b != new.batch_size}
        fields = {"shelf": shelf, "sample_costs": {**state.sample_costs, new.gpu.key: costs}}
    if old is not None and old.complete and new.complete and len(new.measurements) == 1:
        settings = {m.setting: m for m in (*old.measurements, *new.measurements)}
        new = replace(old, measurements=tuple(settings[w] for w in sorted(settings, reverse=True)))
    elif old is not None and not new.complete:
        if old.complete and not fields:
            return {}
        settings = {m.setting: m for m in (*old.measurements, *new.measurements)}
        new = old if old.complete else replace(new, measurements=tuple(settings[w] for w in sorted(settings)))
    fields["profiles"] = {**state.profiles, key: new}
    if new.complete and (cost := _positive(cost_per_sample(job, new, best_setting(job, new)))) is not None:
        before = fields.get("sample_costs", state.sample_costs)
        fields["sample_costs"] = {
            **before,
            new.gpu.key: {**before.get(new.gpu.key, _NOTHING), new.batch_size: cost},
        }
    return fields


def sample_costs(job: Job, profiles: Mapping[Key, PowerProfile]) -> dict[str, dict[int, float]]:
    """Return, for each GPU, the cost of one sample at each arm's best setting, from complete profiles."""
    costs: dict[str, dict[int, float]] = {}
    for (batch_size, gpu_key), p in profiles.items():
        if p.complete and (cost := _positive(cost_per_sample(job, p, best_setting(job, p)))) is not None:
            costs.setdefault(gpu_key, {})[batch_size] = cost
    return costs


def lesson(job: Job, sample_costs: Mapping[str, Mapping[int, float]], observation: Observation) -> Lesson | None:
    """Return what a believable observation teaches about its arm, or None where it must not teach.

    A failure is nobody's fault; an unmeasured run and one that ran out of memory say nothing about cost; an arm
    that left the job's list is of no interest. An attempt that diverged never would have reached the target. One
    during which somebody else set the power limit teaches its epochs: they do not depend on it, and cost what the
    profile says.

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
    per_sample = sample_costs.get(gpu.key, _NOTHING).get(batch_size)
    cost_j, epoch_cost_j, beside_j = observed_cost(job, observation), None, 0.0
    if observation.foreign_limit_w is not None:
        if per_sample is None:
            return None
        cost_j = observation.epochs * per_sample * observation.samples_per_epoch
    if profiled and per_sample is not None:
        epoch_cost_j = per_sample * observation.samples_per_epoch
        if observation.parts is not None and observation.profile is not None and observation.profile.measurements:
            beside_j, epoch_cost_j = _beside_cost(job, observation, observation.profile)
    return Lesson(
        recurrence=observation.recurrence,
        batch_size=batch_size,
        epochs=job.max_epochs if outcome is Outcome.DIVERGED else observation.epochs,
        converged=converged,
        cost_j=cost_j,
        beside_j=beside_j,
        epoch_cost_j=epoch_cost_j,
        profiled=profiled,
        refused=observation.epochs_allowed == 0 and not converged,
        setting=observation.setting,
        curve=observation.curve,
    )


def _beside_cost(job: Job, observation: Observation, profile: PowerProfile) -> tuple[float, float]:
    """Return what an attempt cost beside its steps, and what the steps of an epoch cost by its profile."""
    assert observation.parts is not None
    beside, rates = observation.parts.together, price(job, observation.gpu.max_power_w)
    host_w = observation.host_energy_j / observation.time_s if observation.time_s else 0.0
    epoch = epoch_at(profile, best_setting(job, profile), samples_per_epoch=observation.samples_per_epoch)
    return (
        rates.of(beside.energy_j + host_w * beside.time_s, beside.time_s),
        rates.of(epoch.energy_j + host_w * epoch.time_s, epoch.time_s),
    )


def _rate_cost(job: Job, rate: Rate, max_power_w: float, host_w: float) -> float | None:
    rates = price(job, max_power_w)
    energy_j = rate.energy_j + host_w * rate.time_s
    cost = attempt_cost(energy_j=energy_j, time_s=rate.time_s, eta=rates.eta, max_power_w=rates.max_power_w)
    return _positive(cost / rate.samples)


def _positive(cost: float) -> float | None:
    return cost if 1 / MOST <= cost <= MOST else None
