"""Data-parallel training: two ranks under torchrun, two simulated GPUs, one session."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.builders import decision
from zeus_flows.core.attempt import AttemptFailed
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.errors import ConfigError
from zeus_flows.job_file import JobFile, parse_job
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.settings import read_settings
from zeus_flows.training.keeping import open_model
from zeus_flows.training.trainer import LocalTrainer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

SAMPLES = 256


def together(session: Any, *, seen: str, breaks: str = "") -> None:
    """Average a counter over the ranks in every step; the metric rises by 0.31 an epoch."""
    dist.init_process_group("gloo")
    data = TensorDataset(torch.arange(SAMPLES, dtype=torch.float32))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=session.world_size, rank=session.rank)
    loader = DataLoader(data, batch_size=session.batch_size_per_rank, sampler=sampler)
    trained = 0
    for epoch in session.epochs():
        for (batch,) in session.steps(loader):
            total = batch.sum()
            dist.all_reduce(total)
            trained += len(batch)
            if breaks == "memory" and session.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            if breaks == "killed" and session.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        session.report_metric(0.31 * epoch if session.rank == 0 else 0.0)
    session.keep({"rank": torch.tensor([float(session.rank)])}, epochs=epoch)
    Path(seen, f"rank-{session.rank}").write_text(f"{epoch} {trained} {session.batch_size} {session.converged}")
    dist.destroy_process_group()


def in_parts(session: Any, *, seen: str) -> None:
    """The same, with as many samples at once as the job decided; more than 8 on a rank do not fit."""
    dist.init_process_group("gloo")
    data = TensorDataset(torch.arange(SAMPLES, dtype=torch.float32))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=session.world_size, rank=session.rank)
    loader = DataLoader(data, batch_size=session.micro_batch_size_per_rank, sampler=sampler)
    steps = 0
    for epoch in session.epochs():
        for number, (batch,) in enumerate(session.steps(loader), start=1):
            if len(batch) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory")
            if number % session.accumulation_steps == 0:
                dist.all_reduce(batch.sum())
                steps += 1
        session.report_metric(0.31 * epoch)
    Path(seen, f"rank-{session.rank}").write_text(f"{epoch} {steps}")
    dist.destroy_process_group()


def job(train: dict[str, Any], **changes: Any) -> JobFile:
    return JobFile.model_validate(
        {
            "name": "nightly",
            "target": {"metric": "accuracy", "value": 0.9, "better": "higher"},
            "batch_sizes": [32, 64, 128],
            "default_batch_size": 64,
            "max_epochs": 8,
            "device": "simulated-v100",
            "gpus": 2,
            "train": train,
        }
        | changes
    )


def train(job_file: JobFile) -> Observation:
    trainer = LocalTrainer(job_file, read_settings())
    return trainer.train(job_file.core(), decision(1), None, lambda _: None)


def by_function(folder: Path, **parameters: Any) -> JobFile:
    spec = "tests.training.test_ranks:together"
    return job({"function": spec, "parameters": {"seen": str(folder)} | parameters})


def test_all_ranks_train_their_share_and_stop_together(tmp_path: Path) -> None:
    observed = train(by_function(tmp_path))
    assert (observed.outcome, observed.epochs, observed.gpu.count) == (Outcome.CONVERGED, 3, 2)
    assert observed.samples_per_epoch == SAMPLES
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["3 384 64 True"] * 2
    (folder,) = (read_settings().state_dir / "models").glob("*/model")
    kept = open_model(str(folder))
    assert (kept.weights()["rank"].tolist(), kept.about) == ([0.0], {"epochs": 3})


def test_energy_is_that_of_both_gpus(tmp_path: Path) -> None:
    two, one = train(by_function(tmp_path)), train(job({"function": "tests.training.test_ranks:alone"}, gpus=1))
    assert (one.epochs, one.samples_per_epoch) == (two.epochs, two.samples_per_epoch)
    assert two.gpu.max_power_w == 2 * one.gpu.max_power_w
    assert two.time_s < one.time_s < two.energy_j
    assert two.energy_j > 0.8 * one.energy_j


def alone(session: Any) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(SAMPLES)), batch_size=session.batch_size)
    for epoch in session.epochs():
        list(session.steps(loader))
        session.report_metric(0.31 * epoch)


def test_a_rank_that_is_killed_fails_the_attempt(tmp_path: Path) -> None:
    with pytest.raises(AttemptFailed) as caught:
        train(by_function(tmp_path, breaks="killed"))
    assert "the ranks ended with exit code 1" in caught.value.observation.detail
    assert not caught.value.observation.outcome.blames_the_arm


def test_a_rank_out_of_memory_is_about_the_batch_size(tmp_path: Path) -> None:
    assert train(by_function(tmp_path, breaks="memory")).outcome is Outcome.OUT_OF_MEMORY


def test_ranks_that_run_out_of_memory_get_smaller_micro_batches(tmp_path: Path) -> None:
    train_section = {"function": "tests.training.test_ranks:in_parts", "parameters": {"seen": str(tmp_path)}}
    job_file = job(train_section, accumulate=True, batch_sizes=[32], default_batch_size=32)
    trainer = LocalTrainer(job_file, read_settings())
    core = job_file.core(trainer.energy_source)
    done = run_recurrence(core, LocalSteps(core, MemoryLedger(core, trainer.energy_source), trainer))
    assert [(o.batch_size, o.micro, o.outcome.value) for _, o in done.attempts] == [
        (32, 32, "out_of_memory"),
        (32, 16, "converged"),
    ]
    assert done.attempts[-1][1].samples_per_epoch == SAMPLES
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["3 24"] * 2


def test_a_script_is_started_once_for_each_gpu_and_its_steps_count_once(tmp_path: Path) -> None:
    script = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    open(f"rank-{os.environ['RANK']}", "w").write(" ".join(sys.argv[1:]))
    for epoch in range(1, 9):
        for _ in range(4):
            optimizer.step()
        dist.barrier()
        if os.environ["RANK"] == "0":
            print(f"acc={0.31 * epoch}")
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    words = ["python", "train.py", "{batch_size}", "{batch_size_per_gpu}", "{gpus}"]
    observed = train(job({"command": words, "folder": str(tmp_path), "metric": {"pattern": "acc=([0-9.]+)"}}))
    assert (observed.outcome, observed.epochs, observed.samples_per_epoch) == (Outcome.CONVERGED, 3, 256)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["64 32 2"] * 2


def test_batch_sizes_that_cannot_be_shared_out_are_refused() -> None:
    text = (
        "name: a\ntarget: {metric: m, value: 1, better: higher}\nbatch_sizes: [8, 15]\ndefault_batch_size: 8\n"
        "max_epochs: 3\ngpus: 2\ntrain: {function: 'a:b'}\n"
    )
    with pytest.raises(ConfigError, match="15 cannot be shared out evenly"):
        parse_job(text)
