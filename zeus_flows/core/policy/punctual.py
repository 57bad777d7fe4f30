"""Ready in time: where a recurrence would be late, the fastest arm that is known runs, whatever it costs.

How long a run takes is told from what has reached the target since epochs last changed, and from what was measured on
this GPU. Where nothing was, nothing is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeus_flows.core.bandit import Runs
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.policy.base import Choice
from zeus_flows.core.policy.bounds import ALMOST_SURELY
from zeus_flows.core.policy.state import State
from zeus_flows.core.power import best_setting, epoch_at
from zeus_flows.core.power_profile import Gpu
from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.records import Ask
from zeus_flows.core.text import seconds, setting_text

_NOISE = 0.1  # standard deviation of the log of epochs, where too few runs tell


@dataclass(frozen=True, slots=True)
class RunTime:
    """How long a run of an arm takes on a GPU.

    Attributes:
        batch_size: The arm.
        expected_s: As its runs took.
        likely_s: What nine and a half of ten runs do not exceed.
        setting: The power limit that this holds for; None where none was measured.
    """

    batch_size: int
    expected_s: float
    likely_s: float
    setting: float | None = None


def in_time(job: Job, state: State, ask: Ask, arms: tuple[int, ...], choice: Choice) -> Choice:
    """Return the choice, or the fastest known arm at its fastest limit where the choice would be late.

    A mode that keeps batch size or limit keeps them here too; the reason says that it would be late all the same.

    Args:
        job: With `ready_by`.
        state: What is known.
        ask: With the seconds that are left.
        arms: Batch sizes that fit the GPU.
        choice: What would run otherwise.
    """
    gpu, left_s = ask.gpu or state.gpu, ask.seconds_left
    if gpu is None or left_s is None or choice.explores or job.policy == "zeus-paper":
        return choice
    tunes = job.mode in (Mode.FULL, Mode.POWER)
    planned = _run_time(job, state, ask, gpu, choice.batch_size, fastest=False)
    if planned is None or planned.likely_s <= left_s:
        return choice
    may_run = arms if job.mode is Mode.FULL else (choice.batch_size,)
    known = [t for b in may_run if (t := _run_time(job, state, ask, gpu, b, fastest=tunes)) is not None]
    best = min(known, key=lambda t: (t.likely_s, t.batch_size)) if tunes else planned
    reason = Reason(ReasonKind.LATE, _why(job, gpu, left_s, planned, best), arms=choice.reason.arms)
    return Choice(best.batch_size, reason, tune_power=tunes, setting=best.setting if tunes else None)


def _why(job: Job, gpu: Gpu, left_s: float, planned: RunTime, best: RunTime) -> str:
    when = f"in {seconds(left_s)}" if left_s > 0 else f"over since {seconds(-left_s)}"
    text = f"it must be ready by {job.ready_by}, which is {when}, and batch size {planned.batch_size} may take "
    text += f"{seconds(planned.likely_s)}"
    if best != planned:
        at = "" if best.setting is None else f" at {setting_text(best.setting, gpu.knob)}"
        text += f": {best.batch_size}{at}, the fastest known, runs"
    if best.expected_s > left_s:
        return f"{text}; it will be about {seconds(best.expected_s - left_s)} late"
    return text if best.likely_s <= left_s else f"{text}; it may be late all the same"


def _run_time(job: Job, state: State, ask: Ask, gpu: Gpu, batch_size: int, *, fastest: bool) -> RunTime | None:
    """Return how long a run takes, at the best limit or at the fastest; None where that is not known."""
    log_epochs = {} if state.account is None else state.account.log_epochs()
    runs, samples = log_epochs.get(str(batch_size)), ask.samples_per_epoch or state.samples_per_epoch
    if runs is None or not runs.count or not samples:
        return None
    overheads, _ = state.overheads_of(job, batch_size, gpu.key)
    profile, setting = state.profile(batch_size, gpu), None
    if profile is not None and profile.complete and profile.measurements:
        if fastest:
            at = max(profile.measurements, key=lambda m: (m.samples_per_s, m.setting))
        else:
            at = best_setting(job, profile, samples_per_epoch=samples, overheads=overheads)
        epoch_s, setting = (
            epoch_at(profile, at, samples_per_epoch=samples, overheads=overheads).time_s,
            at.setting,
        )
    else:
        rate = state.rates.get((batch_size, gpu.key))
        if rate is None or not rate.samples:
            return None
        epoch_s = samples * rate.time_s / rate.samples
        epoch_s += overheads.per_epoch(state.settings_before.get(gpu.key, 0.0)).time_s
    once_s = overheads.once_each.time_s
    expected, likely = (math.exp(min(runs.mean + z * _scatter(runs), 50.0)) for z in (0.0, ALMOST_SURELY))
    return RunTime(batch_size, once_s + expected * epoch_s, once_s + likely * epoch_s, setting)


def _scatter(runs: Runs) -> float:
    """Return the standard deviation of the log of one run's epochs; a guess counts as two runs."""
    return math.sqrt((2 * _NOISE**2 + runs.squares) / (2 + max(runs.count - 1, 0)))
