"""A recurrence that takes no time, for tests that kill processes or take MLflow away."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  imported before children are forked, not in each of them
import psycopg2  # type: ignore[import-untyped]  # noqa: F401
import pytest

from tests.builders import GPU, JOB, observation
from zeus_flows import killpoints as points
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power_profile import Gpu, PowerProfile
from zeus_flows.core.records import Decision, EnergySource, Observation, Outcome
from zeus_flows.errors import StoreUnavailable
from zeus_flows.job_file import Target
from zeus_flows.ledger import delivery, durable
from zeus_flows.ledger.durable import DurableLedger
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.open_ledger import open_durable
from zeus_flows.recurrence.loop import Attempt, Recurrence, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.training.gate import Gate


class BriefTrainer:
    """Ends attempts as scripted, then converges; every observation has an energy of its own, to be found again by."""

    gpu: Gpu = GPU
    power_limits_w: tuple[float, ...] = (250.0, 150.0)
    energy_source = EnergySource.SIMULATED

    def __init__(self, *outcomes: Outcome, energy_j: float = 5000.0, between: Callable[[int], None] = lambda _: None):
        self._outcomes, self._energy_j, self._between = list(outcomes), energy_j, between

    def train(
        self,
        job: Job,
        decision: Decision,
        profile: PowerProfile | None,
        report: Callable[[EpochReport], None],
        *,
        overheads: Overheads = NOTHING,
        attempt_id: str = "",
    ) -> Observation:
        for epoch in (1, 2, 3):
            self._between(epoch)
            report(EpochReport(epoch, energy_j=10.0 * epoch, time_s=1.0 * epoch, metric=0.1))
        self._energy_j += 1
        return observation(
            decision.recurrence,
            decision.attempt,
            decision.batch_size,
            outcome=self._outcomes.pop(0) if self._outcomes else Outcome.CONVERGED,
            energy_j=self._energy_j,
            explores=decision.explores,
            fingerprint=job.fingerprint,
        )


class RecordingSteps(LocalSteps):
    """Notes in a file what the ledger has acknowledged."""

    def __init__(
        self, job: Job, ledger: DurableLedger, trainer: BriefTrainer, acknowledged: Path, gate: Gate | None = None
    ) -> None:
        super().__init__(job, ledger, trainer, gate=gate)
        self._acknowledged = acknowledged

    def observe(self, attempt: Attempt, observation: Observation) -> None:
        super().observe(attempt, observation)
        with self._acknowledged.open("a") as notes:
            notes.write(json.dumps(observation.energy_j) + "\n")


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a ledger wait a moment for an MLflow that is away, not seconds."""
    monkeypatch.setattr(durable, "Store", lambda uri, **_: Store(uri, patience_s=0.1))
    monkeypatch.setattr(delivery, "STALL_S", 0.1)


@contextmanager
def opened(uri: str, folder: Path, job: Job = JOB) -> Iterator[DurableLedger]:
    with closing(
        open_durable(job, tracking_uri=uri, energy_source=EnergySource.SIMULATED, state_dir=folder / "state")
    ) as ledger:
        yield ledger


def recur(
    uri: str,
    folder: Path,
    *outcomes: Outcome,
    energy_j: float = 5000.0,
    job: Job = JOB,
    trainer: BriefTrainer | None = None,
    gate: Gate | None = None,
) -> Recurrence:
    """Run a recurrence as the flow does: janitor first."""
    with opened(uri, folder, job) as ledger:
        ledger.sweep()
        trainer = trainer or BriefTrainer(*outcomes, energy_j=energy_j)
        return run_recurrence(job, RecordingSteps(job, ledger, trainer, folder / "acknowledged", gate))


def acknowledged(folder: Path) -> list[float]:
    path = folder / "acknowledged"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def die_at(point: str, uri: str, folder: Path, scenario: str) -> None:
    """Run a recurrence of two attempts and be killed at a named point of it (in a process of its own)."""
    away = scenario == "outage"

    def hook(name: str) -> None:
        nonlocal away
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)
        away = away and name != "after-spool-decision"

    def call(self: Store, function: Callable[[], object]) -> object:
        if away:
            raise StoreUnavailable("MLflow: away for a test")
        return answered(self, function)

    answered = Store._call
    Store._call = call  # type: ignore[assignment, method-assign]
    vars(delivery).update(HEARTBEAT_S=0.0, _RETRY_S=0.05)
    points.listen(hook)
    job = replace(JOB, fingerprint="f1") if scenario == "changed" else JOB
    job = replace(JOB, window=2) if scenario == "windowed" else job
    lasting_s = 10.0 if point == "after-heartbeat" else 0.0  # long enough to say that one is alive
    trainer = BriefTrainer(Outcome.EXHAUSTED, energy_j=7000.0, between=lambda _: time.sleep(lasting_s))
    gate = gate_that_finds(0.95 if scenario == "skipping" else 0.5) if scenario in ("gated", "skipping") else None
    recur(uri, folder, job=job, trainer=trainer, gate=gate)


def gate_that_finds(accuracy: float) -> Gate:
    """Return a gate whose evaluation says so, and takes no time."""
    return Gate(lambda _: accuracy, Target(metric="accuracy", value=0.9, better="higher"))


def leave_open(uri: str, folder: Path) -> None:
    """Decide an exploration and end without a word (in a process of its own)."""
    die_at("after-train", uri, folder, "known")
