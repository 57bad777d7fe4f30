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

from zeus_flows.core import savings
from zeus_flows.core.bandit import Runs
from zeus_flows.core.cost import price
from zeus_flows.core.early_stop import NoCut
from zeus_flows.core.json import from_plain
from zeus_flows.core.overheads import Overheads, doubt
from zeus_flows.core.policy import bounds as safety
from zeus_flows.core.policy.base import Choice, Costs, Policy, View
from zeus_flows.core.policy.baselines import Default, Power
from zeus_flows.core.policy.grid import Grid
from zeus_flows.core.policy.lookahead import Lookahead
from zeus_flows.core.policy.state import (
    ArmCost,
    Rate,
    Shortage,
    Spent,
    State,
    believable,
    changed,
    count,
    lesson,
    measured,
    sample_costs,
)
from zeus_flows.core.policy.thompson import Thompson
from zeus_flows.core.policy.zeus import Zeus
from zeus_flows.core.policy.zeus_paper import ZeusPaper
from zeus_flows.core.records import (
    Ask,
    Asked,
    Decision,
    Gap,
    Gpu,
    Job,
    Mode,
    Observation,
    Part,
    PowerProfile,
    Reason,
    decision_seed,
    jsonable,
)
from zeus_flows.errors import ConfigError

__all__ = [
    "POLICIES",
    "State",
    "advance",
    "decide",
    "fold",
    "from_json",
    "initial",
    "is_control",
    "is_whole",
    "pass_over",
    "saved",
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

CONTROL = "control"  # the kind of reason a control recurrence has

_TUNING = (Mode.FULL, Mode.POWER)  # modes that may set power limits


def initial(job: Job, *, account: bool = True) -> State:
    """Return the state before any observation.

    Args:
        job: What recurs.
        account: Keep what savings are told from.

    Raises:
        ConfigError: the job names a policy that does not exist.
    """
    return State(
        belief=_policy(job).initial(job), settings=_settings(job), account=savings.Account() if account else None
    )


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
    after = changed(state, changes)
    return after if after.account is None else _accounted(job, state, after, observation)


def saved(job: Job, state: State) -> savings.Savings:
    """Return what was saved against the default, as far as it may be said."""
    account = state.account or savings.Account()
    return savings.savings(job, account, profiles=state.profiles, overheads=state.all_overheads(job))


def _accounted(job: Job, before: State, after: State, observation: Observation) -> State:
    """Return the state with an observation in its account; a reset begins a new era with the runs that it kept."""
    assert after.account is not None
    resets, kept = (getattr(state.belief, "resets", 0) for state in (before, after)), 0
    if len(set(resets)) > 1:
        kept = min(int(sum(after.belief.runs)), 2)
    account = savings.advance(
        job,
        after.account,
        observation,
        profiles=after.profiles,
        overheads=after.all_overheads(job),
        boundary=kept,
    )
    return replace(after, account=account)


def fold(job: Job, observations: Iterable[Observation], gaps: Iterable[Gap] = (), *, account: bool = True) -> State:
    """Return the state after all observations and gaps, whatever order they are given in."""
    state = initial(job, account=account)
    events: list[tuple[tuple[int, int], Observation | Gap]] = [(o.order, o) for o in observations]
    events += [((gap.recurrence, 0), gap) for gap in gaps]
    for _, event in sorted(events, key=lambda item: item[0]):
        state = pass_over(job, state, event) if isinstance(event, Gap) else advance(job, state, event)
    return state


def pass_over(job: Job, state: State, gap: Gap) -> State:
    """Return the state after a recurrence without an observation; it must come after those already folded."""
    if state.account is None:
        return state
    if gap.skipped:
        return replace(state, account=savings.skip(state.account, time_s=gap.time_s, energy_j=gap.energy_j))
    return replace(state, account=savings.killed(state.account))


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
        control=choice.reason.kind == CONTROL,
        mode=job.mode,
        asked=Asked(
            gpu=ask.gpu,
            samples_per_epoch=ask.samples_per_epoch,
            in_flight=ask.in_flight,
            tried=ask.tried,
            out_of_memory=ask.out_of_memory,
            power_limits_w=ask.power_limits_w,
            folded=state.observations,
            newest=state.order,
            under_way=ask.under_way,
        ),
    )


def is_control(job: Job, recurrence: int) -> bool:
    """Return whether a recurrence runs the default to be compared with: one in every `job.control`, drawn by the seed.

    >>> job = Job("t", (8, 16), 8, 1, control=4)
    >>> [sum(is_control(job, r) for r in range(first, first + 4)) for first in (1, 5, 9, 13)]
    [1, 1, 1, 1]
    """
    if job.control is None or job.mode not in _TUNING:
        return False
    block, position = divmod(recurrence - 1, job.control)
    return decision_seed(job.seed, -1 - block, 0) % job.control == position


def to_json(state: State) -> dict[str, Any]:
    """Return the state as plain JSON values; its size does not grow with the history unless a window does."""
    return {
        "version": SNAPSHOT_VERSION,
        "settings": state.settings,
        "observations": state.observations,
        "order": list(state.order),
        "newest_model": jsonable(state.newest_model),
        "profiles": [jsonable(p) for p in state.profiles.values()],
        "shortages": jsonable(state.shortages),
        "spent": jsonable(state.spent),
        "current": list(state.current),
        "gpu": jsonable(state.gpu),
        "samples_per_epoch": state.samples_per_epoch,
        "rates": [[b, key, jsonable(rate)] for (b, key), rate in state.rates.items()],
        "max_power_w": dict(state.max_power_w),
        "default_epochs": jsonable(state.default_epochs),
        "overheads": [[b, key, jsonable(known)] for (b, key), known in state.overheads.items()],
        "host": jsonable(state.host),
        "limits_before_w": dict(state.limits_before_w),
        "account": jsonable(state.account),
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
        shortages=_shortages(data),
        spent={k: from_plain(Spent, v) for k, v in data["spent"].items()},
        current=from_plain(tuple[int, float, float], data["current"]),
        gpu=None if data["gpu"] is None else from_plain(Gpu, data["gpu"]),
        samples_per_epoch=data["samples_per_epoch"],
        rates={(int(b), str(key)): from_plain(Rate, rate) for b, key, rate in data["rates"]},
        max_power_w={k: float(v) for k, v in data["max_power_w"].items()},
        sample_costs=sample_costs(job, profiles),
        default_epochs=from_plain(Runs, data["default_epochs"]),
        overheads={(int(b), str(key)): from_plain(Overheads, known) for b, key, known in data.get("overheads", ())},
        host=from_plain(Part, data.get("host", {})),
        limits_before_w={k: float(v) for k, v in data.get("limits_before_w", {}).items()},
        account=from_plain(savings.Account, data.get("account") or {}),
    )


def _shortages(data: Mapping[str, Any]) -> dict[str, tuple[Shortage, ...]]:
    if "shortages" in data:
        return {k: from_plain(tuple[Shortage, ...], v) for k, v in data["shortages"].items()}
    return {k: tuple(Shortage(int(b), 1, 0, ran=False) for b in v) for k, v in data["infeasible"].items()}


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
        *((job.host_power_w,) if job.host_power_w != 0.0 else ()),  # nothing where it is as it always was
        *(("seconds",) if job.in_seconds else ()),
    )
    return hashlib.sha256(json.dumps(jsonable(parts)).encode()).hexdigest()[:16]


def _choose(job: Job, state: State, ask: Ask) -> Choice:
    arms = _feasible(job, state, ask)
    default = job.default_batch_size
    if default not in arms:
        default = min(arms, key=lambda b: (abs(math.log2(b / job.default_batch_size)), b))
    if is_control(job, ask.recurrence) and ask.attempt == 1 and default == job.default_batch_size:
        text = f"one recurrence in {job.control} is a control: the default batch size {default}, at the limit there is"
        return Choice(default, Reason(CONTROL, text), tune_power=False)
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
    """Return the arms below the smallest one that does not fit this GPU; the smallest arm at least."""
    gpu = ask.gpu or state.gpu
    too_large = state.too_large(gpu.key, ask.recurrence) if gpu is not None else None
    bounds = [b for b in (too_large, *ask.out_of_memory) if b is not None]
    if not bounds:
        return job.batch_sizes
    return tuple(b for b in job.batch_sizes if b < min(bounds)) or job.batch_sizes[:1]


def _view(job: Job, state: State, ask: Ask, arms: tuple[int, ...], default: int, *, may_explore: bool) -> View:
    return View(
        ask=ask,
        arms=arms,
        default=default,
        may_explore=may_explore,
        look_up_costs=lambda: _costs(job, state, ask),
    )


def _costs(job: Job, state: State, ask: Ask) -> Costs:
    """Return what a run of every arm costs: as measured on this GPU, and translated from other GPUs' measures.

    A translation keeps the ratios between arms, and scales them by what arms measured on both GPUs say. The job may
    forbid it: a GPU whose costs go another way is a poor donor.
    """
    gpu = ask.gpu or state.gpu
    if gpu is None:
        return Costs()
    samples = ask.samples_per_epoch or state.samples_per_epoch or 1
    ours = state.arm_costs(job, gpu.key, samples)
    training = {b: cost.training for b, cost in ours.items()}
    translated: dict[int, float] = {}
    others = [key for key in state.max_power_w if key != gpu.key]
    ratio = 1.0
    if job.translate and others and len(ours) < len(job.batch_sizes):
        for key in others:
            theirs = state.arm_costs(job, key, samples)
            both = [math.log(training[b] / theirs[b].training) for b in training if b in theirs]
            ratio = math.exp(math.fsum(both) / len(both)) if both else 1.0
            translated |= {b: c.training * ratio for b, c in theirs.items() if b not in ours}
    if not state.overheads and not state.host_w(job):
        return Costs(training, translated)
    return _with_overheads(job, state, gpu, Costs(training, translated), ours, ratio)


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
        each, start = known.per_epoch(state.limits_before_w.get(gpu.key, gpu.max_power_w)), known.once_each
        scale = ratio if elsewhere else 1.0
        if seen:
            beside[b] = math.fsum(cost.beside for cost in seen.values()) / len(seen)
        else:
            beside[b] = scale * rates.of(each.energy_j + known.host_w * each.time_s, each.time_s)
        once[b] = rates.of(start.energy_j + known.host_w * start.time_s, start.time_s)
        if beside[b]:
            doubts[b] = unsure
    return replace(costs, beside=beside, doubt=doubts, once=once)
