"""One attempt on a simulated GPU, with what tests want to change about it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.builders import decision
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.power_profile import Knob, PowerProfile
from zeus_flows.core.records import Decision, Observation
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.open_gpus import group_of_simulated, open_gpus
from zeus_flows.gpu.simulated import CHIPS, Load, SimulatedDevice, VirtualClock, Workload
from zeus_flows.job_file import JobFile
from zeus_flows.training.checkpoint import Checkpoints
from zeus_flows.training.session import Session

SAMPLES = 6400
LIMITS = (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0)


def job_file(**changes: Any) -> JobFile:
    fields: dict[str, Any] = {
        "name": "nightly",
        "train": {"function": "my.module:train"},
        "target": {"metric": "accuracy", "value": 0.9, "better": "higher"},
        "batch_sizes": [32, 64, 128],
        "default_batch_size": 64,
        "max_epochs": 10,
    }
    return JobFile.model_validate(fields | changes)


class Loader:
    """As many batches as a data set of `samples` has; the batches are of no interest."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.dataset = range(samples)
        self._batches = math.ceil(samples / batch_size)

    def __iter__(self) -> Any:
        return iter(range(self._batches))


@contextmanager
def v100(tmp_path: Path, batch_size: int = 64, seconds_per_epoch: float = 60.0) -> Iterator[Gpus]:
    with open_gpus(
        "simulated-v100",
        workload=Workload(seconds_per_epoch=seconds_per_epoch),
        batch_size=batch_size,
        samples_per_epoch=None,
        state_dir=tmp_path,
        visible=None,
    ) as gpus:
        yield gpus


class FittedWork:
    """A measured job's load on a simulated GPU, step by step."""

    def __init__(self, device: SimulatedDevice, clock: VirtualClock, load: Load) -> None:
        self.samples_per_epoch: int | None = None
        self._device, self._clock = device, clock
        device.carry(load)

    def ran(self, samples: int) -> None:
        assert self.samples_per_epoch is not None
        seconds = self._device.seconds_for(samples / self.samples_per_epoch)
        self._device.work(seconds)
        self._clock.advance(seconds)

    def evaluated(self) -> None:
        """Take no time: what is tested with it is training."""


class DisturbedWork(FittedWork):
    """The same, but for a while a limit is faster or slower than it ought to be.

    Args:
        limit_w: The limit.
        speed: By how much its speed is off.
        times: How many times the limit is disturbed when it is set.
    """

    def __init__(
        self, device: SimulatedDevice, clock: VirtualClock, load: Load, *, limit_w: float, speed: float, times: float
    ) -> None:
        super().__init__(device, clock, load)
        self._of_w, self._speed, self._times = limit_w, speed, times
        self.set_w: list[float] = []

    def ran(self, samples: int) -> None:
        limit_w = self._device.power_limit_w()
        if self.set_w[-1:] != [limit_w]:
            self.set_w.append(limit_w)
        disturbed = limit_w == self._of_w and self.set_w.count(limit_w) <= self._times
        assert self.samples_per_epoch is not None
        seconds = self._device.seconds_for(samples / self.samples_per_epoch) / (1 + disturbed * self._speed)
        self._device.work(seconds)
        self._clock.advance(seconds)


def disturbed_gpu(kind: str, load: Load, *, limit_w: float, speed: float, times: float = 1) -> tuple[Gpus, list[float]]:
    """Return a simulated GPU on which one limit reads wrong, and the limits as they are set."""
    clock = VirtualClock()
    device = SimulatedDevice(kind, clock)
    work = DisturbedWork(device, clock, load, limit_w=limit_w, speed=speed, times=times)
    return group_of_simulated([device], clock, work=work), work.set_w  # type: ignore[arg-type]


def fitted_gpu(kind: str, load: Load, knob: Knob = Knob.POWER_LIMIT) -> Gpus:
    """Return a simulated GPU that carries a measured job."""
    assert kind in CHIPS
    clock = VirtualClock()
    device = SimulatedDevice(kind, clock)
    work = FittedWork(device, clock, load)
    return group_of_simulated([device], clock, work=work, knob=knob)  # type: ignore[arg-type]


def attempt(
    gpus: Gpus,
    *metrics: float,
    file: JobFile | None = None,
    decided: Decision | None = None,
    known: PowerProfile | None = None,
    samples: int = SAMPLES,
    checkpoints: Checkpoints | None = None,
    made_with: str = "",
) -> tuple[Observation, list[EpochReport]]:
    """Train with given metrics, one per epoch, then 0.1 for ever; return the observation and the epochs."""
    file, decided = file or job_file(), decided or decision(1)
    epochs: list[EpochReport] = []
    session = Session(
        file,
        file.core(),
        decided,
        gpus,
        known_profile=known,
        report=epochs.append,
        checkpoints=checkpoints,
        made_with=made_with,
    )
    loader = Loader(samples, decided.batch_size)
    for _, metric in zip(session.epochs(), [*metrics, *[0.1] * 1000], strict=False):
        for _batch in session.steps(loader):
            pass
        session.report_metric(metric)
    return session.observation(), epochs
