"""The energy of one model: what its recurrence took, what came before it, and how far that can be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zeus_flows.core.account import Account, given_up
from zeus_flows.core.amounts import NOTHING, Took
from zeus_flows.core.job_report import energy_of
from zeus_flows.core.prices import Charged, Tariff, Used, charge_all
from zeus_flows.core.records import EnergySource, Observation

#: What NVIDIA states of its GPUs' power readings: they are within so much of the truth.
SENSOR_TO: Final = 0.05
#: How far off the model of a simulated GPU was on the traces it was fitted on.
MODEL_TO: Final = 0.02

_METHODS: Final = {
    "counter": "measured by the GPUs' own energy counters",
    "sampled power": "measured by sampling the GPUs' power and adding it up",
    "model": "simulated: a model of the GPU, not a measurement",
}


@dataclass(frozen=True, slots=True)
class Statement:
    """What may be said of a model's energy.

    Attributes:
        job: Whose model.
        recurrence: The recurrence that made it.
        attempts: What was observed of its attempts, in their order; the last one made the model.
        energy_source: Where the joules come from.
        energy_j: Of all attempts, the machine beside its GPUs included; None where there are no joules.
        host_j: That machine's part.
        time_s: Training time of all attempts.
        complete: Whether every reading can be believed; otherwise it took more than stated.
        off_by: What the method may be off by, as a share.
        charged: What it cost and emitted.
        before: What all recurrences before it took, as far as they count; None where that was not asked.
    """

    job: str
    recurrence: int
    attempts: tuple[Observation, ...]
    energy_source: EnergySource
    energy_j: float | None
    host_j: float
    time_s: float
    complete: bool
    off_by: float | None
    charged: Charged
    before: Took | None = None

    @property
    def method(self) -> str:
        """How the energy is known, as a phrase."""
        sensors = list(dict.fromkeys(o.sensor for o in self.attempts if o.sensor))
        if self.energy_source is EnergySource.NONE:
            return "not measured: no sensor, or a shared GPU"
        if self.energy_source is EnergySource.SIMULATED:
            return _METHODS["model"]
        named = [_METHODS[sensor] for sensor in sensors if sensor in _METHODS]
        return (
            "; ".join(named) or "measured by the GPUs' energy counters or sampled power (the record does not say which)"
        )


def state_energy(
    job: str,
    attempts: Sequence[tuple[float, Observation]],
    tariff: Tariff,
    *,
    before: Account | None = None,
) -> Statement:
    """Return what may be said of a model that a recurrence's last attempt made.

    Args:
        job: The job's name.
        attempts: When each began, in seconds since 1970, and what was observed; at least one.
        tariff: What energy costs and emits.
        before: What the fold had kept before that recurrence.
    """
    observed = tuple(o for _, o in attempts)
    source = observed[-1].energy_source
    joules = source is not EnergySource.NONE
    used = [Used(began_s, o.time_s, energy_of(o)) for began_s, o in attempts] if joules else []
    return Statement(
        job=job,
        recurrence=observed[-1].recurrence,
        attempts=observed,
        energy_source=source,
        energy_j=sum(energy_of(o) for o in observed) if joules else None,
        host_j=sum(o.host_energy_j for o in observed),
        time_s=sum(o.time_s for o in observed),
        complete=all(o.energy_complete for o in observed),
        off_by={EnergySource.MEASURED: SENSOR_TO, EnergySource.SIMULATED: MODEL_TO}.get(source),
        charged=charge_all(tariff, used),
        before=None if before is None else everything(before),
    )


def everything(account: Account) -> Took:
    """Return all that a job's recurrences took, by what the fold keeps: compared or not, lost, failed or skipped.

    Energy includes the machine beside the GPUs; `count` is the number of recurrences.
    """
    account = given_up(account)
    era, closed = account.era.add(account.newest), account.closed
    runs = [Took(r.runs, r.energy_j, r.time_s, r.host_j) for r in era.ran.values()]
    took = sum((*runs, era.not_whole, closed.not_compared, closed.unknown, account.lost, account.skipped), NOTHING)
    other = sum((*era.stopped.values(), *era.out_of_memory.values(), account.failed), NOTHING)
    return Took(
        took.count + closed.recurrences,
        took.energy_j + took.host_j + other.energy_j + other.host_j + closed.spent.energy_j,
        took.time_s + other.time_s + closed.spent.time_s,
        took.host_j + other.host_j + closed.spent.host_j,
    )
