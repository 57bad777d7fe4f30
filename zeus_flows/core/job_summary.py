"""What is to be told of a job among many: how it goes, what it saved, and what somebody should look at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from zeus_flows.core.power_profile import Knob
from zeus_flows.core.records import EnergySource, Outcome

#: A recurrence that takes so many times what the one before took, and an hour at least, is stuck.
_STUCK, _STUCK_S = 3.0, 3600.0


class Concern(StrEnum):
    """What somebody should look at."""

    STUCK = "stuck"  # under way for much longer than it usually takes
    FAILING = "failing"  # the newest recurrence that ended did not reach the target
    LATE = "late"  # the newest one would not be ready in time
    DEGRADED = "degraded"  # the newest one could not read its history


@dataclass(frozen=True, slots=True)
class SavedSoFar:
    """What a job saved so far against its default, each with the ends of its 90 % interval.

    Attributes:
        unit: Of costs: `j`, or `s` where there are no joules; then there is no energy.
        cost: Cost, low and high.
        energy_j: Energy, low and high; None where there are no joules.
        percent: The cost as a share of what the default would have cost.
        learning: What learning saved: negative, as it costs.
        recurrences: How many are compared.
        lost: How many did not reach the target.
    """

    unit: str
    cost: tuple[float, float, float]
    energy_j: tuple[float, float, float] | None
    percent: float
    learning: float
    recurrences: int
    lost: int

    @property
    def percent_half(self) -> float | None:
        """Half the interval of the share; None where nothing was saved or lost."""
        amount, low, high = self.cost
        return abs((high - low) / 2 * self.percent / amount) if amount else None


@dataclass(frozen=True, slots=True)
class NewestAttempt:
    """What an attempt's run says of it.

    Attributes:
        began_s: When, in seconds since 1970.
        mode: How much it might change.
        mode_why: Whose word that is; empty where it is the job file's.
        outcome: How it ended; None while it goes on.
        knob: What `setting` is one of.
        untunable: Why nothing could be tuned there, in a word or two; empty where it could.
    """

    recurrence: int
    attempt: int
    began_s: float
    mode: str = ""
    mode_why: str = ""
    batch_size: int | None = None
    setting: float | None = None
    outcome: Outcome | None = None
    late: bool = False
    degraded: bool = False
    untunable: str = ""
    gpu: str = ""
    text: str = ""
    knob: Knob = Knob.POWER_LIMIT


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job of a fleet.

    Attributes:
        name: The job's.
        experiment_id: Where its runs are.
        energy_source: Where its joules come from.
        recurrences: How many have begun.
        window: Number of its drift window.
        best_batch_size: The batch size that is thought cheapest; None where none has reached the target.
        saved: What it saved; None where that is not known.
        newest: Its newest attempt; None where there is none.
        ended: Its newest attempt of a recurrence that has ended.
        usual_s: What its newest recurrence that reached the target took.
        under_way: Recurrences that have begun and not ended, by the newest page.
        champion_s: When its champion was made, in seconds since 1970; None where it has none.
        trouble: Why nothing can be told of it; empty where it can.
    """

    name: str
    experiment_id: str
    energy_source: EnergySource = EnergySource.NONE
    recurrences: int = 0
    window: int = 0
    best_batch_size: int | None = None
    saved: SavedSoFar | None = None
    newest: NewestAttempt | None = None
    ended: NewestAttempt | None = None
    usual_s: float | None = None
    under_way: tuple[int, ...] = ()
    champion_s: float | None = None
    trouble: str = ""


def concerns(job: JobSummary, *, now_s: float) -> tuple[Concern, ...]:
    """Return what somebody should look at, the worst first.

    >>> concerns(JobSummary("a", "1", newest=NewestAttempt(2, 1, 0.0), under_way=(2,), usual_s=600.0), now_s=7200.0)
    (<Concern.STUCK: 'stuck'>,)
    """
    found = []
    newest, ended = job.newest, job.ended
    longest_s = max(_STUCK * (job.usual_s or 0.0), _STUCK_S)
    if newest is not None and newest.recurrence in job.under_way and now_s - newest.began_s > longest_s:
        found.append(Concern.STUCK)
    if ended is not None and ended.outcome is not Outcome.CONVERGED:
        found.append(Concern.FAILING)
    if newest is not None and newest.late:
        found.append(Concern.LATE)
    if newest is not None and newest.degraded:
        found.append(Concern.DEGRADED)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class FleetTotal:
    """What the jobs of one energy source saved together. Sources are never added up.

    Attributes:
        jobs: How many there are.
        told: Of how many it is known what they saved.
        energy_j: Together, low and high; the jobs' errors are taken to be independent.
        learning_j: What learning cost, as a cost by each job's objective.
    """

    jobs: int
    told: int
    energy_j: tuple[float, float, float]
    learning_j: float


SOURCES: Final = (EnergySource.MEASURED, EnergySource.SIMULATED)


def totals(jobs: Iterable[JobSummary]) -> Mapping[EnergySource, FleetTotal]:
    """Return what was saved, by energy source; of those that jobs have. Jobs without joules have none to add."""
    found, together = tuple(jobs), dict[EnergySource, FleetTotal]()
    for source in SOURCES:
        of_source = [job for job in found if job.energy_source is source]
        told = [job.saved for job in of_source if job.saved is not None and job.saved.energy_j is not None]
        amounts = [saved.energy_j for saved in told if saved.energy_j is not None]
        total = math.fsum(amount for amount, _, _ in amounts)
        half = math.hypot(*((high - low) / 2 for _, low, high in amounts))
        learning = math.fsum(saved.learning for saved in told)
        if of_source:
            energy_j = (total, total - half, total + half)
            together[source] = FleetTotal(len(of_source), len(told), energy_j, learning)
    return together


def untunable(jobs: Iterable[JobSummary]) -> Mapping[str, tuple[str, ...]]:
    """Return the jobs in which nothing can be tuned, by why; those of which that is not known are left out."""
    found = dict[str, tuple[str, ...]]()
    for job in jobs:
        if job.newest is not None and job.newest.untunable:
            found[job.newest.untunable] = (*found.get(job.newest.untunable, ()), job.name)
    return found
