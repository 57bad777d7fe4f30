"""What an attempt has taken so far, split into what it was for.

The session says at each boundary what the time since the last one was: start-up, training steps, an evaluation, or the
rest of an epoch. Boundaries cost one reading of the GPUs' counters each; those closer together than a reading can tell
apart are one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto

from zeus_flows.core.overheads import nearest
from zeus_flows.core.power_profile import NO_PART, Part, Parts, PowerProfile
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.meter import Mark, Span
from zeus_flows.training.checkpoint import Progress

#: Boundaries closer together than this are one: a counter ticks every 20 to 100 ms.
TINY_S = 0.02
#: The learning curve keeps at most this many points.
MOST_POINTS = 16


class For(Enum):
    """The purpose that time and energy are booked for."""

    ONCE = auto()
    STEPS = auto()
    EVALUATION = auto()
    REST = auto()


class Books:
    """One attempt's books, from the moment they are opened.

    Args:
        gpus: What the attempt trains on.
        setting: Returns the setting of the knob in force, without asking a GPU.
        host_w: What the machine draws beside its GPUs, in watts.
        host_energy_j: Reads the machine's own energy counter, where it has one; then `host_w` does not count.

    Attributes:
        samples: Training samples handed out in this try.
    """

    def __init__(
        self,
        gpus: Gpus,
        setting: Callable[[], float],
        *,
        host_w: float = 0.0,
        host_energy_j: Callable[[], float] | None = None,
    ) -> None:
        self._gpus, self._setting = gpus, setting
        self._host_w, self._read_host = host_w, host_energy_j
        self._host_start_j = host_energy_j() if host_energy_j else 0.0
        self._before = Progress()
        self._start = self._last = gpus.mark()
        self._once = self._rest = NO_PART
        self._evaluation: dict[float, Part] = {}
        self._steps = NO_PART
        self._first: tuple[Span, int, float] | None = None
        self.samples = 0

    def go_on_after(self, before: Progress) -> None:
        """Start from the books of an earlier try of the attempt."""
        self._before = before

    def close(self, what: For, count: int = 0) -> None:
        """Book the time since the last boundary.

        Args:
            what: What it was for.
            count: How many of that have ended with it: 1 after an evaluation, or at the end of an epoch.
        """
        mark = self._mark()
        span = self._gpus.between(self._last, mark)
        self._last = mark
        self._add(what, Part(count, span.energy_j, span.time_s))

    def close_late(self, ended_s: float, watts: float | None) -> None:
        """Book the time since the last boundary as steps up to a moment, and as an evaluation after it.

        Args:
            ended_s: When the last step ended, as far as can be told.
            watts: What steps draw; None: the energy is split as the time is.
        """
        mark = self._mark()
        span = self._gpus.between(self._last, mark)
        steps_s = min(max(ended_s - self._last.time_s, 0.0), span.time_s)
        share = steps_s / span.time_s if span.time_s else 1.0
        steps_j = share * span.energy_j if watts is None else min(steps_s * watts, span.energy_j)
        self._last = mark
        self._add(For.STEPS, Part(0, steps_j, steps_s))
        self._add(For.EVALUATION, Part(1, span.energy_j - steps_j, span.time_s - steps_s))

    def begin_again(self) -> None:
        """Forget what a retry took before its first step: a training that never broke would not have taken it."""
        if self._before.epoch:
            self._start = self._last = self._gpus.mark()
            self._once = NO_PART
            self._host_start_j = self._read_host() if self._read_host else 0.0

    def stepped_first(self, samples: int) -> None:
        """Book the first step apart. Its excess over other steps is compilation, which happens once."""
        mark = self._mark()
        span = self._gpus.between(self._last, mark)
        self._last, self._first = mark, (span, samples, self._setting())
        self._add(For.STEPS, Part(0, span.energy_j, span.time_s))

    def progress(self, epoch: int, metric: float | None, profiling: Part, profile: PowerProfile | None) -> Progress:
        """Return the books now; raises `DeviceLost` where a GPU is gone."""
        return self.upto(self._gpus.between(self._start, self._mark()), epoch, metric, profiling, profile)

    def known(self) -> Span:
        """Return the span since the start, after a GPU failed. The GPU is asked once more; nothing is raised."""
        try:
            return self._gpus.since(self._start)
        except Exception:  # a lost GPU, or CUDA that answers nothing any more
            return self._gpus.known_since(self._start)

    def upto(
        self, span: Span, epoch: int, metric: float | None, profiling: Part, profile: PowerProfile | None
    ) -> Progress:
        """Return the books with a span since the start of this try."""
        before = self._before
        return Progress(
            epoch=epoch,
            energy_j=before.energy_j + span.energy_j,
            time_s=before.time_s + span.time_s,
            profiling_energy_j=before.profiling_energy_j + profiling.energy_j,
            profiling_time_s=before.profiling_time_s + profiling.time_s,
            complete=before.complete and span.complete,
            metric=metric,
            parts=_sum(before.parts, self.parts(profile)),
            host_energy_j=before.host_energy_j + self._host_j(span.time_s),
            foreign_limit_w=before.foreign_limit_w or self._gpus.control.foreign_w,
        )

    def parts(self, profile: PowerProfile | None) -> Parts:
        """Return what this try took beside its training steps.

        Args:
            profile: Tells what the first step would have taken without compilation; None: the other steps do.
        """
        once = self._once + self._compilation(profile)
        count = 0 if self._before.epoch else 1
        return Parts(Part(count, once.energy_j, once.time_s), tuple(sorted(self._evaluation.items())), self._rest)

    def steps(self, profile: PowerProfile | None) -> Part:
        """Return what training steps took in this try, compilation left out; counted in samples."""
        compilation = self._compilation(profile)
        return Part(
            self.samples,
            max(self._steps.energy_j - compilation.energy_j, 0.0),
            max(self._steps.time_s - compilation.time_s, 0.0),
        )

    def _compilation(self, profile: PowerProfile | None) -> Part:
        """Return what the first step took more than one at the same setting takes."""
        if self._first is None:
            return NO_PART
        span, samples, setting = self._first
        if profile is not None and profile.measurements:
            at = nearest(profile, setting)
            usual_s = samples / at.samples_per_s
            usual_j = usual_s * at.average_power_w
        elif self.samples > samples:
            share = samples / (self.samples - samples)
            usual_s = share * max(self._steps.time_s - span.time_s, 0.0)
            usual_j = share * max(self._steps.energy_j - span.energy_j, 0.0)
        else:
            return NO_PART
        if span.time_s - usual_s < TINY_S:
            return NO_PART
        return Part(0, max(span.energy_j - usual_j, 0.0), span.time_s - usual_s)

    def _mark(self) -> Mark:
        """Return a mark of now. The last boundary serves where hardly any time has passed since."""
        return self._last if self._gpus.now_s() - self._last.time_s < TINY_S else self._gpus.mark()

    def _add(self, what: For, part: Part) -> None:
        match what:
            case For.ONCE:
                self._once += part
            case For.STEPS:
                self._steps += part
            case For.REST:
                self._rest += part
            case For.EVALUATION:
                setting = self._setting()
                self._evaluation[setting] = self._evaluation.get(setting, NO_PART) + part

    def _host_j(self, time_s: float) -> float:
        if self._read_host is None:
            return self._host_w * time_s
        return max(self._read_host() - self._host_start_j, 0.0)


def _sum(a: Parts, b: Parts) -> Parts:
    evaluation = dict(a.evaluation)
    for setting, part in b.evaluation:
        evaluation[setting] = evaluation.get(setting, NO_PART) + part
    return Parts(a.once + b.once, tuple(sorted(evaluation.items())), a.rest + b.rest)


class Curve:
    """The learning curve on the way to the target: the epochs at which the best metric so far improved.

    >>> curve = Curve(lower_is_better=False)
    >>> for epoch, metric in enumerate((0.5, 0.7, 0.6, 0.8), start=1):
    ...     curve.add(epoch, metric)
    >>> curve.points
    ((1, 0.5), (2, 0.7), (4, 0.8))
    """

    def __init__(self, *, lower_is_better: bool) -> None:
        self._sign = -1.0 if lower_is_better else 1.0
        self._points: list[tuple[int, float]] = []

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """(epoch, best metric so far), ascending; where there are too many, those that differ least are left out."""
        return tuple(self._points)

    def add(self, epoch: int, metric: float) -> None:
        """Note a metric; one that is no improvement, or no number, changes nothing."""
        if not math.isfinite(metric) or (self._points and self._sign * (metric - self._points[-1][1]) <= 0):
            return
        if self._points and self._points[-1][0] == epoch:
            self._points.pop()
        self._points.append((epoch, metric))
        if len(self._points) > MOST_POINTS:
            levels = [level for _, level in self._points]
            steps = [abs(levels[i + 1] - levels[i - 1]) for i in range(1, len(levels) - 1)]
            del self._points[1 + steps.index(min(steps))]
