"""A script that knows nothing of us, a Trainer, a LightningModule, a torchrun script and the paper's listing.

Each is the training of `tests.training.frameworks.Task`: with the same seeds all of them take the same decisions, and
running out of memory, a kill and a cancellation leave the same records.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.utilities.engine import capture_sigterm

from tests.training.test_callbacks import job_of
from tests.training.test_command import is_alive
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.durable import DurableLedger
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.open_ledger import open_durable
from zeus_flows.recurrence.loop import Recurrence, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.settings import read_settings
from zeus_flows.training.trainer import LocalTrainer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("forms")]

FORMS = ["script", "huggingface", "lightnings", "torchrun", "listing"]
SAMPLES, FITS = 96, 32
ARMS = {"batch_sizes": [8, 16, 32, 64], "default_batch_size": 64, "max_epochs": 10}

#: What `Task` does, by somebody who has never heard of it.
LEARN = """
import math, os, random, sys, time
batch_size, seed, marks = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
needed = max(1, round(4.0 * (0.7 + batch_size / 200) * random.Random(seed).uniform(0.8, 1.2)))

def learn(epoch, step):
    if marks and (epoch, step) == (2, 0):
        open(f"{marks[0]}-{os.getpid()}", "w").close()
    if marks:
        time.sleep(0.02)
    if batch_size > 32:
        raise MemoryError("torch.OutOfMemoryError: CUDA out of memory.")
"""
SCRIPT = (
    LEARN
    + """
import torch
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
for epoch in range(1, 10**6 if marks else 11):
    for step in range(math.ceil(96 / batch_size)):
        learn(epoch, step)
        optimizer.step()
    print(f"progress={0.0 if marks else (64 * epoch // needed) / 64}")
"""
)
#: Ranks without torch: importing it ten times over is all that this would take longer for; `test_ranks.py` has gloo.
RANKS = (
    LEARN
    + """
first = os.environ["RANK"] == "0"
assert os.environ["WORLD_SIZE"] == "2"
for epoch in range(1, 10**6 if marks else 11):
    for step in range(math.ceil(96 / batch_size)):
        learn(epoch, step)
        if first:
            print("step")
    if first:
        print(f"progress={0.0 if marks else (64 * epoch // needed) / 64}")
"""
)


def job_in(form: str, folder: Path, *, marks: Path | None = None, **changes: Any) -> JobFile:
    """Return the job in a form; where it leaves marks, it trains until it is told to stop."""
    changes = ARMS | ({"max_epochs": 10**6, "target": ENDLESS} if marks else {}) | changes
    if form not in ("script", "torchrun"):
        options = {"samples": SAMPLES, "hungry": FITS} | ({"marks": str(marks)} if marks else {})
        return job_of(form, options, **changes)
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT if form == "script" else RANKS))
    train = {
        "command": ["python", "train.py", "{batch_size}", "{seed}", *([str(marks)] if marks else [])],
        "folder": str(folder),
        "metric": {"pattern": "progress=([0-9.]+)"},
        "samples_per_epoch": SAMPLES,
        "grace_seconds": 5,
    }
    if form == "torchrun":
        train["progress"] = {"pattern": "step"}
        changes["gpus"] = 2
    return job_of(form, {}, train=train, **changes)


ENDLESS = {"metric": "progress", "value": 2.0, "better": "higher"}


def recurrences(file: JobFile, count: int) -> list[Recurrence]:
    trainer = LocalTrainer(file, read_settings())
    job = file.core(trainer.energy_source)
    ledger = MemoryLedger(job, trainer.energy_source)
    return [run_recurrence(job, LocalSteps(job, ledger, trainer)) for _ in range(count)]


@cache
def by_a_plain_loop(gpus: int) -> list[Recurrence]:
    """Return ten recurrences of a function that loops over its session, in this process."""
    file = job_of("plain", {"samples": SAMPLES, "hungry": FITS}, gpus=gpus, **ARMS)
    train = file.train.model_copy(update={"torchrun": False})
    return recurrences(file.model_copy(update={"train": train}), 10)


def whole(observation: Observation) -> Observation:
    """Return an observation; where memory ran out, without how far its first step had come, which forms tell apart."""
    if observation.outcome is not Outcome.OUT_OF_MEMORY:
        return observation
    nothing: dict[str, Any] = dict.fromkeys(("energy_j", "time_s", "profiling_energy_j", "profiling_time_s"), 0.0)
    return replace(observation, **nothing, epochs=0, samples_per_epoch=0, parts=None, profile=None)


@pytest.mark.parametrize("form", FORMS)
def test_ten_recurrences_take_the_same_decisions_and_leave_the_same_records(
    form: str, tmp_path: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite_uri)  # for a command's output, which has no run in memory
    expected = by_a_plain_loop(2 if form == "torchrun" else 1)
    done = recurrences(job_in(form, tmp_path), 10)
    ours, theirs = ([pair for each in ten for pair in each.attempts] for ten in (done, expected))
    assert [attempt.decision for attempt, _ in ours] == [attempt.decision for attempt, _ in theirs]
    assert [whole(o) for _, o in ours] == [whole(o) for _, o in theirs]
    assert [o.outcome for _, o in theirs][:2] == [Outcome.OUT_OF_MEMORY, Outcome.CONVERGED]
    assert len({o.batch_size for _, o in theirs if o.converged}) > 1
    assert all(each.converged for each in done)


# -- told to stop ----------------------------------------------------------------------------------------------------


def ledger_of(file: JobFile, uri: str, folder: Path) -> DurableLedger:
    return open_durable(
        file.core(), tracking_uri=uri, energy_source=file.energy_source, state_dir=folder, comparable=file.comparable
    )


def a_recurrence_elsewhere(file: JobFile, uri: str, folder: Path) -> int:
    """Run a recurrence in a forked process, with signals as Prefect has them in a flow; return its id."""
    if (pid := os.fork()) != 0:
        return pid
    with suppress(BaseException), (folder / "said").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what follows Prefect's own handling of it
        trainer = LocalTrainer(file, read_settings(), tracking_uri=uri)
        ledger = ledger_of(file, uri, folder)
        try:
            with capture_sigterm():
                run_recurrence(file.core(), LocalSteps(file.core(), ledger, trainer))
        finally:
            ledger.close()
    os._exit(0)


def trainers(marks: Path) -> list[int]:
    return [int(found.name.rpartition("-")[2]) for found in marks.parent.glob(f"{marks.name}-*")]


def wait_for(what: str, happened: Any, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, what
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("form", FORMS)
def test_a_training_that_is_stopped_or_killed_leaves_the_same_record_and_nothing_behind(
    form: str, number: signal.Signals, tmp_path: Path, sqlite_uri: str
) -> None:
    marks = tmp_path / "mark"
    file = job_in(form, tmp_path, marks=marks, batch_sizes=[16, 32], default_batch_size=32)
    pid = a_recurrence_elsewhere(file, sqlite_uri, tmp_path)
    try:
        wait_for("training", lambda: len(trainers(marks)) == (file.gpus or 1))
        os.kill(pid, number)
        _, status = os.waitpid(pid, 0)
    except BaseException:
        sys.stdout.write((tmp_path / "said").read_text())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    assert os.WIFSIGNALED(status) == (number is signal.SIGKILL)
    wait_for("an end of what trained", lambda: not any(map(is_alive, trainers(marks))), 30)

    ledger = ledger_of(file, sqlite_uri, tmp_path)
    try:
        ledger.sweep()
        history = ledger.history()
    finally:
        ledger.close()
    client = MlflowClient(tracking_uri=sqlite_uri)
    experiment = client.get_experiment_by_name("nightly")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'")
    assert (run.data.tags[names.OUTCOME], run.info.status) == ("failed", "FAILED")
    if number is signal.SIGKILL:
        assert run.data.tags[names.DETAIL].startswith("declared dead: ")
    else:
        assert run.data.tags[names.DETAIL] == f"cancelled: the process was told to stop ({number.name})"
    assert not history.in_flight
    assert not history.state.shortages, "nobody is blamed"
