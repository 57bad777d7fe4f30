"""Small records for tests that are about something else."""

from __future__ import annotations

from typing import Any

from zeus_flows.core.gate import GateCheck, Question
from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import Gpu, PowerProfile, SettingMeasurement
from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.records import Decision, EnergySource, Observation, Outcome

GPU = Gpu(model="Simulated V100", count=1, max_power_w=250.0)
JOB = Job(name="nightly", batch_sizes=(32, 64, 128), default_batch_size=64, max_epochs=20, fingerprint="f0")


def decision(recurrence: int, attempt: int = 1, batch_size: int = 64, **changes: Any) -> Decision:
    """Return a decision with a reason."""
    fields: dict[str, Any] = {
        "reason": Reason(ReasonKind.FIRST_RUN, "because"),
        "seed": 7,
        "policy": "thompson",
    } | changes
    return Decision(recurrence=recurrence, attempt=attempt, batch_size=batch_size, **fields)


def profile(batch_size: int = 64, *, complete: bool = True) -> PowerProfile:
    """Return a profile of two limits."""
    measurements = (SettingMeasurement(250.0, 200.0, 100.0), SettingMeasurement(150.0, 130.0, 90.0))
    return PowerProfile(batch_size, GPU, measurements, complete=complete)


def gate_check(recurrence: int, *, skips: bool, trained_in: int = 1, value: float | None = 0.91) -> GateCheck:
    """Return what a gate found about the model of an earlier recurrence."""
    question = Question(recurrence, trained_in, 1, 64)
    return GateCheck(question, "accuracy", value, skips, skips, "because", {"accuracy": value or 0.0, "f1": 0.5}, 2.0)


def observation(recurrence: int, attempt: int = 1, batch_size: int = 64, **changes: Any) -> Observation:
    """Return a converged observation with a complete profile."""
    fields: dict[str, Any] = {
        "outcome": Outcome.CONVERGED,
        "epochs": 5,
        "energy_j": 5000.0,
        "time_s": 40.0,
        "gpu": GPU,
        "energy_source": EnergySource.SIMULATED,
        "samples_per_epoch": 1000,
        "setting": 150.0,
        "profile": profile(batch_size),
        "fingerprint": "f0",
    }
    return Observation(recurrence=recurrence, attempt=attempt, batch_size=batch_size, **fields | changes)
