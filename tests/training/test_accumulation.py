"""Out of memory answered by gradient accumulation: the batch size stays, the micro-batch halves, in every form."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.builders import decision
from tests.training.frameworks import TASKS
from tests.training.rig import job_file, v100
from tests.training.test_callbacks import job_of
from zeus_flows import Session, ZeusDataLoader
from zeus_flows.core.attempt import AttemptFailed
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.core.records import Outcome, in_parts
from zeus_flows.errors import ConfigError
from zeus_flows.job_file import JobFile, parse_job
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import Recurrence, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.settings import read_settings
from zeus_flows.training.trainer import LocalTrainer

ARMS = {"batch_sizes": [16, 32, 64], "default_batch_size": 64}


@pytest.fixture(autouse=True)
def _no_tasks() -> None:
    TASKS.clear()


def recurrences(file: JobFile, count: int) -> list[Recurrence]:
    trainer = LocalTrainer(file, read_settings())
    job = file.core(trainer.energy_source)
    ledger = MemoryLedger(job, trainer.energy_source)
    return [run_recurrence(job, LocalSteps(job, ledger, trainer)) for _ in range(count)]


def in_form(form: str, count: int = 3, **parameters: Any) -> list[Recurrence]:
    parameters = {"samples": 192, "hungry": 16, **parameters}
    return recurrences(job_of(form, parameters, accumulate=True, **ARMS), count)


def test_a_batch_size_that_does_not_fit_is_halved_until_it_does_and_that_is_remembered() -> None:
    first, *later = in_form("plain")
    assert [(a.decision.batch_size, a.decision.micro, o.outcome) for a, o in first.attempts] == [
        (64, 64, Outcome.OUT_OF_MEMORY),
        (64, 32, Outcome.OUT_OF_MEMORY),
        (64, 16, Outcome.CONVERGED),
    ]
    assert [a.decision.reason.kind for a, _ in first.attempts[1:]] == [ReasonKind.ACCUMULATE] * 2
    assert first.attempts[1][1].detail == "batch size 64 in micro-batches of 32 does not fit Simulated V100 x1"
    for done in later:
        assert all(o.outcome is not Outcome.OUT_OF_MEMORY and o.micro <= 16 for _, o in done.attempts)
    assert {task.micro for task in TASKS} == {64, 32, 16}


def test_a_profile_is_that_of_its_micro_batch() -> None:
    *_, (_, in_parts) = in_form("plain", 1)[0].attempts
    whole, small = (
        recurrences(job_of("plain", {"samples": 192}, batch_sizes=[b], default_batch_size=b), 1)[0].attempts[0][1]
        for b in (64, 16)
    )
    assert in_parts.profile is not None
    assert small.profile is not None
    assert whole.profile is not None
    assert (in_parts.profile.batch_size, in_parts.profile.micro) == (64, 16)
    at = {m.setting: m.samples_per_s for m in in_parts.profile.measurements}
    assert at[250.0] == pytest.approx(small.profile.measurements[0].samples_per_s)
    assert at[250.0] < 0.8 * whole.profile.measurements[0].samples_per_s


@pytest.mark.parametrize("form", ["huggingface", "lightnings", "listing"])
def test_every_form_answers_alike(form: str) -> None:
    ours, plain = in_form(form), in_form("plain")
    if form != "listing":  # it goes through micro-batches one by one, so that sums of time round otherwise
        assert ours == plain
    assert _in_short(ours) == _in_short(plain)


def _in_short(all_of_them: list[Recurrence]) -> list[Any]:
    attempts = [attempt for done in all_of_them for attempt in done.attempts]
    decided = [(a.decision.batch_size, a.decision.micro, a.decision.reason.kind) for a, _ in attempts]
    took = [pytest.approx(o.energy_j) for _, o in attempts if o.converged]
    return [decided, [(o.outcome, o.epochs) for _, o in attempts], took]


@pytest.mark.parametrize("mode", ["power", "off"])
def test_a_job_whose_batch_size_stays_accumulates_too(mode: str) -> None:
    file = job_of("plain", {"samples": 192, "hungry": 32}, accumulate=True, mode=mode, **ARMS)
    (done,) = recurrences(file, 1)
    assert [o.micro for _, o in done.attempts] == [64, 32]
    assert done.converged


def test_where_nothing_fits_the_recurrence_ends() -> None:
    (done,) = in_form("plain", 1, hungry=0)
    assert not done.converged
    assert [o.micro for _, o in done.attempts] == [64, 32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize(("accumulate", "attempts"), [(True, ["64", "2x32"]), (False, ["64", "32"])])
def test_while_mlflow_is_away_memory_that_runs_out_is_answered_alike(
    monkeypatch: pytest.MonkeyPatch, attempts: list[str], *, accumulate: bool
) -> None:
    read = MemoryLedger.history
    monkeypatch.setattr(MemoryLedger, "history", lambda ledger: replace(read(ledger), degraded=True))
    file = job_of("plain", {"samples": 192, "hungry": 32}, accumulate=accumulate, **ARMS)
    (done,) = recurrences(file, 1)
    assert [in_parts(a.decision) for a, _ in done.attempts] == attempts
    assert all(a.decision.degraded for a, _ in done.attempts)
    assert done.converged


def test_micro_batches_of_a_loader_are_counted_by_optimizer_steps(tmp_path: Path) -> None:
    def train(session: Session, size: int) -> None:
        loader = DataLoader(TensorDataset(torch.zeros(6400)), batch_size=size)
        for _ in session.epochs():
            for _ in session.steps(loader):
                pass
            session.report_metric(0.5)

    found = []
    for size in (64, 16):
        with v100(tmp_path) as gpus:
            session = Session(job_file(max_epochs=2), job_file(max_epochs=2).core(), decision(1), gpus)
            train(session, size)
            found.append(session.observation())
    whole, in_parts = found
    spans = [
        [(m.setting, pytest.approx(m.samples_per_s), m.begun_s) for m in o.profile.measurements]
        for o in found
        if o.profile is not None
    ]
    assert spans[0] == spans[1]
    assert whole.profiling_time_s == pytest.approx(in_parts.profiling_time_s)
    assert whole.time_s == pytest.approx(in_parts.time_s)
    assert whole.samples_per_epoch == in_parts.samples_per_epoch == 6400


def ignores(session: Session) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(64)), batch_size=session.batch_size)
    for _ in session.epochs():
        list(session.steps(loader))
        session.report_metric(0.5)


def ignores_with_a_listing(session: Session) -> None:
    loader = ZeusDataLoader(TensorDataset(torch.zeros(64)), 16, session.max_epochs)
    for _ in loader.epochs():
        list(loader)
        loader.report_metric(0.5)


@pytest.mark.parametrize("function", ["ignores", "ignores_with_a_listing"])
@pytest.mark.parametrize("batch_size", [16, 64])
def test_a_function_that_does_not_follow_is_told_so_in_its_first_run(function: str, batch_size: int) -> None:
    file = job_file(
        train={"function": f"tests.training.test_accumulation:{function}"},
        accumulate=True,
        device="simulated-v100",
        batch_sizes=[16, 64],
    )
    trainer = LocalTrainer(file, read_settings())
    with pytest.raises(AttemptFailed) as caught:
        trainer.train(file.core(), decision(1, batch_size=batch_size), None, lambda _: None)
    assert "the training never asked what goes through at once" in caught.value.observation.detail


def test_a_trainer_that_takes_more_at_once_than_decided_is_refused() -> None:
    options = {"arguments": {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1}}
    file = job_of("huggingface", options, accumulate=True, **ARMS)
    with pytest.raises(AttemptFailed) as caught:
        LocalTrainer(file, read_settings()).train(
            file.core(), replace(decision(1), micro_batch_size=32), None, lambda _: None
        )
    detail = caught.value.observation.detail
    assert "batch size 64 in micro-batches of 32, and an optimizer step would take 64" in detail
    assert "per_device_train_batch_size=session.micro_batch_size" in detail


SCRIPT = """
import sys
micro, steps = int(sys.argv[1]), int(sys.argv[2])
if micro > 16:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory.")
for epoch in range(8):
    for step in range(192 // (micro * steps)):
        print("step")
    print(f"acc={0.5 + 0.1 * epoch}")
"""


def test_a_command_gets_micro_batches_by_its_placeholders(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = {
        "command": ["python", "train.py", "{micro_batch_size}", "{accumulation_steps}"],
        "folder": str(tmp_path),
        "metric": {"pattern": "acc=([0-9.]+)"},
        "progress": {"pattern": "step"},
    }
    file = job_file(train=command, accumulate=True, device="simulated-v100", **ARMS)
    (done,) = recurrences(file, 1)
    assert [(o.batch_size, o.micro, o.outcome.value) for _, o in done.attempts] == [
        (64, 64, "out_of_memory"),
        (64, 32, "out_of_memory"),
        (64, 16, "converged"),
    ]
    assert done.attempts[-1][1].samples_per_epoch == 192


@pytest.mark.parametrize(
    ("words", "fine"),
    [
        ("'{micro_batch_size}', '{accumulation_steps}'", True),
        ("'{batch_size}', '{micro_batch_size}'", True),
        ("'{batch_size_per_gpu}', '{accumulation_steps}'", True),
        ("'{batch_size}'", False),
        ("'{micro_batch_size}', '{batch}'", False),
    ],
)
def test_a_command_that_cannot_take_micro_batches_is_refused(words: str, *, fine: bool) -> None:
    text = (
        "name: a\ntarget: {metric: m, value: 1, better: higher}\nbatch_sizes: [8, 16]\ndefault_batch_size: 8\n"
        f"max_epochs: 3\naccumulate: true\ntrain: {{command: [t, {words}], metric: {{pattern: '(.)'}}}}\n"
    )
    if fine:
        assert parse_job(text).accumulate
        return
    with pytest.raises(ConfigError, match=r"accumulate needs a command that takes micro-batches|is no placeholder"):
        parse_job(text)
