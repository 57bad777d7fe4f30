"""A job's own history, simulated anew: what another policy, eta or mode would have cost.

Runs are drawn from those that were recorded, so only what has been run can be told of. Recurrences follow one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from zeus_flows.core import policy
from zeus_flows.core.cost import price
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.cluster.groups import seed_of
from zeus_flows.experiments.cluster.simulating import Submission, simulate
from zeus_flows.experiments.replay.traces import Trace

_APART_S = 1e12  # between two submissions: longer than any run
_ENDED = (Outcome.CONVERGED, Outcome.EXHAUSTED, Outcome.DIVERGED)


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean over simulations, and their 5th and 95th percentile."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """What all recurrences take: as it happened, or as it is simulated.

    Attributes:
        name: What is different.
        cost_j: By the job's own objective, whatever this row minimises; seconds where joules mean nothing.
        missed: Recurrences that did not reach the target, in the mean.
    """

    name: str
    energy_j: Spread
    time_s: Spread
    cost_j: Spread
    missed: float


@dataclass(frozen=True, slots=True)
class OwnHistory:
    """A job's history as something that can be simulated.

    Attributes:
        job: As it is, without what a simulation has no use for.
        trace: Its runs.
        submissions: One for each recurrence; its ratio is its data set's size over the newest one's.
        happened: What they took.
        assumed: What is assumed, as sentences.
    """

    job: Job
    trace: Trace
    submissions: tuple[Submission, ...]
    happened: WhatIfRow
    assumed: tuple[str, ...]


def own_history(job: Job, observations: Iterable[Observation]) -> OwnHistory:
    """Return a job's history as something that can be simulated.

    Raises:
        ConfigError: nothing has run to its end with the default batch size, or its power was never profiled.
    """
    job = replace(job, host_power_w=0.0, ready_by=None, fingerprint="")
    history = [o for o in observations if o.outcome not in (Outcome.FAILED, Outcome.OUT_OF_MEMORY)]
    if not history:
        raise ConfigError(f"{job.name} has no runs to simulate from; let it recur first: zeus-flows run JOB")
    gpu = history[-1].gpu
    state = policy.fold(job, history, account=False)
    profiles = {b: p for (b, key), p in state.profiles.items() if key == gpu.key and p.complete}
    ran = {b: [o for o in history if o.batch_size == b] for b in sorted({o.batch_size for o in history})}
    known = [b for b in job.batch_sizes if b in ran and b in profiles]
    if job.default_batch_size not in known:
        raise ConfigError(
            f"{job.name}: the default batch size {job.default_batch_size} has no run with a complete power profile on "
            f"{gpu.key}, so there is nothing to compare with; let it recur in mode power first"
        )
    ended = {b: [o for o in ran[b] if o.outcome in _ENDED] for b in known}
    trace = Trace(
        workload=job.name,
        gpu=gpu,
        epochs={b: tuple(o.epochs if o.converged else None for o in ended[b]) or (None,) for b in known},
        profiles={b: profiles[b] for b in known},
        default_batch_size=job.default_batch_size,
        max_epochs=job.max_epochs,
        samples_per_epoch=history[-1].samples_per_epoch,
        overheads={b: state.overheads[b, gpu.key] for b in known if (b, gpu.key) in state.overheads},
        curves={b: tuple(o.curve for o in ended[b]) or ((),) for b in known},
    )
    last = {o.recurrence: o for o in history}
    submissions = [
        Submission(_APART_S * i, o.samples_per_epoch / trace.samples_per_epoch) for i, o in enumerate(last.values())
    ]
    return OwnHistory(
        replace(job, batch_sizes=tuple(known)), trace, tuple(submissions), _happened(job, history), _assumed(job, ended)
    )


def _happened(job: Job, history: Sequence[Observation]) -> WhatIfRow:
    energy_j, time_s = sum(o.energy_j for o in history), sum(o.time_s for o in history)
    cost_j = sum(price(job, o.gpu.max_power_w).of(o.energy_j, o.time_s) for o in history)
    last = {o.recurrence: o.converged for o in history}
    energy, time, cost = (Spread(total, total, total) for total in (energy_j, time_s, cost_j))
    return WhatIfRow("what happened", energy, time, cost, sum(not reached for reached in last.values()))


def _assumed(job: Job, ended: Mapping[int, Sequence[Observation]]) -> tuple[str, ...]:
    """Return what a simulation of this history takes for granted."""
    lines = [
        "recurrences follow one another, each run is drawn from those recorded at its batch size, and what failed or "
        "did not fit the GPU is left out on both sides"
    ]
    groups = {
        "never run with a complete power profile: left out, as nothing is known": [
            b for b in job.batch_sizes if b not in ended
        ],
        "only ever stopped: taken never to reach the target": [b for b, runs in ended.items() if not runs],
        "run to the end once: every run takes as many epochs as that one": [
            b for b, runs in ended.items() if len(runs) == 1
        ],
    }
    lines += [f"batch sizes {', '.join(map(str, them))} were {what}" for what, them in groups.items() if them]
    return tuple(lines)


def variants(job: Job, *, policies: Sequence[str], etas: Sequence[float], modes: Sequence[Mode]) -> dict[str, Job]:
    """Return the job as it is, its default, and every combination of what is asked for, by name."""
    found = {"as it is": job, "default": replace(job, policy="default", mode=Mode.FULL, rollout=None)}
    for name, eta, mode in product(policies or (job.policy,), etas or (job.eta,), modes or (job.mode,)):
        words = [name] if policies else []
        words += [f"eta {eta:g}"] if etas else []
        words += [f"mode {mode}"] if modes else []
        other = replace(job, policy=name, eta=eta, mode=mode, rollout=None if modes else job.rollout)
        if words:
            found[", ".join(words)] = other
    return found


def what_if(history: OwnHistory, jobs: Mapping[str, Job], *, seeds: int) -> list[WhatIfRow]:
    """Simulate a history under other jobs; return what happened, then a row for each of them.

    Args:
        history: The job's own.
        jobs: What might have been, by name; see `variants`.
        seeds: Simulations of each.
    """
    rows = [history.happened]
    own = price(history.job, history.trace.gpu.max_power_w)
    for name, job in jobs.items():
        sums = [
            simulate(history.trace, job, history.submissions, seed=seed_of(seed, job.name)) for seed in range(seeds)
        ]
        energy, time = [s.energy_j for s in sums], [s.time_s for s in sums]
        cost = [own.of(e, t) for e, t in zip(energy, time, strict=True)]
        missed = sum(s.missed for s in sums) / seeds
        rows.append(WhatIfRow(name, _spread(energy), _spread(time), _spread(cost), missed))
    return rows


def _spread(values: Sequence[float]) -> Spread:
    low, high = np.percentile(values, [5, 95])
    return Spread(float(np.mean(values)), float(low), float(high))
