"""What a job's report says of energy, money and carbon, computed from its savings and from what was observed when.

Prices are exact and savings are not: an interval in money or carbon is the energy's, times the mean rate of the hours
in which the job ran. Hours without a rate count for nothing and are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from zeus_flows.core.amounts import Amount
from zeus_flows.core.cost import observed_cost
from zeus_flows.core.job import Job
from zeus_flows.core.prices import KWH_J, Charged, EnergyRate, Tariff, Used, charge_all
from zeus_flows.core.records import Observation
from zeus_flows.core.savings import Compared, Line, Savings

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A quantity with an interval that holds the truth nine times in ten.

    >>> Estimate(2.0, 1.0, 3.0).times(10.0)
    Estimate(amount=20.0, low=10.0, high=30.0)
    """

    amount: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate:
        """Return it in another unit."""
        low, high = sorted((self.low * factor, self.high * factor))
        return Estimate(self.amount * factor, low, high)

    @property
    def half(self) -> float:
        """Half its interval."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class SavedAgainst:
    """What was saved against something else that might have run.

    Attributes:
        energy_kwh: None where there are no joules.
        percent: Of the energy that it would have taken; of its time where there are no joules.
        time_h: In hours.
        money: In the tariff's currency; None where there is no price.
        carbon_kg: Kilograms of CO2; None where the carbon intensity is not known.
        would_have_taken: Energy in kilowatt hours; None where there are no joules.
    """

    energy_kwh: Estimate | None
    percent: Estimate
    time_h: Estimate
    money: Estimate | None
    carbon_kg: Estimate | None
    would_have_taken: float | None


@dataclass(frozen=True, slots=True)
class Against:
    """What recurrences saved against the default, and against tuning the power limit alone.

    Attributes:
        recurrences: How many.
        spent: What they took.
        default: Against the default batch size at the limit that was there before.
        power_only: Against the default batch size at its best limit; None where that is not known.
    """

    recurrences: int
    spent: Amount
    default: SavedAgainst
    power_only: SavedAgainst | None


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """A recurrence of the timeline: the sums over its attempts.

    Attributes:
        began_s: When its first attempt began, in seconds since 1970.
        batch_sizes: Of its attempts, in their order.
        setting: What its last one settled on, per GPU; None where no limit was applied.
        energy_j: The machine beside its GPUs included.
        time_s: Training time.
        cost: By the job's objective.
        outcome: Of its last attempt.
        explored: Whether any attempt was there to learn.
        control: The default ran, to be compared with.
        complete: Whether every reading can be believed.
        charged: What its energy cost and emitted.
    """

    recurrence: int
    began_s: float
    batch_sizes: tuple[int, ...]
    setting: float | None
    energy_j: float
    time_s: float
    cost: float
    outcome: str
    explored: bool
    control: bool
    complete: bool
    charged: Charged


def timeline(job: Job, attempts: Iterable[tuple[float, Observation]], tariff: Tariff) -> tuple[TimelineEntry, ...]:
    """Return recurrences from their attempts: when each began, in seconds since 1970, and what was observed."""
    ordered = sorted(attempts, key=lambda item: item[1].order)
    return tuple(
        _entry(job, number, list(group), tariff)
        for number, group in groupby(ordered, key=lambda item: item[1].recurrence)
    )


def _entry(job: Job, number: int, attempts: Sequence[tuple[float, Observation]], tariff: Tariff) -> TimelineEntry:
    last = attempts[-1][1]
    used = [Used(began_s, o.time_s, 0.0 if job.in_seconds else energy_of(o)) for began_s, o in attempts]
    return TimelineEntry(
        recurrence=number,
        began_s=attempts[0][0],
        batch_sizes=tuple(o.batch_size for _, o in attempts),
        setting=last.setting,
        energy_j=sum(one.energy_j for one in used),
        time_s=sum(one.time_s for one in used),
        cost=sum(observed_cost(job, o) for _, o in attempts),
        outcome=last.outcome.value,
        explored=any(o.explores for _, o in attempts),
        control=last.control,
        complete=all(o.energy_complete for _, o in attempts),
        charged=charge_all(tariff, used),
    )


def energy_of(observation: Observation) -> float:
    """Return what an attempt used: its GPUs, and the machine beside them where that is counted."""
    return observation.energy_j + observation.host_energy_j


def mean_rate(entries: Iterable[TimelineEntry]) -> EnergyRate:
    """Return what a kilowatt hour cost and emitted on average in the hours in which recurrences ran."""
    return sum((entry.charged for entry in entries), Charged()).mean


def so_far(saved: Savings, rate: EnergyRate) -> Against | None:
    """Return what was saved so far; None where nothing can be compared."""
    return None if saved.so_far is None else _against(saved, saved.so_far, rate)


def from_now_on(saved: Savings, rate: EnergyRate) -> Against | None:
    """Return what one more recurrence is expected to save; None where that is not known."""
    return None if saved.from_now_on is None else _against(saved, saved.from_now_on, rate)


def _against(saved: Savings, compared: Compared, rate: EnergyRate) -> Against:
    lines = (compared.total, compared.power_only)
    default, power_only = (None if line is None else _saved(saved, compared, line, rate) for line in lines)
    assert default is not None
    return Against(compared.recurrences, compared.spent, default, power_only)


def _saved(saved: Savings, compared: Compared, line: Line, rate: EnergyRate) -> SavedAgainst:
    energy_j = Estimate(line.amount.energy_j, line.low.energy_j, line.high.energy_j)
    time_s = Estimate(line.amount.time_s, line.low.time_s, line.high.time_s)
    instead = compared.spent + line.amount
    if saved.in_seconds:
        share = time_s.times(100 / instead.time_s if instead.time_s else 0.0)
        return SavedAgainst(None, share, time_s.times(1 / _HOUR_S), None, None, None)
    kwh = energy_j.times(1 / KWH_J)
    return SavedAgainst(
        energy_kwh=kwh,
        percent=energy_j.times(100 / instead.energy_j if instead.energy_j else 0.0),
        time_h=time_s.times(1 / _HOUR_S),
        money=None if rate.per_kwh is None else kwh.times(rate.per_kwh),
        carbon_kg=None if rate.carbon_g_per_kwh is None else kwh.times(rate.carbon_g_per_kwh / 1000),
        would_have_taken=instead.energy_j / KWH_J,
    )
