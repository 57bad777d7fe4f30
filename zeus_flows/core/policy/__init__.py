"""The front door of all policies: history in, decision out.

    state = fold(job, observations)
    decision = decide(job, state, ask)

A state is the fold of `advance` over observations in the order (recurrence, attempt); it can be kept and advanced
one observation at a time. What no policy should have to know about is handled here once: observations that must
not teach, modes, batch sizes that do not fit the GPU, explorations in flight, other GPUs, budget and deadline.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from zeus_flows.core.bandit import Runs
from zeus_flows.core.codec import from_plain
from zeus_flows.core.early_stop import NoCut
from zeus_flows.core.policy import safety
from zeus_flows.core.policy.base import Choice, Policy, View
from zeus_flows.core.policy.baselines import Default, Power
from zeus_flows.core.policy.grid import Grid
from zeus_flows.core.policy.lookahead import Lookahead
from zeus_flows.core.policy.state import Rate, Spent, State, believable, changed, count, lesson, measured, sample_costs
from zeus_flows.core.policy.thompson import Thompson
from zeus_flows.core.policy.zeus import Zeus
from zeus_flows.core.policy.zeus_paper import ZeusPaper
from zeus_flows.core.records import Ask, Decision, Gap, Gpu, Job, Mode, Observation, PowerProfile, Reason, jsonable
from zeus_flows.errors import ConfigError

__all__ = [
    "POLICIES",
    "State",
    "advance",
    "decide",
    "fold",
    "from_json",
    "initial",
    "is_whole",
    "pass_over",
    "to_json",
]

POLICIES: Mapping[str, Policy[Any]] = MappingProxyType(
    {
        "thompson": Thompson(),
        "lookahead": Lookahead(),
        "zeus": Zeus(),
        "zeus-paper": ZeusPaper(),
        "power": Power(),
        "default": Default(),
        "grid": Grid(),
    }
)

SNAPSHOT_VERSION = 3
_READABLE = (2, 3)  # snapshots that can be decided on; older ones lack sums that the runs still have

_TUNING = (Mode.FULL, Mode.POWER)  # modes that may set power limits


def initial(job: Job) -> State:
    """Return the state before any observation.

    Raises:
        ConfigError: the job names a policy that does not exist.
    """
    return State(belief=_policy(job).initial(job), settings=_settings(job))


def advance(job: Job, state: State, observation: Observation) -> State:
    """Return the state after one more observation, which must come after those already folded.

    Its energy source and fingerprint are the caller's to check: it is taken to belong to this job's history.
    """
    changes = count(state, observation)
    if believable(observation):
        changes |= measured(job, state, observation)
        learnt = lesson(job, changes.get("sample_costs", state.sample_costs), observation)
        if learnt is not None:
            changes["belief"] = _policy(job).learn(job, state.belief, learnt)
    return changed(state, changes)


def fold(job: Job, observations: Iterable[Observation], gaps: Iterable[Gap] = ()) -> State:
    """Return the state after all observations and gaps, whatever order they are given in."""
    state = initial(job)
    events: list[tuple[tuple[int, int], Observation | Gap]] = [(o.order, o) for o in observations]
    events += [((gap.recurrence, 0), gap) for gap in gaps]
    for _, event in sorted(events, key=lambda item: item[0]):
        state = pass_over(job, state, event) if isinstance(event, Gap) else advance(job, state, event)
    return state


def pass_over(job: Job, state: State, gap: Gap) -> State:
    """Return the state after a recurrence without an observation; it must come after those already folded."""
    return state


def decide(job: Job, state: State, ask: Ask) -> Decision:
    """Return what to run next and why. The same history and ask give the same decision in any process."""
    choice = _choose(job, state, ask)
    return Decision(
        recurrence=ask.recurrence,
        attempt=ask.attempt,
        batch_size=choice.batch_size,
        reason=choice.reason,
        seed=ask.seed,
        policy=job.policy,
        cut=choice.cut,
        explores=choice.explores,
        tune_power=choice.tune_power and job.mode in _TUNING,
        power_limit_w=choice.power_limit_w,
    )


def to_json(state: State) -> dict[str, Any]:
    """Return the state as plain JSON values; its size does not grow with the history unless a window does."""
    return {
        "version": SNAPSHOT_VERSION,
        "settings": state.settings,
        "observations": state.observations,
        "order": list(state.order),
        "newest_model": jsonable(state.newest_model),
        "profiles": [jsonable(p) for p in state.profiles.values()],
        "infeasible": jsonable(state.infeasible),
        "spent": jsonable(state.spent),
        "current": list(state.current),
        "gpu": jsonable(state.gpu),
        "samples_per_epoch": state.samples_per_epoch,
        "rates": [[b, key, jsonable(rate)] for (b, key), rate in state.rates.items()],
        "max_power_w": dict(state.max_power_w),
        "default_epochs": jsonable(state.default_epochs),
        "belief": jsonable(state.belief),
    }


def from_json(job: Job, data: Mapping[str, Any]) -> State | None:
    """Return the state that `to_json` wrote, or None where it was written for other settings: then fold anew.

    One of an earlier version (see `is_whole`) does for a decision.
    """
    if data.get("version") not in _READABLE or data.get("settings") != _settings(job):
        return None
    read = [from_plain(PowerProfile, p) for p in data["profiles"]]
    profiles = {(p.batch_size, p.gpu.key): p for p in read}
    return State(
        settings=_settings(job),
        belief=from_plain(_policy(job).belief_type, data["belief"]),
        observations=int(data["observations"]),
        order=from_plain(tuple[int, int], data["order"]),
        newest_model=_newest(data["newest_model"]),
        profiles=profiles,
        infeasible={k: tuple(int(b) for b in v) for k, v in data["infeasible"].items()},
        spent={k: from_plain(Spent, v) for k, v in data["spent"].items()},
        current=from_plain(tuple[int, float, float], data["current"]),
        gpu=None if data["gpu"] is None else from_plain(Gpu, data["gpu"]),
        samples_per_epoch=data["samples_per_epoch"],
        rates={(int(b), str(key)): from_plain(Rate, rate) for b, key, rate in data["rates"]},
        max_power_w={k: float(v) for k, v in data["max_power_w"].items()},
        sample_costs=sample_costs(job, profiles),
        default_epochs=from_plain(Runs, data["default_epochs"]),
    )


def is_whole(data: Mapping[str, Any]) -> bool:
    """Return whether `to_json` of this version wrote it; otherwise sums are missing, and it should be folded anew."""
    return data.get("version") == SNAPSHOT_VERSION


def _newest(data: Any) -> tuple[int, int, int] | None:
    return None if data is None else from_plain(tuple[int, int, int], data)


def _policy(job: Job) -> Policy[Any]:
    try:
        return POLICIES[job.policy]
    except KeyError:
        raise ConfigError(f"there is no policy {job.policy!r}; there are {', '.join(POLICIES)}") from None


@lru_cache(maxsize=64)
def _settings(job: Job) -> str:
    """Return a hash of everything in the job that the fold depends on."""
    parts = (
        *(job.policy, job.batch_sizes, job.default_batch_size, job.max_epochs, job.fingerprint),
        *(job.objective_eta, job.selector, job.slowdown, job.beta, job.window, job.drift),
    )
    return hashlib.sha256(json.dumps(jsonable(parts)).encode()).hexdigest()[:16]


def _choose(job: Job, state: State, ask: Ask) -> Choice:
    arms = _feasible(job, state, ask)
    default = job.default_batch_size
    if default not in arms:
        default = min(arms, key=lambda b: (abs(math.log2(b / job.default_batch_size)), b))
    if job.mode is not Mode.FULL:
        text = f"the job's mode is {job.mode}: the batch size stays {default}"
        return Choice(default, Reason("mode", text))
    if len(arms) == 1:
        text = f"{default} is the only batch size that can run"
        choice = _policy(job).choose(job, state.belief, _view(job, state, ask, arms, default, may_explore=True))
        reason = Reason("only-arm", text, arms=choice.reason.arms)
        return replace(choice, batch_size=default, reason=reason, cut=NoCut(), explores=False)
    choice = _policy(job).choose(job, state.belief, _view(job, state, ask, arms, default, may_explore=True))
    if not choice.explores:
        return choice
    exploring = [f for f in ask.in_flight if f.explores and f.recurrence != ask.recurrence]
    bounded = job.policy != "zeus-paper" and (job.exploration_budget is not None or job.deadline_s is not None)
    if not exploring and not bounded:
        return choice
    safe = _policy(job).choose(job, state.belief, _view(job, state, ask, arms, default, may_explore=False))
    if exploring:
        other = exploring[0]
        text = (
            f"recurrence {other.recurrence} is trying batch size {other.batch_size}; meanwhile {safe.batch_size}, "
            f"the best known, runs"
        )
        return replace(safe, reason=replace(safe.reason, kind="in-flight", text=text), explores=False)
    return safety.bounded(job, state, ask, choice, safe)


def _feasible(job: Job, state: State, ask: Ask) -> tuple[int, ...]:
    """Return the arms below the smallest one that ran out of memory on this GPU; the smallest arm at least."""
    gpu = ask.gpu or state.gpu
    too_large = state.infeasible.get(gpu.key, ()) if gpu is not None else ()
    if not too_large:
        return job.batch_sizes
    return tuple(b for b in job.batch_sizes if b < too_large[0]) or job.batch_sizes[:1]


def _view(job: Job, state: State, ask: Ask, arms: tuple[int, ...], default: int, *, may_explore: bool) -> View:
    return View(
        ask=ask,
        arms=arms,
        default=default,
        may_explore=may_explore,
        look_up_costs=lambda: _epoch_costs(job, state, ask),
    )


def _epoch_costs(job: Job, state: State, ask: Ask) -> tuple[dict[int, float], dict[int, float]]:
    """Return EpochCost of every arm, in joules: as measured on this GPU, and translated from other GPUs' measures.

    A translation keeps the ratios between arms, and scales them by what arms measured on both GPUs say. The job may
    forbid it: a GPU whose costs go another way is a poor donor.
    """
    gpu = ask.gpu or state.gpu
    if gpu is None:
        return {}, {}
    samples = ask.samples_per_epoch or state.samples_per_epoch or 1
    ours = state.arm_costs(job, gpu.key)
    translated: dict[int, float] = {}
    others = [key for key in state.max_power_w if key != gpu.key]
    if job.translate and others and len(ours) < len(job.batch_sizes):
        for key in others:
            theirs = state.arm_costs(job, key)
            both = [math.log(ours[b] / theirs[b]) for b in ours if b in theirs]
            ratio = math.exp(math.fsum(both) / len(both)) if both else 1.0
            translated |= {b: c * ratio * samples for b, c in theirs.items() if b not in ours}
    return {b: c * samples for b, c in ours.items()}, translated
