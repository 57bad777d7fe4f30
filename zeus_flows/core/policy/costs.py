"""What a run of every arm costs on the GPU that was asked for, as far as the state tells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from zeus_flows.core.cost import price
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import doubt
from zeus_flows.core.policy.base import Costs
from zeus_flows.core.policy.state import ArmCost, State
from zeus_flows.core.power_profile import Gpu
from zeus_flows.core.records import Ask


def arm_costs(job: Job, state: State, ask: Ask) -> Costs:
    """Return what a run of every arm costs: as measured on this GPU, and translated from other GPUs' measures.

    A translation keeps the ratios between arms, and scales them by what arms measured on both GPUs say. The job may
    forbid it: a GPU whose costs go another way is a poor donor. How far a translation may be off is for
    `core.epoch_costs` to say.
    """
    gpu = ask.gpu or state.gpu
    if gpu is None:
        return Costs()
    samples = ask.samples_per_epoch or state.samples_per_epoch or 1
    ours = state.arm_costs(job, gpu.key, samples)
    training = {b: cost.training for b, cost in ours.items()}
    others = [key for key in state.max_power_w if key != gpu.key]
    costs, ratio = Costs(training, new_gpu=bool(others) and not ours), 1.0
    if job.translate and others and len(ours) < len(job.batch_sizes):
        elsewhere = [{b: c.training for b, c in state.arm_costs(job, key, samples).items()} for key in others]
        translated: dict[int, float] = {}
        for theirs in elsewhere:
            both = [math.log(training[b] / theirs[b]) for b in training if b in theirs]
            ratio = math.exp(math.fsum(both) / len(both)) if both else 1.0
            translated |= {b: cost * ratio for b, cost in theirs.items() if b not in ours}
        costs = replace(costs, elsewhere=tuple(elsewhere), translated=translated)
    if not state.overheads and not state.host_w(job):
        return costs
    return _with_overheads(job, state, gpu, costs, ours, ratio)


def _with_overheads(job: Job, state: State, gpu: Gpu, costs: Costs, ours: Mapping[int, ArmCost], ratio: float) -> Costs:
    """Return costs with what lies beside the steps: as seen at each arm, else as at others, with its doubt."""
    seen = {b: ours[b] for b in ours if (b, gpu.key) in state.overheads}
    elsewhere = {} if seen else {key for _, key in state.overheads if key != gpu.key}
    rates = price(job, gpu.max_power_w)
    unsure = doubt(cost.beside for cost in seen.values())
    beside, doubts, once = {}, {}, {}
    for b in job.batch_sizes:
        if b in seen:
            beside[b], once[b] = seen[b].beside, seen[b].once
            continue
        known, _ = state.overheads_of(job, b, gpu.key)
        each, start = known.per_epoch(state.settings_before.get(gpu.key, math.inf)), known.once_each
        scale = ratio if elsewhere else 1.0
        if seen:
            beside[b] = math.fsum(cost.beside for cost in seen.values()) / len(seen)
        else:
            beside[b] = scale * rates.of(each.energy_j + known.host_w * each.time_s, each.time_s)
        once[b] = rates.of(start.energy_j + known.host_w * start.time_s, start.time_s)
        if beside[b]:
            doubts[b] = unsure
    return replace(costs, beside=beside, doubt=doubts, once=once)
