"""The front door of all policies: history in, decision out.

    state = fold(job, observations)
    decision = decide(job, state, ask)

A state is the fold of `advance` over observations in the order (recurrence, attempt); it can be kept and advanced
one observation at a time. What no policy should have to know about is handled here once: observations that must
not teach, modes, batch sizes that do not fit the GPU, explorations in flight, other GPUs, budget and deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from zeus_flows.core import savings
from zeus_flows.core.early_stop import NoCut
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.micro_batch import least, micro_batch
from zeus_flows.core.policy import bounds
from zeus_flows.core.policy.base import Choice, View
from zeus_flows.core.policy.costs import arm_costs
from zeus_flows.core.policy.punctual import in_time
from zeus_flows.core.policy.registry import policy_of, settings_of
from zeus_flows.core.policy.state import State, believable, count, lesson, measured
from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.records import Ask, Asked, Decision, Gap, Observation, decision_seed
from zeus_flows.core.rollout import in_force, why_in_force

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
        belief=policy_of(job).initial(job), settings=settings_of(job), account=savings.Account() if account else None
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
            changes["belief"] = policy_of(job).learn(job, state.belief, learnt)
    after = replace(state, **changes)
    return after if after.account is None else _accounted(job, state, after, observation)


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


def saved(job: Job, state: State) -> savings.Savings:
    """Return what was saved against the default, as far as it may be said."""
    account = state.account or savings.Account()
    return savings.savings(job, account, profiles=state.profiles, overheads=state.all_overheads(job))


def decide(job: Job, state: State, ask: Ask) -> Decision:
    """Return what to run next and why. The same history and ask give the same decision in any process."""
    job = in_force(job, ask.recurrence)
    first = _as_first_asked(job, ask)
    arms = _feasible(job, state, first)
    choice = in_time(job, state, first, arms, _choose(job, state, first, arms))
    micro = _micro(job, state, ask, choice.batch_size)
    return Decision(
        recurrence=ask.recurrence,
        attempt=ask.attempt,
        batch_size=choice.batch_size,
        reason=choice.reason if micro is None else _in_parts(choice, micro, again=first is not ask),
        seed=first.seed,
        policy=job.policy,
        cut=choice.cut,
        explores=choice.explores,
        tune_power=choice.tune_power and job.mode in _TUNING,
        setting=choice.setting,
        control=choice.control,
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
            ran_out=ask.ran_out,
            mode_why=job.mode_why,
            seconds_left=ask.seconds_left,
        ),
        micro_batch_size=micro,
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


def _choose(job: Job, state: State, ask: Ask, arms: tuple[int, ...]) -> Choice:
    default = job.default_batch_size
    if default not in arms:
        default = min(arms, key=lambda b: (abs(math.log2(b / job.default_batch_size)), b))
    if is_control(job, ask.recurrence) and ask.attempt == 1 and default == job.default_batch_size:
        text = f"one recurrence in {job.control} is a control: the default batch size {default}, at the limit there is"
        return Choice(default, Reason(ReasonKind.CONTROL, text), tune_power=False, control=True)
    if job.mode is not Mode.FULL:
        fits = "" if default == job.default_batch_size else f", as {job.default_batch_size} does not fit"
        text = f"the mode is {job.mode}, {why_in_force(job)}: the batch size stays {default}{fits}"
        return Choice(default, Reason(ReasonKind.MODE, text))
    if len(arms) == 1:
        text = f"{default} is the only batch size that can run"
        choice = policy_of(job).choose(job, state.belief, _view(job, state, ask, arms, default, may_explore=True))
        reason = Reason(ReasonKind.ONLY_ARM, text, arms=choice.reason.arms)
        return replace(choice, batch_size=default, reason=reason, cut=NoCut(), explores=False)
    choice = policy_of(job).choose(job, state.belief, _view(job, state, ask, arms, default, may_explore=True))
    if not choice.explores:
        return choice
    exploring = [f for f in ask.in_flight if choice.alone and f.explores and f.recurrence != ask.recurrence]
    if not exploring and not bounds.apply(job, ask):
        return choice
    safe = policy_of(job).choose(job, state.belief, _view(job, state, ask, arms, default, may_explore=False))
    if exploring:
        other = exploring[0]
        text = (
            f"recurrence {other.recurrence} is trying batch size {other.batch_size}; meanwhile {safe.batch_size}, "
            f"the best known, runs"
        )
        return replace(safe, reason=replace(safe.reason, kind=ReasonKind.IN_FLIGHT, text=text), explores=False)
    return bounds.bounded(job, state, ask, choice, safe)


def _as_first_asked(job: Job, ask: Ask) -> Ask:
    """Return what was asked before memory ran out: where a batch may be taken in parts, that is no reason for another.

    The arm stays, with its cut, unless what is believed has changed meanwhile.
    """
    if not job.accumulate or not ask.ran_out:
        return ask
    attempt = ask.attempt - ask.ran_out
    seed = decision_seed(job.seed, ask.recurrence, attempt)
    return replace(ask, attempt=attempt, tried=ask.tried[: attempt - 1], seed=seed)


def _micro(job: Job, state: State, ask: Ask, batch_size: int) -> int | None:
    """Return how many samples of a batch go through the GPUs at once; None: all of them."""
    gpu = ask.gpu or state.gpu
    if not job.accumulate or gpu is None:
        return None
    fitting = micro_batch(batch_size, too_large=_too_large(state, ask), gpus=gpu.count)
    fitting = least(batch_size, gpu.count) if fitting is None else fitting  # something has to run
    return None if fitting == batch_size else fitting


def _in_parts(choice: Choice, micro: int, *, again: bool) -> Reason:
    """Return the reason for a choice that is trained in micro-batches."""
    reason = choice.reason
    parts = f"in {choice.batch_size // micro} micro-batches of {micro}, as more at once does not fit the GPU"
    text = f"batch size {choice.batch_size} again, {parts}: {reason.text}" if again else f"{reason.text}; {parts}"
    return replace(reason, kind=ReasonKind.ACCUMULATE if again else reason.kind, text=text)


def _too_large(state: State, ask: Ask) -> int | None:
    """Return the fewest samples that do not fit this GPU at once; None where all fit."""
    gpu = ask.gpu or state.gpu
    known = state.too_large(gpu, ask.recurrence) if gpu is not None else None
    return min((b for b in (known, *ask.out_of_memory) if b is not None), default=None)


def _feasible(job: Job, state: State, ask: Ask) -> tuple[int, ...]:
    """Return the arms that fit this GPU, in parts where the job allows that; the smallest arm at least."""
    too_large, gpu = _too_large(state, ask), ask.gpu or state.gpu
    if too_large is None:
        return job.batch_sizes
    gpus = 1 if gpu is None else gpu.count

    def fits(batch_size: int) -> bool:
        return micro_batch(batch_size, too_large=too_large, gpus=gpus, accumulate=job.accumulate) is not None

    return tuple(filter(fits, job.batch_sizes)) or job.batch_sizes[:1]


def _view(job: Job, state: State, ask: Ask, arms: tuple[int, ...], default: int, *, may_explore: bool) -> View:
    return View(
        ask=ask,
        arms=arms,
        default=default,
        may_explore=may_explore,
        look_up_costs=lambda: arm_costs(job, state, ask),
    )
