"""Synthetic drift: a trace whose optimum moves, whose epochs all grow, or both; and how fast that is noticed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from zeus_flows.core.job import Drift, Job
from zeus_flows.experiments.replay.replaying import replay, replay_job
from zeus_flows.experiments.replay.traces import Trace
from zeus_flows.recurrence.loop import Recurrence

LONGER = 3  # max_epochs is this many times the trace's, so that the target stays within reach after a shift


@dataclass(frozen=True, slots=True)
class Shift:
    """What changes: the optimum moves by some octaves of batch size, all epochs are multiplied."""

    name: str
    octaves: float = 0.0
    times: float = 1.0


SHIFTS = (
    Shift("none"),
    Shift("two octaves up", octaves=2.0),
    Shift("two octaves down", octaves=-2.0),
    Shift("epochs x 2.5", times=2.5),
    Shift("up and x 2.5", octaves=2.0, times=2.5),
    Shift("down and x 2.5", octaves=-2.0, times=2.5),
)


def lengthened(trace: Trace) -> Trace:
    """Return the trace with a longer longest run."""
    return replace(trace, max_epochs=LONGER * trace.max_epochs)


def shifted(trace: Trace, shift: Shift) -> Trace:
    """Return a trace after a shift: each batch size takes the epochs of the one so many octaves below it.

    Beyond the traced batch sizes, the nearest one stands in.
    """
    arms = trace.batch_sizes

    def source(batch_size: int) -> int:
        wanted = math.log2(batch_size) - shift.octaves
        return min(arms, key=lambda b: (abs(math.log2(b) - wanted), b))

    def at(epoch: int) -> int:
        return max(1, round(shift.times * epoch))

    epochs: Mapping[int, tuple[int | None, ...]] = {
        b: tuple(None if e is None else at(e) for e in trace.epochs[source(b)]) for b in arms
    }
    curves = {
        b: tuple(tuple((at(epoch), metric) for epoch, metric in curve) for curve in trace.curves[source(b)])
        for b in arms
        if source(b) in trace.curves
    }
    return replace(trace, epochs=epochs, curves=curves)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to cope with drift."""

    name: str
    policy: str
    drift: Drift = Drift.RESET
    window: int | None = None

    def job(self, trace: Trace) -> Job:
        """Return the job that copes this way."""
        return replay_job(trace, self.policy, drift=self.drift, window=self.window)


VARIANTS = (
    Variant("zeus-paper, window 10", "zeus-paper", window=10),
    Variant("zeus, window 10", "zeus", window=10),
    Variant("lookahead, reset", "lookahead"),
    Variant("lookahead, discounted", "lookahead", Drift.DISCOUNT),
    Variant("lookahead, window 10", "lookahead", Drift.IGNORE, window=10),
    Variant("lookahead, nothing", "lookahead", Drift.IGNORE),
    Variant("thompson, reset", "thompson"),
    Variant("thompson, discounted", "thompson", Drift.DISCOUNT),
    Variant("thompson, window 10", "thompson", Drift.IGNORE, window=10),
)


@dataclass(frozen=True, slots=True)
class DriftResult:
    """One replay across a shift.

    Attributes:
        regret: After the shift, in units of the new best arm's expected cost.
        false_alarms: Resets before the shift, or at all where there is none.
        delay: Recurrences from the shift to the first reset; None where there was none.
        unconverged: Recurrences that never reached the target.
    """

    regret: float
    false_alarms: int
    delay: int | None
    unconverged: int


def across(trace: Trace, shift: Shift, variant: Variant, *, before: int, after: int, seed: int) -> DriftResult:
    """Replay a job for `before` recurrences, shift the trace, and go on for `after` more."""
    trace = lengthened(trace)
    then = shifted(trace, shift)
    job = variant.job(trace)
    resets: list[float] = []

    def watch(recurrence: Recurrence) -> None:
        resets.append(recurrence.attempts[0][0].decision.reason.numbers.get("resets", resets[-1] if resets else 0.0))

    result = replay(trace, job, recurrences=before + after, seed=seed, shifts={before + 1: then}, watch=watch)
    best = then.best_cost_j(job)
    # A decision knows of the resets that earlier recurrences brought about.
    at = [n for n in range(1, len(resets)) if resets[n] > resets[n - 1]]
    real = [n - before for n in at if n > before] if shift.octaves or shift.times != 1 else []
    return DriftResult(
        regret=sum(result.costs_j[before:]) / best - after,
        false_alarms=len(at) - len(real),
        delay=real[0] if real else None,
        unconverged=sum(not ok for ok in result.converged),
    )


def possible(trace: Trace, shift: Shift) -> bool:
    """Return whether some batch size still always reaches the target after a shift."""
    then = shifted(lengthened(trace), shift)
    return any(math.isfinite(then.mean_epochs(b)) for b in then.batch_sizes)


def mean(values: Iterable[float]) -> float:
    """Return the mean; not a number where there is nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan
