"""Sums of energy, time and epochs, which is what savings are told by: amounts that add up.

None of them grows with the number of what was added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Amount:
    """Energy in joules, time in seconds, and cost by the job's objective: joules, or seconds where there is no sensor.

    Attributes:
        energy_j: Of the GPUs and of the machine beside them.
        host_j: The machine's part of that.
    """

    energy_j: float = 0.0
    time_s: float = 0.0
    cost_j: float = 0.0
    host_j: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(*(a + b for a, b in zip(self.figures, other.figures, strict=True)))

    def __sub__(self, other: Amount) -> Amount:
        return Amount(*(a - b for a, b in zip(self.figures, other.figures, strict=True)))

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """All figures, in the order of the fields."""
        return self.energy_j, self.time_s, self.cost_j, self.host_j

    def percent_of(self, whole: Amount) -> Amount:
        """Return each figure in percent of another's; 0 where there is nothing to compare with."""
        pairs = zip(self.figures, whole.figures, strict=True)
        return Amount(*(100 * part / of if of else 0.0 for part, of in pairs))


NO_AMOUNT = Amount()


@dataclass(frozen=True, slots=True)
class Took:
    """What so many recurrences or attempts took.

    >>> Took(1, 10.0, 2.0) + Took(2, 5.0, 1.0)
    Took(count=3, energy_j=15.0, time_s=3.0, host_j=0.0)
    """

    count: int = 0
    energy_j: float = 0.0
    time_s: float = 0.0
    host_j: float = 0.0

    def __add__(self, other: Took) -> Took:
        return Took(
            self.count + other.count,
            self.energy_j + other.energy_j,
            self.time_s + other.time_s,
            self.host_j + other.host_j,
        )


NOTHING = Took()


@dataclass(frozen=True, slots=True)
class Ran:
    """Runs that reached the target alike: at one batch size and setting of the knob, on one GPU.

    Attributes:
        setting: What they ran at; None: the one that was there.
        profiled: They profiled, so they took more than their epochs do.
        changed: The job might have changed something; False in the modes that only look, and in control runs.
        runs: How many.
        epochs: Their epochs, added up.
        samples: The samples they trained on, added up.
        data: Their data sets' sizes, added up.
        evaluations: How often they evaluated.
        energy_j: Of their GPUs.
        host_j: Of the machine beside them.
        profiling_j: The part of `energy_j` that was spent while profiling; 0 where that is not known.
        profiling_s: The part of `time_s`, likewise.
    """

    formerly: ClassVar[Mapping[str, str]] = {"setting": "limit_w"}

    batch_size: int
    gpu: str
    setting: float | None
    profiled: bool
    changed: bool
    runs: int = 0
    epochs: float = 0.0
    samples: float = 0.0
    data: float = 0.0
    evaluations: float = 0.0
    energy_j: float = 0.0
    time_s: float = 0.0
    host_j: float = 0.0
    profiling_j: float = 0.0
    profiling_s: float = 0.0

    @property
    def key(self) -> str:
        """What makes runs alike."""
        limit = "" if self.setting is None else f"{self.setting:g}"
        return f"{self.batch_size}|{limit}|{self.profiled:d}{self.changed:d}|{self.gpu}"

    def __add__(self, other: Ran) -> Ran:
        return Ran(
            self.batch_size,
            self.gpu,
            self.setting,
            self.profiled,
            self.changed,
            runs=self.runs + other.runs,
            epochs=self.epochs + other.epochs,
            samples=self.samples + other.samples,
            data=self.data + other.data,
            evaluations=self.evaluations + other.evaluations,
            energy_j=self.energy_j + other.energy_j,
            time_s=self.time_s + other.time_s,
            host_j=self.host_j + other.host_j,
            profiling_j=self.profiling_j + other.profiling_j,
            profiling_s=self.profiling_s + other.profiling_s,
        )
