"""Which power limits are still worth measuring (section 4.2).

Limits are measured from the greatest down. By what was measured above it a limit may be left out, and one reading that
does not fit the others is to be taken again. One wrong reading must not decide either: lower limits are given up
only where the readings say so whichever one of them is left out.

The margins were chosen on the published P100 traces: where any one limit reads 5 to 15 % wrong in speed or power, 0.10
loses 2.2 % at worst, against all limits measured, and 0.08 loses 17 %. The V100 traces confirmed them: nothing is lost.
From 0.13 on, profiling takes more of the V100's short epochs than it may. `ENOUGH` alone comes from a V100 trace (NCF):
its second limit is 11 % off as published, so that with one more wrong reading two of three were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeus_flows.core.power_profile import SettingMeasurement

#: By how much a limit must be slower and dearer than the best before those below it are given up.
SLOWER, DEARER = 0.10, 0.01
#: Among fewer readings than this, one that is wrong says too much.
ENOUGH = 4
#: A lower limit neither speeds a GPU up nor makes it draw more: beyond this share one of two readings is wrong.
ODD = 0.05

CostOf = Callable[[SettingMeasurement], float]


def worth_measuring(
    setting: float,
    measured: Sequence[SettingMeasurement],
    *,
    cost_of: CostOf,
    max_slowdown: float | None = None,
) -> bool:
    """Return whether a limit can still be the best one, by what was measured above it.

    Going down, speed falls and cost has one valley: power saved first, then time lost to static power. So once a
    limit is both slower and dearer than the best by margins, every lower one is further up that slope. A wrong reading
    can make a limit look so, or be the best that the others are held against: that is why each is left out once.

    Args:
        setting: The limit in question.
        measured: What is known, in any order.
        cost_of: What one sample costs at a measured limit.
        max_slowdown: How many times slower than the fastest a limit may be; None: as slow as it likes.

    >>> readings = [(250, 240, 100), (225, 215, 98), (200, 198, 85), (175, 174, 94), (150, 149, 80), (125, 124, 62)]
    >>> measured = [SettingMeasurement(*reading) for reading in readings]
    >>> def joules(m: SettingMeasurement) -> float:
    ...     return (0.5 * m.average_power_w + 0.5 * 250) / m.samples_per_s
    >>> worth_measuring(175, measured[:3], cost_of=joules)  # the reading at 200 W may be wrong
    True
    >>> worth_measuring(100, measured, cost_of=joules)  # those at 150 and 125 W are not both wrong
    False
    """
    above = sorted((m for m in measured if m.setting > setting), key=lambda m: -m.setting)
    if len(above) < ENOUGH:
        return True
    return not all(
        _lowest_loses(above[:i] + above[i + 1 :], cost_of=cost_of, max_slowdown=max_slowdown) for i in range(len(above))
    )


def odd_limit(measured: Sequence[SettingMeasurement], *, cost_of: CostOf) -> float | None:
    """Return the limit whose reading fits the others least; None where they fit.

    Two readings do not fit where the lower limit is faster or draws more by more than `ODD`. The one that fits the
    fewest others is odd; of two that fit alike, the cheaper, as it is the one that would be chosen wrongly.

    >>> measured = [SettingMeasurement(*m) for m in [(250, 240, 100), (225, 215, 98), (200, 198, 108), (175, 174, 94)]]
    >>> odd_limit(measured, cost_of=lambda m: m.average_power_w / m.samples_per_s)
    200
    """
    unfit = {m: sum(_misfit(m, other) for other in measured) for m in measured}
    odd = max(measured, key=lambda m: (unfit[m], -cost_of(m)), default=None)
    return odd.setting if odd is not None and unfit[odd] else None


def _lowest_loses(falling: Sequence[SettingMeasurement], *, cost_of: CostOf, max_slowdown: float | None) -> bool:
    """Whether the last of these, by falling limits, is too slow, or slower and dearer than the best of them."""
    lowest, allowed = falling[-1], falling
    if max_slowdown is not None:
        fastest = max(m.samples_per_s for m in falling)
        if lowest.samples_per_s * max_slowdown * (1 + SLOWER) < fastest:
            return True
        allowed = [m for m in falling if m.samples_per_s * max_slowdown >= fastest]
    best = min(allowed, key=cost_of)
    slower = lowest.samples_per_s * (1 + SLOWER) < best.samples_per_s
    return slower and cost_of(lowest) > (1 + DEARER) * cost_of(best)


def _misfit(one: SettingMeasurement, other: SettingMeasurement) -> bool:
    lower, upper = sorted((one, other), key=lambda m: m.setting)
    faster = lower.samples_per_s > (1 + ODD) * upper.samples_per_s
    return faster or lower.average_power_w > (1 + ODD) * upper.average_power_w
