"""What energy costs and emits: a flat rate, or one for each hour in which something ran. No clock is read here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Final
from zoneinfo import ZoneInfo

KWH_J: Final = 3.6e6
_HOUR_S: Final = 3600.0
#: Hours that one span is spread over at most: no training takes longer, whatever a record says.
_MOST_HOURS: Final = 24 * 366


@dataclass(frozen=True, slots=True)
class EnergyRate:
    """What a kilowatt hour costs, in the tariff's currency, and emits, in grams of CO2; None where not known."""

    per_kwh: float | None = None
    carbon_g_per_kwh: float | None = None


@dataclass(frozen=True, slots=True)
class Used:
    """Energy that something used from a moment on, in equal parts over its seconds."""

    began_s: float
    time_s: float
    energy_j: float


@dataclass(frozen=True)
class Tariff:
    """Rates by hour.

    Attributes:
        flat: Counts in hours that have no rate of their own.
        hours: Rates by hour, in whole hours since 1970.
        of_day: Rates by hour of the day, 0 to 23, in the time zone.
        zone: That time zone.
        currency: Of prices, such as EUR; empty where there are none.
    """

    flat: EnergyRate = EnergyRate()
    hours: Mapping[int, EnergyRate] = field(default_factory=dict)
    of_day: Mapping[int, EnergyRate] = field(default_factory=dict)
    zone: str = "UTC"
    currency: str = ""

    @property
    def by_hour(self) -> bool:
        """Whether hours differ."""
        return bool(self.hours or self.of_day)

    @property
    def prices(self) -> bool:
        """Whether anything has a price."""
        return any(rate.per_kwh is not None for rate in self._all())

    @property
    def carbon(self) -> bool:
        """Whether any carbon intensity is known."""
        return any(rate.carbon_g_per_kwh is not None for rate in self._all())

    def at(self, hour: int) -> EnergyRate:
        """Return the rate of an hour, in whole hours since 1970.

        >>> Tariff(EnergyRate(0.3, 400.0), hours={1: EnergyRate(0.1)}).at(1)
        EnergyRate(per_kwh=0.1, carbon_g_per_kwh=400.0)
        """
        own = self.hours.get(hour)
        if own is None and self.of_day:
            own = self.of_day.get(datetime.fromtimestamp(hour * _HOUR_S, UTC).astimezone(self._zone).hour)
        if own is None:
            return self.flat
        return EnergyRate(
            self.flat.per_kwh if own.per_kwh is None else own.per_kwh,
            self.flat.carbon_g_per_kwh if own.carbon_g_per_kwh is None else own.carbon_g_per_kwh,
        )

    @cached_property
    def _zone(self) -> ZoneInfo:
        return ZoneInfo(self.zone)

    def _all(self) -> Iterable[EnergyRate]:
        return (self.flat, *self.hours.values(), *self.of_day.values())


@dataclass(frozen=True, slots=True)
class Charged:
    """What some energy cost and emitted.

    Attributes:
        energy_j: All of it.
        money: What the priced part cost.
        priced_j: That part.
        carbon_g: What the part emitted whose carbon intensity is known.
        carbon_j: That part.
        unpriced: Hours without a price in which energy was used, in whole hours since 1970.
        uncharted: Hours without a carbon intensity, likewise.
    """

    energy_j: float = 0.0
    money: float = 0.0
    priced_j: float = 0.0
    carbon_g: float = 0.0
    carbon_j: float = 0.0
    unpriced: frozenset[int] = frozenset()
    uncharted: frozenset[int] = frozenset()

    def __add__(self, other: Charged) -> Charged:
        return Charged(
            self.energy_j + other.energy_j,
            self.money + other.money,
            self.priced_j + other.priced_j,
            self.carbon_g + other.carbon_g,
            self.carbon_j + other.carbon_j,
            self.unpriced | other.unpriced,
            self.uncharted | other.uncharted,
        )

    @property
    def mean(self) -> EnergyRate:
        """What a kilowatt hour cost and emitted on average, by the energy used; None where that is not known."""
        return EnergyRate(
            self.money / self.priced_j * KWH_J if self.priced_j else None,
            self.carbon_g / self.carbon_j * KWH_J if self.carbon_j else None,
        )


def charge(tariff: Tariff, used: Used) -> Charged:
    """Return what energy cost and emitted, each second at the rate of its hour.

    >>> day = Tariff(hours={0: EnergyRate(0.2), 1: EnergyRate(0.4)}, currency="EUR")
    >>> charge(day, Used(began_s=1800.0, time_s=3600.0, energy_j=7.2e6)).money
    0.6000000000000001
    """
    whole = Charged()
    for hour, energy_j in _by_hour(used):
        rate = tariff.at(hour)
        priced, charted = rate.per_kwh is not None, rate.carbon_g_per_kwh is not None
        whole += Charged(
            energy_j,
            (rate.per_kwh or 0.0) * energy_j / KWH_J,
            energy_j if priced else 0.0,
            (rate.carbon_g_per_kwh or 0.0) * energy_j / KWH_J,
            energy_j if charted else 0.0,
            frozenset() if priced else frozenset({hour}),
            frozenset() if charted else frozenset({hour}),
        )
    return whole


def charge_all(tariff: Tariff, used: Iterable[Used]) -> Charged:
    """Return what all of it cost and emitted together."""
    return sum((charge(tariff, one) for one in used), Charged())


def _by_hour(used: Used) -> Iterable[tuple[int, float]]:
    """Yield the hours of a span, with the energy used in each."""
    first = math.floor(used.began_s / _HOUR_S)
    time_s = min(used.time_s, _MOST_HOURS * _HOUR_S)
    ended_s = used.began_s + time_s
    if not used.energy_j:
        return
    if time_s <= 0 or ended_s <= (first + 1) * _HOUR_S:
        yield first, used.energy_j
        return
    for hour in range(first, math.ceil(ended_s / _HOUR_S)):
        seconds = min(ended_s, (hour + 1) * _HOUR_S) - max(used.began_s, hour * _HOUR_S)
        yield hour, used.energy_j * seconds / time_s
