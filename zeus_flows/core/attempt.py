"""What an attempt tells while it runs, and how it says that it broke."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from zeus_flows.core.power_profile import Knob
from zeus_flows.core.records import Observation


@dataclass(frozen=True, slots=True)
class EpochReport:
    """One epoch of an attempt: cumulative energy and time, the metric reported, the setting in force.

    Attributes:
        metric_name: What the user calls the metric; empty where that is not known.
        knob: What `setting` is one of.
    """

    formerly: ClassVar[Mapping[str, str]] = {"setting": "power_limit_w"}

    epoch: int
    energy_j: float
    time_s: float
    setting: float | None = None
    metric: float | None = None
    wall_s: float | None = None
    metric_name: str = ""
    knob: Knob = Knob.POWER_LIMIT


class AttemptFailed(Exception):
    """Carries the observation of an attempt that an exception ended; `__cause__` is that exception.

    Attributes:
        observation: How it went, should it not be tried again.
        resumable: Whether trying again would go on from a checkpoint later than where this try began.
    """

    def __init__(self, observation: Observation, *, resumable: bool = False) -> None:
        super().__init__(observation.detail)
        self.observation = observation
        self.resumable = resumable
