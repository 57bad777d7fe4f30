"""What was measured of each setting of the knob, and which one is worth measuring next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from zeus_flows.core.limit_search import CostOf, odd_limit, worth_measuring
from zeus_flows.core.power_profile import PowerProfile, SettingMeasurement

#: Returns the next setting to measure by what was measured, or None.
Search = Callable[[Sequence[SettingMeasurement]], float | None]


class SettingReadings:
    """The readings of one batch size on one GPU: earlier attempts' and this one's.

    Args:
        settings: Those to choose among.
        known: What earlier attempts measured.
        cost_of: What one sample costs at a measured setting.
        max_slowdown: How many times slower than the fastest one may be; None: as slow as it likes.
        made_with: Versions the measurements depend on; what was made with others is measured again.
        always: Settings to measure whether or not they can win.
        skip_losers: Leave out settings that cannot win any more, and measure an odd one again.
        search: Says what to measure next, where there are too many to go down through; None where it has found the
            best. None: go down through all.
    """

    def __init__(
        self,
        settings: Iterable[float],
        known: PowerProfile | None,
        *,
        cost_of: CostOf,
        max_slowdown: float | None,
        made_with: str,
        always: Iterable[float],
        skip_losers: bool,
        search: Search | None = None,
    ) -> None:
        anyway = tuple(always)
        self._wanted = tuple(sorted({*settings, *anyway}, reverse=True))
        self._always = frozenset(anyway if skip_losers else self._wanted)
        self._search = search
        self._cost_of, self._max_slowdown, self._made_with = cost_of, max_slowdown, made_with
        measured = [m for m in known.measurements if m.setting in self._wanted] if known else []
        self._found = {m.setting: m for m in measured if m.begun_s is None}
        self._begun = {m.setting: m for m in measured if m.begun_s is not None}
        self._usable = known is not None and known.complete and bool(self._found)
        self._stale = set(self._found) & set(known.stale if known else ())
        if known is not None and known.made_with not in ("", made_with):
            self._stale, self._begun = set(self._found), {}
        self._of_this_attempt: set[float] = set()
        self._may_read_again, self._second_reading = skip_losers, False

    def next(self) -> float | None:
        """Return the next setting to measure; at the end an odd one again; None where nothing is left."""
        following = self._next()
        if following is None or self._search is None:
            self._give_up_stale(above=following)
        odd = self._odd() if following is None else None
        self._second_reading = odd is not None
        if self._second_reading:
            self._may_read_again = False
        return odd if following is None else following

    def take_begun(self, setting: float) -> SettingMeasurement | None:
        """Return what an earlier attempt began to measure of a setting, once; None where none did."""
        return self._begun.pop(setting, None)

    def keep(self, measured: SettingMeasurement) -> None:
        """Add a reading of this attempt."""
        self._found[measured.setting] = measured
        self._stale.discard(measured.setting)
        self._of_this_attempt.add(measured.setting)

    def distrust(self, measured: SettingMeasurement) -> None:
        """Let every setting be measured again: one of them contradicted the profile.

        Until then the others are taken to be off by as much, so that comparisons stay fair.
        """
        said = self._found[measured.setting]
        power = measured.average_power_w / said.average_power_w
        speed = measured.samples_per_s / said.samples_per_s
        self._found = {
            setting: replace(m, average_power_w=m.average_power_w * power, samples_per_s=m.samples_per_s * speed)
            for setting, m in self._found.items()
        }
        self._found[measured.setting] = measured
        self._stale = set(self._found) - {measured.setting}

    def profile(self, empty: PowerProfile, *, done: bool, begun: SettingMeasurement | None) -> PowerProfile | None:
        """Return the readings as a profile; None where there are none.

        Args:
            empty: Says of what, and on what.
            done: Whether nothing is left to measure.
            begun: What was measured so far of the setting under way.
        """
        complete = self._usable or done or self._second_reading
        kept = dict(self._found)
        if not complete:
            kept |= self._begun
            if begun is not None:
                kept[begun.setting] = begun
        if not kept:
            return None
        measurements = tuple(kept[setting] for setting in self._wanted if setting in kept)
        stale = tuple(setting for setting in self._wanted if setting in self._stale)
        return replace(empty, measurements=measurements, complete=complete, made_with=self._made_with, stale=stale)

    def _next(self) -> float | None:
        """Return the next setting that has no measurement that counts; None where none is worth one."""
        wanted = (setting for setting in self._wanted if self._wants(setting))
        if self._search is None:
            return next(wanted, None)
        anyway = next((setting for setting in wanted if setting in self._always), None)
        return self._search(self._fresh) if anyway is None else anyway

    def _wants(self, setting: float) -> bool:
        """Whether a setting has no measurement that counts, and is worth one."""
        if setting in self._found and setting not in self._stale:
            return False
        if setting in self._always:
            return True
        return worth_measuring(setting, self._fresh, cost_of=self._cost_of, max_slowdown=self._max_slowdown)

    def _give_up_stale(self, *, above: float | None) -> None:
        """Forget stale measurements above the next setting to measure (all of them, without one): they cannot win."""
        for setting in [w for w in self._stale if above is None or w > above]:
            self._stale.remove(setting)
            del self._found[setting]

    def _odd(self) -> float | None:
        """Return the setting to measure once more; None where none is odd, or one was measured again already.

        Only this attempt's readings are taken again: one that stays odd would be taken in every recurrence else.
        """
        odd = odd_limit(self._fresh, cost_of=self._cost_of) if self._may_read_again else None
        return odd if odd in self._of_this_attempt else None

    @property
    def _fresh(self) -> tuple[SettingMeasurement, ...]:
        return tuple(m for setting, m in self._found.items() if setting not in self._stale)
