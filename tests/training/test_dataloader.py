"""The paper's Listing 1, inside a job and on its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pynvml
import pytest
import torch
from torch.utils.data import TensorDataset

from tests.builders import decision
from tests.gpu.nvml_emulator import Emulator
from zeus_flows import Session, ZeusDataLoader, current_session
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.errors import ConfigError, TrainingError
from zeus_flows.gpu.simulated import Load
from zeus_flows.job_file import JobFile
from zeus_flows.settings import read_settings
from zeus_flows.training.trainer import LocalTrainer


class Training:
    """A model that gets better by 0.3 an epoch, and counts what it is shown."""

    def __init__(self, samples: int = 640) -> None:
        self.train_set = TensorDataset(torch.zeros(samples, 1))
        self.eval_set = TensorDataset(torch.zeros(100, 1))
        self.epochs: list[int] = []
        self.sizes: list[int] = []
        self.evaluated = 0

    def listing_1(self, batch_size: int, max_epochs: int, target_metric: float, **options: Any) -> Any:
        train_set, eval_set = self.train_set, self.eval_set

        # The paper's lines, but for what `learn` and `evaluate` stand for.
        train_loader = ZeusDataLoader(train_set, batch_size, max_epochs, target_metric, **options)
        eval_loader = ZeusDataLoader(eval_set, batch_size)

        for epoch in train_loader.epochs():  # may early stop
            for batch in train_loader:
                self.sizes.append(len(batch[0]))
            for batch in eval_loader:
                self.evaluated += len(batch[0])
            validation_metric = 0.3 * epoch
            self.epochs.append(epoch)
            train_loader.report_metric(validation_metric)
        return train_loader


TRAINING = Training()


def listing(session: Session) -> None:
    assert current_session() is session
    TRAINING.listing_1(32, 10, 0.8)


def test_the_listing_runs_unchanged_on_its_own_and_stops_at_the_target(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    loader = training.listing_1(64, 10, 0.8)
    assert training.epochs == [1, 2, 3]
    assert (len(training.sizes), training.evaluated) == (30, 300)
    assert loader.observation is None
    assert "only counting epochs: no NVIDIA GPU" in caplog.text


def test_on_its_own_it_stops_at_max_epochs_and_on_nan() -> None:
    training = Training()
    training.listing_1(64, 2, 0.8)
    assert training.epochs == [1, 2]
    loader: ZeusDataLoader[Any] = ZeusDataLoader(training.train_set, 64, 10, 0.8)
    for epoch in loader.epochs():
        assert epoch == 1
        loader.report_metric(float("nan"))


def test_a_simulated_gpu_is_used_only_where_it_is_asked_for() -> None:
    loader = Training(samples=6400).listing_1(64, 10, 0.8, device="simulated-v100")
    observed: Observation = loader.observation
    assert (observed.outcome, observed.epochs, observed.energy_source) == (Outcome.CONVERGED, 3, "simulated")
    assert observed.profile is not None
    assert observed.profile.complete


def test_on_a_real_gpu_it_tunes_the_power_limit_and_puts_the_previous_one_back(
    emulate: Callable[..., Emulator],
) -> None:
    emulator = emulate()
    emulator.load(Load(1.0, 238.0, active=0.92, clock_bound=0.1))
    before_w = 225.0
    pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(0), int(before_w * 1e3))
    seen: list[float] = []
    loader: ZeusDataLoader[Any] = ZeusDataLoader(
        Training(200).train_set, 1, 3, 0.9, eta=1.0, profile_seconds=0.05, warmup_seconds=0.0
    )
    for _epoch in loader.epochs():
        for _batch in loader:
            time.sleep(0.005)
            seen.append(emulator.limit_w())
        loader.report_metric(0.1)
    assert loader.observation is not None
    assert loader.observation.energy_source == "measured"
    assert loader.observation.setting == seen[-1]
    assert list(dict.fromkeys(seen))[:2] == [250.0, 225.0]
    assert emulator.limit_w() == before_w


def test_inside_a_job_the_job_decides_batch_size_target_and_epochs(caplog: pytest.LogCaptureFixture) -> None:
    job_file = JobFile.model_validate(
        {
            "name": "nightly",
            "train": {"function": "tests.training.test_dataloader:listing"},
            "target": {"metric": "accuracy", "value": 0.5, "better": "higher"},
            "batch_sizes": [64, 128],
            "default_batch_size": 64,
            "max_epochs": 10,
            "device": "simulated-v100",
        }
    )
    with caplog.at_level(logging.WARNING):
        observed = LocalTrainer(job_file, read_settings()).train(
            job_file.core(), decision(1, batch_size=128), None, lambda _: None
        )
    assert (observed.outcome, observed.epochs, observed.samples_per_epoch) == (Outcome.CONVERGED, 2, 640)
    assert TRAINING.sizes == [128] * 10
    assert TRAINING.evaluated == 200
    assert current_session() is None
    assert "the job's batch_size is 128: 32" in caplog.text
    assert "the job's target_metric is 0.5: 0.8" in caplog.text


def test_a_loader_that_evaluates_has_no_epochs_and_one_that_trains_needs_a_target() -> None:
    with pytest.raises(TrainingError, match="evaluates"):
        next(iter(ZeusDataLoader(Training().eval_set, 64).epochs()))
    with pytest.raises(ConfigError, match="target_metric"):
        ZeusDataLoader(Training().train_set, 64, 10)


def test_options_of_torchs_loader_pass_through() -> None:
    loader: ZeusDataLoader[Any] = ZeusDataLoader(Training().train_set, 60, 1, 0.9, shuffle=True, drop_last=True)
    assert len(loader) == 10
    assert [len(batch[0]) for batch in loader] == [60] * 10
