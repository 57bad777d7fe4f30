"""A recurring job on the emulated driver: real sessions, real pynvml, a clock that the training moves on.

Beside its steps it starts up, compiles, evaluates and writes checkpoints, as people's jobs do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.gpu.nvml_emulator import Emulator
from tests.training.rig import job_file
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.job import Job
from zeus_flows.core.overheads import NOTHING, Overheads
from zeus_flows.core.power_profile import Gpu, Knob, PowerProfile
from zeus_flows.core.records import Decision, Observation
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.guard import PowerGuard
from zeus_flows.gpu.journal import journal_folder
from zeus_flows.gpu.nvml import Nvml
from zeus_flows.gpu.open_gpus import group_of_real, open_gpus
from zeus_flows.gpu.simulated import CHIPS, Load, Workload
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import Recurrence, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.training.session import Session

SAMPLES = 8192
CHIP = CHIPS["v100"]
WAITING = Load(1.0, CHIP.idle_w, active=0.0, clock_bound=0.0)


@dataclass(frozen=True)
class Training:
    """What the emulated job does.

    Attributes:
        epochs: Epochs to the target at each batch size.
        evaluation: Seconds of an evaluation at full clock.
        every: An evaluation after so many epochs.
        every_steps: Instead, one after so many steps, between them.
        accumulation: Batches that the loader splits a batch size into.
        start_s: Seconds before the first epoch.
        compile_s: Seconds that the first step takes more.
        checkpoint_s: Seconds of a checkpoint, after each epoch.
        busy: Whether an evaluation loads the GPU as training does; otherwise it waits for the host.
        workload: What the steps put on the GPU.
    """

    epochs: dict[int, int]
    evaluation: float = 0.0
    every: int = 1
    every_steps: int | None = None
    accumulation: int = 1
    start_s: float = 0.0
    compile_s: float = 0.0
    checkpoint_s: float = 0.0
    busy: bool = True
    workload: Workload = field(default_factory=lambda: Workload(seconds_per_epoch=40.0, half_batch=250.0))

    def load(self, batch_size: int) -> Load:
        return self.workload.at(batch_size, CHIP)

    def evaluations(self, batch_size: int, epochs: int) -> int:
        if self.every_steps is not None:
            return epochs * (math.ceil(SAMPLES / batch_size) * self.accumulation // self.every_steps)
        return sum(epoch % self.every == 0 or epoch == self.epochs[batch_size] for epoch in range(1, epochs + 1))

    def true_cost(self, batch_size: int, *, eta: float = 0.5) -> float:
        """Return what a run costs at the best of the GPU's limits, by the chip's model alone."""
        epochs = self.epochs[batch_size]
        load, evaluations = self.load(batch_size), self.evaluations(batch_size, epochs)
        costs = []
        for limit in (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0):
            seconds, watts = CHIP.epoch(load, limit)
            slower, drawn = (seconds / load.seconds_per_epoch, watts) if self.busy else (1.0, CHIP.idle_w)
            evaluation_s = self.evaluation * slower
            waiting_s = self.start_s + epochs * self.checkpoint_s
            time_s = epochs * seconds + evaluations * evaluation_s + waiting_s + self.compile_s
            energy_j = epochs * seconds * watts + evaluations * evaluation_s * drawn + waiting_s * CHIP.idle_w
            energy_j += self.compile_s * CHIP.idle_w
            costs.append(eta * energy_j + (1 - eta) * 250.0 * time_s)
        return min(costs)


class Loader:
    """Batches that know their size, for a data set of `SAMPLES`."""

    def __init__(self, batch_size: int) -> None:
        self.dataset, self.batch_size = range(SAMPLES), batch_size

    def __len__(self) -> int:
        return math.ceil(SAMPLES / self.batch_size)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


class EmulatedJob:
    """Recurrences of a training under a policy, over an in-memory ledger."""

    def __init__(self, emulator: Emulator | None, folder: Path, training: Training, **changes: object) -> None:
        self._emulator, self.training, self._folder = emulator, training, folder
        arms = sorted(training.epochs)
        fields: dict[str, object] = {
            "batch_sizes": arms,
            "default_batch_size": arms[-1],
            "max_epochs": 4 * max(training.epochs.values()),
        }
        self.file: JobFile = job_file(**fields | changes)
        self.job: Job = self.file.core()
        with self._gpus(arms[-1]) as gpus:
            self.gpu: Gpu = gpus.gpu
            self.power_limits_w = gpus.power.limits_w if self.file.knob is Knob.POWER_LIMIT else ()
            self.energy_source = gpus.energy_source
        self.ledger = MemoryLedger(self.job, self.energy_source)
        self.steps = LocalSteps(self.job, self.ledger, self)

    def recur(self, times: int) -> list[Recurrence]:
        return [run_recurrence(self.job, self.steps) for _ in range(times)]

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
        with self._gpus(decision.batch_size) as gpus:
            session = Session(self.file, job, decision, gpus, known_profile=profile, overheads=overheads, report=report)
            self._train(session)
            return session.observation()

    def _train(self, session: Session) -> None:
        training, b = self.training, session.batch_size
        load, micro = training.load(b), b // training.accumulation
        self._pass(WAITING, training.start_s)
        compiled = False
        for epoch in session.epochs():
            for step, _ in enumerate(session.steps(Loader(micro)), start=1):
                if not compiled:
                    compiled = True
                    self._pass(WAITING, training.compile_s)
                self._pass(load, micro / SAMPLES * load.seconds_per_epoch)
                if training.every_steps is not None and step % training.every_steps == 0:
                    with session.evaluation():
                        self._evaluate(load)
                    session.report_metric(0.0)
            last = epoch == training.epochs[b]
            if training.every_steps is None and (epoch % training.every == 0 or last):
                self._evaluate(load)
                session.report_metric(float(last))
            elif training.every_steps is not None:
                session.report_metric(float(last))
            self._pass(WAITING, training.checkpoint_s)

    def _evaluate(self, load: Load) -> None:
        training = self.training
        self._pass(load if training.busy else WAITING, training.evaluation)

    def _pass(self, load: Load, seconds: float) -> None:
        """Let something happen that takes so many seconds at full clock."""
        if seconds <= 0:
            return
        self.emulator.load(load)
        self.emulator.advance(seconds * self.emulator.epoch_seconds() / load.seconds_per_epoch)

    @property
    def emulator(self) -> Emulator:
        assert self._emulator is not None
        return self._emulator

    @contextmanager
    def _gpus(self, batch_size: int) -> Iterator[Gpus]:
        devices = Nvml().devices()[:1]
        guard = PowerGuard(devices, journal_folder(self._folder))
        guard.acquire()
        clock, sleep = self.emulator.now, self.emulator.advance
        with group_of_real(
            devices,
            guard=guard,
            why_not=None,
            shared=False,
            clock=clock,
            sleep=sleep,
            watch_s=None,
            knob=self.file.knob,
        ) as gpus:
            yield gpus


class SimulatedJob(EmulatedJob):
    """The same on the simulated GPU, which knows of steps and evaluations alone."""

    def __init__(self, folder: Path, training: Training, **changes: object) -> None:
        super().__init__(None, folder, training, **changes)

    def _pass(self, load: Load, seconds: float) -> None:
        """Let the simulated GPU's own clock go on."""

    @contextmanager
    def _gpus(self, batch_size: int) -> Iterator[Gpus]:
        workload = replace(self.training.workload, evaluation_seconds=self.training.evaluation)
        with open_gpus(
            "simulated-v100",
            workload=workload,
            batch_size=batch_size,
            samples_per_epoch=None,
            state_dir=self._folder,
            visible=None,
            knob=self.file.knob,
        ) as gpus:
            yield gpus
