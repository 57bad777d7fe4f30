"""Why a decision was taken, long after: it is taken again, from what it was asked and what had been observed then.

A recorded decision is explained by taking it once more (`taken_again`). Where that gives the same, what it rests on can
be looked at; where it does not, `differences` names what is different, and nothing is passed off as its reason.
`what_would_change` finds changes after each of which another batch size would have been chosen: every one was tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Final

from zeus_flows.core import policy
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.early_stop import CostCut, Cut, NoCut
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.policy.state import State
from zeus_flows.core.power import best_setting
from zeus_flows.core.power_profile import Gpu
from zeus_flows.core.reasons import ArmBelief
from zeus_flows.core.records import Ask, Decision, EnergySource, InFlight, Observation, Outcome, decision_seed
from zeus_flows.core.text import cost_text

#: What two decisions are compared by: everything that training sees.
_CHOICE: Final = (
    *("batch_size", "micro_batch_size", "cut", "explores", "tune_power", "setting", "control", "mode"),
    *("policy", "degraded"),
)
#: Ways in which a history may have been folded that are tried; more than one only where recurrences overlapped.
_MOST_WAYS: Final = 64
#: Other draws that are tried.
DRAWS: Final = 40
#: Numbers of epochs of a run that never was that are tried, and batch sizes.
_EPOCHS, _RIVALS = 14, 3
_ROUNDING: Final = 1e-5  # stored numbers have six digits


@dataclass(frozen=True, slots=True)
class WouldChange:
    """Something after which another batch size would have been chosen, and which.

    Attributes:
        text: It as a sentence's beginning, such as `without a deadline`.
        batch_size: What would have been chosen.
        settings: What would be different in the job.
        ask: What would be different in what was asked.
        observed: What would have been observed besides, before the decision.
    """

    text: str
    batch_size: int
    settings: Mapping[str, object]
    ask: Mapping[str, object]
    observed: tuple[Observation, ...] = ()


@dataclass(frozen=True, slots=True)
class Explained:
    """A decision, and what came of taking it again.

    Attributes:
        decided: As it is recorded.
        again: As it comes out now; None where it cannot be taken again.
        differences: How that differs from what is recorded; empty where it is the same.
        why_not: Why it cannot be taken again; empty where it can.
        changes: What would have changed it.
        draws: What other draws would have chosen, by batch size: how many of `DRAWS`; empty where nothing was drawn.
    """

    decided: Decision
    again: Decision | None
    differences: tuple[str, ...] = ()
    why_not: str = ""
    changes: tuple[WouldChange, ...] = ()
    draws: Mapping[int, int] | None = None

    @property
    def same(self) -> bool:
        """Whether the decision came out as it is recorded."""
        return self.again is not None and not self.differences


def explain(job: Job, states: Iterable[State], decision: Decision, *, changes: bool = True) -> Explained:
    """Return a decision with what came of taking it again.

    Args:
        job: What recurs, as its file says now.
        states: What may have been folded when it was taken; the first after which the decision is the same counts,
            else the first.
        decision: The one to explain.
        changes: Whether to look for what would have changed it, which takes some hundred decisions.
    """
    if decision.asked is None:
        return Explained(decision, None, why_not="what it was asked is not recorded: an early version took it")
    if decision.degraded:
        return Explained(decision, None, why_not="MLflow was away, so the default stood in; nothing was weighed")
    asked, then = ask_of(decision), job_then(job, decision)
    found: tuple[State, Decision, tuple[str, ...]] | None = None
    for state in states:
        again = policy.decide(then, state, asked)
        unlike = differences(decision, again)
        if found is None or len(unlike) < len(found[2]):
            found = (state, again, unlike)
        if not unlike:
            break
    if found is None:
        return Explained(decision, None, why_not="what was observed before it is gone")
    state, again, unlike = found
    if unlike or not changes:
        return Explained(decision, again, unlike)
    told = tuple(what_would_change(then, state, asked, again))
    return Explained(decision, again, changes=told, draws=_draws(then, state, asked, again))


def ask_of(decision: Decision) -> Ask:
    """Return what a decision was asked."""
    asked = decision.asked
    assert asked is not None
    return Ask(
        recurrence=decision.recurrence,
        attempt=decision.attempt,
        seed=decision.seed,
        gpu=asked.gpu,
        samples_per_epoch=asked.samples_per_epoch,
        in_flight=asked.in_flight,
        tried=asked.tried,
        power_limits_w=asked.power_limits_w,
        out_of_memory=asked.out_of_memory,
        under_way=asked.under_way,
        ran_out=asked.ran_out,
        seconds_left=asked.seconds_left,
    )


def job_then(job: Job, decision: Decision) -> Job:
    """Return the job in the mode that was in force, whoever's word that was."""
    if decision.mode is None or decision.asked is None:
        return job
    return replace(job, mode=decision.mode, mode_why=decision.asked.mode_why, rollout=None)


def differences(decided: Decision, again: Decision) -> tuple[str, ...]:
    """Return how a decision that was taken again differs from the recorded one, as phrases; nothing where it does not.

    Numbers of the record have six digits, so they are the same within those.
    """
    unlike = []
    then, now = decided.asked, again.asked
    if then is not None and now is not None and (then.folded, then.newest) != (now.folded, now.newest):
        unlike.append(f"{then.folded} observations had been folded, and {now.folded} are there now")
    for name in _CHOICE:
        before, after = getattr(decided, name), getattr(again, name)
        if not _alike(before, after):
            unlike.append(f"its {name.replace('_', ' ')} is {_word(after)} now, and was {_word(before)}")
    if decided.reason.kind != again.reason.kind:
        unlike.append(f"the reason is {again.reason.kind} now, and was {decided.reason.kind}")
    return tuple(unlike)


def ways_folded(
    decision: Decision, observations: Sequence[Observation], *, before: int = 0
) -> Iterator[tuple[Observation, ...]]:
    """Yield what may have been folded when a decision was taken, likeliest first.

    All that lies up to the newest one that was, but for recurrences that were under way then: of those the attempts
    before the one in flight, or, where none was, so many that the number of all is right.

    Args:
        decision: Which.
        observations: Those that count, in order, up to the decision's own recurrence at least.
        before: How many were folded before the first of them.
    """
    asked = decision.asked
    assert asked is not None
    earlier = [o for o in observations if o.order <= asked.newest]
    flying = {f.recurrence: f.attempt for f in asked.in_flight}
    sure = [o for o in earlier if o.recurrence not in asked.under_way or o.attempt < flying.get(o.recurrence, 0)]
    doubtful: dict[int, list[Observation]] = {}
    for o in earlier:
        if o.recurrence in asked.under_way and o.recurrence not in flying:
            doubtful.setdefault(o.recurrence, []).append(o)
    sizes = (range(len(found), -1, -1) for found in doubtful.values())
    fitting = (some for some in islice(product(*sizes), 100_000) if before + len(sure) + sum(some) == asked.folded)
    ways = list(islice(fitting, _MOST_WAYS)) or [tuple(map(len, doubtful.values()))]
    for some in ways:
        taken = [o for found, many in zip(doubtful.values(), some, strict=True) for o in found[:many]]
        yield tuple(sorted((*sure, *taken), key=lambda o: o.order))


# -- what would change it --------------------------------------------------------------------------------------------


def what_would_change(job: Job, state: State, ask: Ask, decision: Decision) -> Iterator[WouldChange]:
    """Yield changes after each of which another batch size is chosen, those that people can make first."""
    for change in (*_settings(job, ask), *_asked(ask)):
        chosen = apply_change(job, state, ask, change).batch_size
        if chosen != decision.batch_size:
            yield replace(change, batch_size=chosen)
    if job.mode is Mode.FULL and not decision.control:
        yield from _observed(job, state, ask, decision)


def apply_change(job: Job, state: State, ask: Ask, change: WouldChange) -> Decision:
    """Return what is decided after a change."""
    job = replace(job, **change.settings)  # type: ignore[arg-type]
    for observation in change.observed:
        state = policy.advance(job, state, observation)
    return policy.decide(job, state, replace(ask, **change.ask))  # type: ignore[arg-type]


def _settings(job: Job, ask: Ask) -> Iterator[WouldChange]:
    """Yield settings of the job that may stand in a choice's way, taken away."""
    if job.mode is not Mode.FULL:
        yield WouldChange("in mode full", 0, {"mode": Mode.FULL, "mode_why": "", "rollout": None}, {})
    if job.control is not None:
        yield WouldChange("without control runs", 0, {"control": None}, {})
    if job.exploration_budget is not None:
        yield WouldChange("without an exploration budget", 0, {"exploration_budget": None}, {})
    if job.deadline_s is not None:
        yield WouldChange("without a deadline", 0, {"deadline_s": None}, {})
    if ask.seconds_left is not None:
        yield WouldChange(
            "with time enough until the model must be ready", 0, {"ready_by": None}, {"seconds_left": None}
        )


def _asked(ask: Ask) -> Iterator[WouldChange]:
    if ask.in_flight:
        others = ", ".join(str(flight.recurrence) for flight in ask.in_flight[:5])
        gone = tuple[InFlight, ...]()
        yield WouldChange(f"had recurrence {others} not been under way", 0, {}, {"in_flight": gone, "under_way": ()})


def _observed(job: Job, state: State, ask: Ask, decision: Decision) -> Iterator[WouldChange]:
    """Yield runs that, had they been observed before, would have led elsewhere: of its rivals, and of itself."""
    gpu = ask.gpu or state.gpu
    if gpu is None:
        return
    arms = {arm.batch_size: arm for arm in decision.reason.arms}
    known = sorted((a for a in arms.values() if a.expected_cost_j), key=lambda a: a.expected_cost_j or math.inf)
    rivals = [a.batch_size for a in known if a.batch_size != decision.batch_size][:_RIVALS]
    for batch_size in (*rivals, decision.batch_size):
        for epochs in _epochs(job, state, ask, gpu, arms[batch_size]) if batch_size in arms else ():
            observation = imagined(job, state, ask, gpu, batch_size, epochs)
            if observation is None:
                break
            change = WouldChange("", 0, {}, {}, (observation,))
            chosen = apply_change(job, state, ask, change).batch_size
            if chosen != decision.batch_size:
                cost = cost_text(job, observed_cost(job, observation))
                text = f"after one more run of {batch_size}, in {epochs} epoch{'' if epochs == 1 else 's'} ({cost})"
                yield replace(change, text=text, batch_size=chosen)
                break


def _epochs(job: Job, state: State, ask: Ask, gpu: Gpu, arm: ArmBelief) -> list[int]:
    """Return numbers of epochs to imagine a run of, those that would surprise least first."""
    one = imagined(job, state, ask, gpu, arm.batch_size, 1)
    if one is None:
        return []
    expected = max((arm.expected_cost_j or 0.0) / (observed_cost(job, one) or math.inf), 1.0)
    most = max(job.max_epochs, 1)
    spaced = {round(most ** (i / (_EPOCHS - 1))) for i in range(_EPOCHS)}
    return sorted(spaced, key=lambda epochs: abs(math.log(epochs / expected)))


def imagined(job: Job, state: State, ask: Ask, gpu: Gpu, batch_size: int, epochs: int) -> Observation | None:
    """Return the observation of a run that never was; None where the batch size has no profile to tell its cost from.

    It is placed right before the decision, and takes what the profile says of its steps.
    """
    profile = state.profile(batch_size, gpu)
    samples = ask.samples_per_epoch or state.samples_per_epoch
    if profile is None or not profile.complete or not samples:
        return None
    at = best_setting(job, profile)
    time_s = epochs * samples / at.samples_per_s
    source = state.account.energy_source if state.account is not None else EnergySource.MEASURED
    return Observation(
        recurrence=state.order[0],
        attempt=state.order[1] + 1,
        batch_size=batch_size,
        outcome=Outcome.CONVERGED,
        epochs=epochs,
        energy_j=time_s * at.average_power_w,
        time_s=time_s,
        gpu=gpu,
        energy_source=source,
        samples_per_epoch=samples,
        setting=at.setting,
        fingerprint=job.fingerprint,
        mode=job.mode,
    )


def _draws(job: Job, state: State, ask: Ask, decision: Decision) -> Mapping[int, int]:
    """Return what other seeds choose, the most frequent first; nothing where the draw does not matter."""
    if job.mode is not Mode.FULL or decision.control:
        return {}
    chosen: dict[int, int] = {}
    for k in range(DRAWS):
        seed = decision_seed(job.seed, -ask.recurrence, k)
        batch_size = policy.decide(job, state, replace(ask, seed=seed)).batch_size
        chosen[batch_size] = chosen.get(batch_size, 0) + 1
    ordered = dict(sorted(chosen.items(), key=lambda item: (-item[1], item[0])))
    return {} if len(ordered) == 1 and decision.batch_size in ordered else ordered


# -- comparing -------------------------------------------------------------------------------------------------------


def _alike(before: object, after: object) -> bool:
    if isinstance(before, float) and isinstance(after, float):
        return before == after or math.isclose(before, after, rel_tol=_ROUNDING)
    if isinstance(before, NoCut | CostCut) or hasattr(before, "__dataclass_fields__"):
        if type(before) is not type(after):
            return False
        return all(_alike(getattr(before, n), getattr(after, n)) for n in before.__dataclass_fields__)
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_alike, before, after))
    return before == after


def _word(value: object) -> str:
    if isinstance(value, CostCut):
        return f"at {value.threshold_j:.4g}"
    return getattr(value, "tag", None) or ("none" if value is None else str(value))


def cut_text(job: Job, cut: Cut) -> str:
    """Return when an attempt is stopped, as a sentence's end.

    >>> cut_text(Job("t", (8,), 8, 30), NoCut())
    'after 30 epochs at most'
    """
    match cut:
        case NoCut():
            return f"after {job.max_epochs} epochs at most"
        case CostCut(threshold_j):
            return f"before it has cost more than {cost_text(job, threshold_j)}"
        case _:
            whole = f"against {cost_text(job, cut.best_cost_j)} for a run of the best known"
            bound = "" if cut.at_most_j is None else f", and at {cost_text(job, cut.at_most_j)} at the latest"
            return f"where going on costs more than it may teach, weighed {whole}{bound}"
