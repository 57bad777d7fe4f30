"""What was measured of each power limit, and which one is worth measuring next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from zeus_flows.core.limit_search import CostOf, odd_limit, worth_measuring
from zeus_flows.core.power_profile import LimitMeasurement, PowerProfile


class LimitReadings:
    """The readings of one batch size on one GPU: earlier attempts' and this one's.

    Args:
        limits_w: The limits to choose among.
        known: What earlier attempts measured.
        cost_of: What one sample costs at a measured limit.
        max_slowdown: How many times slower than the fastest a limit may be; None: as slow as it likes.
        made_with: Versions the measurements depend on; what was made with others is measured again.
        always_w: Limits to measure whether or not they can win.
        skip_losers: Leave out limits that cannot win any more, and measure an odd one again.
    """

    def __init__(
        self,
        limits_w: Iterable[float],
        known: PowerProfile | None,
        *,
        cost_of: CostOf,
        max_slowdown: float | None,
        made_with: str,
        always_w: Iterable[float],
        skip_losers: bool,
    ) -> None:
        always = tuple(always_w)
        self._wanted = tuple(sorted({*limits_w, *always}, reverse=True))
        self._always = frozenset(always if skip_losers else self._wanted)
        self._cost_of, self._max_slowdown, self._made_with = cost_of, max_slowdown, made_with
        measured = [m for m in known.measurements if m.power_limit_w in self._wanted] if known else []
        self._found = {m.power_limit_w: m for m in measured if m.begun_s is None}
        self._begun = {m.power_limit_w: m for m in measured if m.begun_s is not None}
        self._usable = known is not None and known.complete and bool(self._found)
        self._stale = set(self._found) & set(known.stale_w if known else ())
        if known is not None and known.made_with not in ("", made_with):
            self._stale, self._begun = set(self._found), {}
        self._of_this_attempt: set[float] = set()
        self._may_read_again, self._second_reading = skip_losers, False

    def next(self) -> float | None:
        """Return the next limit to measure; at the end an odd one again; None where nothing is left."""
        next_w = next((limit for limit in self._wanted if self._wants(limit)), None)
        self._give_up_stale(above_w=next_w)
        odd_w = self._odd() if next_w is None else None
        self._second_reading = odd_w is not None
        if self._second_reading:
            self._may_read_again = False
        return odd_w if next_w is None else next_w

    def take_begun(self, limit_w: float) -> LimitMeasurement | None:
        """Return what an earlier attempt began to measure of a limit, once; None where none did."""
        return self._begun.pop(limit_w, None)

    def keep(self, measured: LimitMeasurement) -> None:
        """Add a reading of this attempt."""
        self._found[measured.power_limit_w] = measured
        self._stale.discard(measured.power_limit_w)
        self._of_this_attempt.add(measured.power_limit_w)

    def distrust(self, measured: LimitMeasurement) -> None:
        """Let every limit be measured again: one of them contradicted the profile.

        Until then the other limits are taken to be off by as much, so that comparisons stay fair.
        """
        said = self._found[measured.power_limit_w]
        power = measured.average_power_w / said.average_power_w
        speed = measured.samples_per_s / said.samples_per_s
        self._found = {
            limit: replace(m, average_power_w=m.average_power_w * power, samples_per_s=m.samples_per_s * speed)
            for limit, m in self._found.items()
        }
        self._found[measured.power_limit_w] = measured
        self._stale = set(self._found) - {measured.power_limit_w}

    def profile(self, empty: PowerProfile, *, done: bool, begun: LimitMeasurement | None) -> PowerProfile | None:
        """Return the readings as a profile; None where there are none.

        Args:
            empty: Says of what, and on what.
            done: Whether nothing is left to measure.
            begun: What was measured so far of the limit under way.
        """
        complete = self._usable or done or self._second_reading
        kept = dict(self._found)
        if not complete:
            kept |= self._begun
            if begun is not None:
                kept[begun.power_limit_w] = begun
        if not kept:
            return None
        measurements = tuple(kept[limit] for limit in self._wanted if limit in kept)
        stale = tuple(limit for limit in self._wanted if limit in self._stale)
        return replace(empty, measurements=measurements, complete=complete, made_with=self._made_with, stale_w=stale)

    def _wants(self, limit_w: float) -> bool:
        """Whether a limit has no measurement that counts, and is worth one."""
        if limit_w in self._found and limit_w not in self._stale:
            return False
        if limit_w in self._always:
            return True
        return worth_measuring(limit_w, self._fresh, cost_of=self._cost_of, max_slowdown=self._max_slowdown)

    def _give_up_stale(self, *, above_w: float | None) -> None:
        """Forget stale measurements above the next limit to measure (all of them, without one): they cannot win."""
        for limit in [w for w in self._stale if above_w is None or w > above_w]:
            self._stale.remove(limit)
            del self._found[limit]

    def _odd(self) -> float | None:
        """Return the limit to measure once more; None where none is odd, or one was measured again already.

        Only this attempt's readings are taken again: one that stays odd would be taken in every recurrence else.
        """
        odd_w = odd_limit(self._fresh, cost_of=self._cost_of) if self._may_read_again else None
        return odd_w if odd_w in self._of_this_attempt else None

    @property
    def _fresh(self) -> tuple[LimitMeasurement, ...]:
        return tuple(m for limit, m in self._found.items() if limit not in self._stale)
