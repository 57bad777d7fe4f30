"""`ZeusDataLoader`, as in the paper's Listing 1.

    train_loader = ZeusDataLoader(train_set, batch_size, max_epochs, target_metric)
    eval_loader = ZeusDataLoader(eval_set, batch_size)

    for epoch in train_loader.epochs():  # may early stop
        for batch in train_loader:
            learn(batch)
        for batch in eval_loader:
            evaluate(batch)
        train_loader.report_metric(validation_metric)

Inside a job's train function the loader is a face of the session: the job decides the batch size, the target, the
power limit and when to stop. On its own it tunes the power limit of the GPU it finds; where there is none it counts
epochs and stops at the target. Nothing is simulated unless `device` asks for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from torch.utils.data import DataLoader, Dataset

from zeus_flows.core.reasons import Reason, ReasonKind
from zeus_flows.core.records import Decision, Observation
from zeus_flows.errors import ConfigError, NoDevice, TrainingError
from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.open_gpus import open_gpus
from zeus_flows.job_file import JobFile
from zeus_flows.settings import read_settings
from zeus_flows.training.session import Session, current_session
from zeus_flows.training.trainer import least_span_s

log = logging.getLogger(__name__)
T = TypeVar("T")


class ZeusDataLoader(DataLoader[T]):
    """A torch DataLoader that trains for less energy. With `max_epochs` it trains; without, it evaluates.

    Args:
        dataset: What to load.
        batch_size: Samples per batch. A training loader inside a job takes the job's decision instead.
        max_epochs: Train no longer than this. Inside a job, the job file's value counts.
        target_metric: Stop when `report_metric` is given this or better. Inside a job, the job file's counts.
        better: Which way the metric is better; the paper's listing means accuracy. Inside a job, as the job file says.
        mode: On its own: `power` tunes the limit, `observe` only says what that would save, `off` measures.
        eta: On its own: the energy-time knob, 0 (time) to 1 (energy).
        device: On its own: what the power limit is set on; `simulated-v100` asks for a simulated GPU.
        profile_seconds: On its own: seconds each power limit is measured for, after `warmup_seconds`.
        warmup_seconds: On its own: seconds after a change of the limit that are not measured.
        options: What else torch's DataLoader takes, by name: `shuffle`, `num_workers`, ...

    Attributes:
        observation: On its own, once `epochs` has ended: what training took. None where there was no GPU.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int = 1,
        max_epochs: int | None = None,
        target_metric: float | None = None,
        *,
        better: Literal["higher", "lower"] = "higher",
        mode: Literal["power", "observe", "off"] = "power",
        eta: float = 0.5,
        device: str = "auto",
        profile_seconds: float = 5.0,
        warmup_seconds: float = 1.0,
        **options: Any,
    ) -> None:
        self.observation: Observation | None = None
        self._trains = max_epochs is not None
        self._session = current_session() if self._trains else None
        self._job_file: JobFile | None = None
        self._metric: float | None = None
        if self._session is not None:
            _say_what_differs(self._session, batch_size, max_epochs, target_metric)
            batch_size = self._session.parts(heeded=False).micro_batch_size
        elif self._trains:
            if target_metric is None:
                raise ConfigError("a ZeusDataLoader that trains needs a target_metric beside max_epochs")
            self._job_file = JobFile.model_validate(
                {
                    "name": "zeus-data-loader",
                    "mode": mode,
                    "device": device,
                    "batch_sizes": [batch_size],
                    "default_batch_size": batch_size,
                    "target": {"metric": "metric", "value": target_metric, "better": better},
                    "max_epochs": max_epochs,
                    "eta": eta,
                    "power_limit": {"profile_seconds": profile_seconds, "warmup_seconds": warmup_seconds},
                    "train": {"function": "stand:alone"},
                }
            )
        super().__init__(dataset, batch_size=batch_size, **options)

    @property
    def accumulation_steps(self) -> int:
        """How many batches an optimizer step takes: more than one only in a job that says `accumulate: true`."""
        return 1 if self._session is None else self._session.accumulation_steps

    def epochs(self) -> Iterator[int]:
        """Yield epoch numbers from 1 until the target is reached, or training on would not pay.

        Raises:
            TrainingError: this loader evaluates: it was given no max_epochs.
        """
        if not self._trains:
            raise TrainingError("this ZeusDataLoader evaluates; give the one that trains max_epochs and target_metric")
        if self._session is not None:
            yield from self._session.epochs()
            return
        assert self._job_file is not None
        try:
            gpus = self._open(self._job_file)
        except NoDevice as error:
            log.warning("only counting epochs: %s", error)
            yield from self._count(self._job_file)
            return
        with gpus:
            decision = Decision(
                1,
                1,
                self._job_file.default_batch_size,
                Reason(ReasonKind.ALONE, "no job decided"),
                seed=0,
                policy="power",
            )
            session = self._session = Session(
                self._job_file, self._job_file.core(gpus.energy_source), decision, gpus, least_span_s=least_span_s(gpus)
            )
            try:
                with session.as_current():
                    yield from session.epochs()
                if self._metric is not None:
                    self.observation = session.observation()
            finally:
                session.close()
                self._session = None
        if self.observation is not None:
            log.info("%.0f J in %.1f s", self.observation.energy_j, self.observation.time_s)

    def report_metric(self, value: float) -> None:
        """Tell how good the model is after this epoch."""
        self._metric = float(value)
        if self._session is not None:
            self._session.report_metric(value)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        """Yield batches; those of a training loop are measured."""
        batches = super().__iter__
        if not self._trains:
            return _evaluate(batches)
        if self._session is None or not self._session.training:
            return batches()
        return self._session.steps(_Batches(self, batches))

    def _count(self, job_file: JobFile) -> Iterator[int]:
        for epoch in range(1, job_file.max_epochs + 1):
            yield epoch
            if self._metric is not None and (math.isnan(self._metric) or job_file.target.reached(self._metric)):
                return

    def _open(self, job_file: JobFile) -> Gpus:
        settings = read_settings()
        return open_gpus(
            job_file.device,
            workload=None,
            batch_size=job_file.default_batch_size,
            samples_per_epoch=None,
            state_dir=settings.state_dir,
            visible=settings.cuda_visible_devices,
            zeusd=ZeusdAddress(settings.zeusd_socket, settings.zeusd_host_port, settings.zeusd_token),
        )


class _Batches:
    """A loader's batches without the loader's own `__iter__`."""

    def __init__(self, loader: Any, batches: Any) -> None:
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self._loader, self._batches = loader, batches

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Any:
        return self._batches()


def _evaluate(batches: Any) -> Iterator[Any]:
    """Yield the batches of a loader that evaluates; inside of a training, they are measured as an evaluation."""
    session = current_session()
    if session is None:
        yield from batches()
        return
    with session.evaluation():
        yield from batches()


def _say_what_differs(session: Session, batch_size: int, max_epochs: int | None, target_metric: float | None) -> None:
    stated = {"batch_size": batch_size, "max_epochs": max_epochs, "target_metric": target_metric}
    job = {
        "batch_size": session.batch_size,
        "max_epochs": session.max_epochs,
        "target_metric": session.target.value,
    }
    for name, value in stated.items():
        if value is not None and value != job[name]:
            log.warning("the job's %s is %g: %g, given to ZeusDataLoader, does not count", name, job[name], value)
