"""What a run takes beside its training steps: once, for each evaluation, for each epoch; and the host all along.

Eq. 2 counts all energy and time until the target, and the paper's Listing 1 wraps the evaluation loader. So a run takes

    once + samples x training(b, p) + evaluations x evaluation(b, p) + epochs x rest

The first factor is measured by the power profile, the others here. They do not grow with the training data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from zeus_flows.core.power_profile import NO_PART, Part, Parts, PowerProfile, SettingMeasurement

#: What a run's parts still weigh after each run that follows: a change is believed after about ten.
KEPT = 0.9
#: What a GPU draws while it waits, as a share of its greatest power, where nothing lower was seen.
IDLE = 0.15
#: How far off the parts of a batch size may be that were only seen at others: evaluation may use the same batch size.
DOUBT = 0.3
#: The same once several batch sizes agree.
LEAST_DOUBT = 0.05


@dataclass(frozen=True, slots=True)
class Overheads:
    """The parts of one batch size on one GPU, as sums over its runs; newer ones weigh more.

    Attributes:
        once: Start-up and compilation; counted per attempt.
        evaluation: Evaluations, by the setting in force.
        rest: What is left of each epoch; counted per epoch.
        host_w: What the machine draws beside its GPUs, in watts.
    """

    once: Part = NO_PART
    evaluation: tuple[tuple[float, Part], ...] = ()
    rest: Part = NO_PART
    host_w: float = 0.0

    def __bool__(self) -> bool:
        """Whether there is anything beside training steps."""
        return bool(self.host_w or self.rest.count or self.once.count)

    def add(self, parts: Parts) -> Overheads:
        """Return them with one more run.

        >>> known = Overheads().add(Parts(evaluation=((250.0, Part(2, 100.0, 4.0)),), rest=Part(2)))
        >>> known.evaluations_per_epoch, known.evaluation_at(250.0)
        (1.0, Part(count=1.0, energy_j=50.0, time_s=2.0))
        """
        evaluation = {setting: part.times(KEPT) for setting, part in self.evaluation}
        for setting, part in parts.evaluation:
            evaluation[setting] = evaluation.get(setting, NO_PART) + part
        return replace(
            self,
            once=self.once.times(KEPT) + parts.once,
            evaluation=tuple(sorted(evaluation.items())),
            rest=self.rest.times(KEPT) + parts.rest,
        )

    @property
    def evaluations_per_epoch(self) -> float:
        """How often the model is evaluated, per epoch."""
        epochs = self.rest.count
        return sum(part.count for _, part in self.evaluation) / epochs if epochs else 0.0

    @property
    def once_each(self) -> Part:
        """What an attempt takes before it trains."""
        return self.once.each

    def evaluation_at(self, setting: float, profile: PowerProfile | None = None) -> Part:
        """Return what one evaluation takes at a setting of the knob.

        Where it was not seen there, it is taken from the nearest setting: as far as the GPU was busy, it is slowed and
        draws as training does by the profile; the time in which it waited stays.
        """
        seen = [(setting, part) for setting, part in self.evaluation if part.count > 0]
        if not seen:
            return NO_PART
        at, part = min(seen, key=lambda item: (abs(item[0] - setting), -item[0]))
        each = part.each
        if at == setting or profile is None or not profile.measurements or each.time_s <= 0:
            return each
        there, here = nearest(profile, at), nearest(profile, setting)
        idle_w = self._idle_w(profile)
        watts = each.energy_j / each.time_s
        room_w = there.average_power_w - idle_w
        busy = min(max((watts - idle_w) / room_w, 0.0), 1.0) if room_w > 0 else 1.0
        slower = there.samples_per_s / here.samples_per_s
        other_w = (watts - busy * there.average_power_w) / (1 - busy) if busy < 1 else 0.0
        waiting_s, busy_s = (1 - busy) * each.time_s, busy * each.time_s * slower
        return Part(1, waiting_s * max(other_w, 0.0) + busy_s * here.average_power_w, waiting_s + busy_s)

    def anywhere(self) -> Overheads:
        """Return them as seen at no setting in particular: the greatest of a profile stands for it."""
        return replace(self, evaluation=((math.inf, sum((part for _, part in self.evaluation), NO_PART)),))

    def per_epoch(self, setting: float, profile: PowerProfile | None = None) -> Part:
        """Return what an epoch takes beside its steps at a setting: its evaluations, and the rest."""
        evaluation, often = self.evaluation_at(setting, profile), self.evaluations_per_epoch
        rest = self.rest.each
        return Part(1, evaluation.energy_j * often + rest.energy_j, evaluation.time_s * often + rest.time_s)

    def _idle_w(self, profile: PowerProfile) -> float:
        """Return what the GPUs draw while they wait: the least that was seen, and a share of the greatest at most."""
        seen = [part.energy_j / part.time_s for part in (self.once, self.rest) if part.time_s > 1.0]
        return min([*seen, IDLE * profile.gpu.max_power_w])


NOTHING = Overheads()


def nearest(profile: PowerProfile, setting: float) -> SettingMeasurement:
    """Return the measurement at a setting, or at the nearest one that was measured."""
    for m in profile.measurements:  # asked for every setting of every arm: most often it was measured
        if m.setting == setting:
            return m
    return min(profile.measurements, key=lambda m: (abs(m.setting - setting), -m.setting))


def pooled(several: Iterable[Overheads]) -> Overheads:
    """Return what is believed of a batch size whose own parts were not seen: the mean over the others.

    >>> pooled([Overheads(once=Part(1, 10.0, 1.0)), Overheads(once=Part(1, 30.0, 3.0))]).once_each
    Part(count=1.0, energy_j=20.0, time_s=2.0)
    """
    together = NOTHING
    for known in several:
        evaluation, each = dict(together.evaluation), known.once_each
        for setting, part in known.evaluation if known.rest.count else ():
            evaluation[setting] = evaluation.get(setting, NO_PART) + part.times(1 / known.rest.count)
        together = Overheads(
            once=together.once + (Part(1, each.energy_j, each.time_s) if known.once.count else NO_PART),
            evaluation=tuple(sorted(evaluation.items())),
            rest=together.rest + known.rest.each,
            host_w=known.host_w,
        )
    return together


def doubt(costs: Iterable[float]) -> float:
    """Return the standard deviation of the log of a part that was only seen at other batch sizes.

    >>> doubt([100.0]), round(doubt([100.0, 100.0, 100.0]), 2)
    (0.3, 0.17)
    """
    logs = [math.log(cost) for cost in costs if cost > 0]
    if len(logs) < 2:
        return DOUBT
    mean = math.fsum(logs) / len(logs)
    squares = math.fsum((value - mean) ** 2 for value in logs)
    return max(math.sqrt((DOUBT**2 + squares) / len(logs)), LEAST_DOUBT)
