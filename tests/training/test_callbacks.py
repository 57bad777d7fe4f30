"""Callbacks of Hugging Face's Trainer and of Lightning's: the same records as a plain loop over the session."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.builders import decision
from tests.gpu.nvml_emulator import Emulator
from tests.training.frameworks import TASKS, LinearModule, Sentences, Task, TinyBert, bert_trainer, fit, loop
from tests.training.rig import v100
from zeus_flows import Session, ZeusLightningCallback, ZeusTrainerCallback
from zeus_flows.core.attempt import AttemptFailed, EpochReport
from zeus_flows.core.early_stop import CostCut
from zeus_flows.core.power_profile import Part, Parts, PowerProfile
from zeus_flows.core.records import Decision, Observation, Outcome
from zeus_flows.errors import TrainingError
from zeus_flows.gpu.guard import PowerGuard
from zeus_flows.gpu.journal import journal_folder
from zeus_flows.gpu.nvml import Nvml
from zeus_flows.gpu.open_gpus import group_of_real
from zeus_flows.gpu.simulated import Load
from zeus_flows.job_file import JobFile
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import Recurrence, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.settings import read_settings
from zeus_flows.training.trainer import LocalTrainer

FORMS = ["huggingface", "lightnings"]
forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True)
def _no_tasks() -> None:
    TASKS.clear()


def job_of(form: str, parameters: dict[str, Any], **changes: Any) -> JobFile:
    fields: dict[str, Any] = {
        "name": "nightly",
        "train": {"function": f"tests.training.frameworks:{form}", "parameters": parameters},
        "target": {"metric": "progress", "value": 1.0, "better": "higher"},
        "batch_sizes": [16, 32, 64, 128],
        "default_batch_size": 64,
        "max_epochs": 8,
        "device": "simulated-v100",
    }
    return JobFile.model_validate(fields | changes)


def train(
    form: str, *, decided: Decision | None = None, changes: dict[str, Any] | None = None, **parameters: Any
) -> tuple[Observation, list[EpochReport]]:
    """Train once in a form; return the observation and the epochs that were reported on the way."""
    file, epochs = job_of(form, parameters, **(changes or {})), list[EpochReport]()
    trainer = LocalTrainer(file, read_settings())
    return trainer.train(file.core(), decided or decision(1), None, epochs.append), epochs


def failure(form: str, **parameters: Any) -> AttemptFailed:
    with pytest.raises(AttemptFailed) as caught:
        train(form, **parameters)
    return caught.value


# -- the same records ------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize(
    ("outcome", "options"),
    [
        ("converged", {}),
        ("converged", {"micro": 16}),
        ("converged", {"samples": 64}),
        ("converged", {"every": 2}),
        ("converged", {"every": 2, "micro": 32, "samples": 256}),
        ("exhausted", {"epochs": 100.0}),
        ("diverged", {"metrics": (0.1, float("nan"))}),
        ("stopped", {"decided": decision(1, cut=CostCut(1e5))}),
        ("converged", {"changes": {"stop_at_target": False}}),
        ("converged", {"decided": decision(1, setting=150.0)}),
    ],
    ids=str,
)
def test_an_attempt_leaves_the_same_records_as_a_plain_loop(form: str, outcome: str, options: dict[str, Any]) -> None:
    expected, epochs = train("plain", **options)
    assert expected.outcome == outcome
    assert train(form, **options) == (expected, epochs)
    in_a_loop, in_the_framework = TASKS
    assert in_the_framework.seen == in_a_loop.seen
    assert in_the_framework.evaluations == in_a_loop.evaluations


@forms
@pytest.mark.parametrize("micro", [0, 16, 32])
def test_every_sample_counts_once_an_epoch_whatever_is_accumulated(form: str, micro: int) -> None:
    observed, _ = train(form, samples=200, micro=micro)
    assert observed.samples_per_epoch == 200
    assert sum(TASKS[0].seen) == 200 * observed.epochs
    assert set(TASKS[0].seen) == {micro or 64, 200 % (micro or 64)}


@forms
def test_the_target_within_an_epoch_stops_there_and_the_epoch_keeps_its_length(form: str) -> None:
    observed, _ = train(form, epochs=0.5, every=1)
    assert (observed.outcome, observed.epochs, observed.samples_per_epoch) == (Outcome.CONVERGED, 1, 200)
    assert sum(TASKS[0].seen) == 64
    assert observed == train("plain", epochs=0.5, every=1)[0]


def ten_recurrences(form: str, **parameters: Any) -> list[Recurrence]:
    file = job_of(form, {"samples": 96, **parameters}, batch_sizes=[8, 16, 32, 64], default_batch_size=32)
    trainer = LocalTrainer(file, read_settings())
    job = file.core(trainer.energy_source)
    ledger = MemoryLedger(job, trainer.energy_source)
    return [run_recurrence(job, LocalSteps(job, ledger, trainer)) for _ in range(10)]


@forms
@pytest.mark.parametrize("options", [{}, {"micro": 8}], ids=str)
def test_ten_recurrences_take_the_same_decisions_as_a_plain_loop(form: str, options: dict[str, Any]) -> None:
    expected = ten_recurrences("plain", **options)
    assert len({attempt.decision.batch_size for done in expected for attempt, _ in done.attempts}) > 1
    assert ten_recurrences(form, **options) == expected


@pytest.mark.parametrize("every", [0, 2, 4])
def test_steps_evaluations_and_checkpoints_are_told_apart_on_a_gpu_that_measures(
    emulate: Callable[..., Emulator], tmp_path: Path, every: int
) -> None:
    """Samples take 0.1 s each, an evaluation 7 s, a checkpoint after it 3 s, on the emulated driver's clock."""

    def parts(form: str) -> tuple[Parts | None, float, PowerProfile | None]:
        emulator = emulate(NVMLEMU_CLOCK="virtual", NVMLEMU_UPDATE_MS="20")
        emulator.load(Load(20.0, 238.0, active=0.92, clock_bound=0.3))
        devices = Nvml().devices()[:1]
        guard = PowerGuard(devices, journal_folder(tmp_path / form))
        guard.acquire()
        clock: dict[str, Any] = {"clock": emulator.now, "sleep": emulator.advance, "watch_s": None}
        file = job_of(form, {}, power_limit={"profile_seconds": 1.0, "warmup_seconds": 0.2})
        with group_of_real(devices, guard=guard, why_not=None, shared=False, **clock) as gpus:
            session = Session(file, file.core(), decision(1), gpus)
            task = Task(session, samples=256, every=every, micro=32, wait=emulator.advance)
            trained(task, form, tmp_path)
            observed = session.observation()
        return observed.parts, observed.time_s, observed.profile

    expected, time_s, profile = parts("plain")
    evaluations = TASKS[0].evaluations
    assert expected is not None
    assert expected.evaluations.time_s == pytest.approx(7.0 * evaluations)
    if every != 2:  # what comes after an evaluation within the steps is taken for steps
        assert expected.rest.time_s == pytest.approx(3.0 * evaluations)
    for form in FORMS:
        found, took_s, profiled = parts(form)
        assert found is not None
        assert took_s == pytest.approx(time_s)
        assert [limit for limit, _ in found.evaluation] == [limit for limit, _ in expected.evaluation]
        for mine, other in ((found.once, expected.once), (found.rest, expected.rest), *zip_parts(found, expected)):
            assert (mine.count, mine.time_s, mine.energy_j) == pytest.approx(
                (other.count, other.time_s, other.energy_j)
            )
        assert speeds(profiled) == pytest.approx(speeds(profile))


def zip_parts(a: Parts, b: Parts) -> Iterator[tuple[Part, Part]]:
    return ((mine, other) for (_, mine), (_, other) in zip(a.evaluation, b.evaluation, strict=True))


def speeds(profile: PowerProfile | None) -> dict[float, float]:
    return {m.setting: m.samples_per_s for m in profile.measurements} if profile is not None else {}


def trained(task: Task, form: str, folder: Path) -> None:
    """Train in a form, with checkpoints that take time."""
    wait = task.wait

    class Saves(TrainerCallback):  # type: ignore[misc]
        def on_save(self, *_: Any, **__: Any) -> None:
            wait(3.0)

    class SavesToo(lightning.Callback):  # type: ignore[misc]
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                wait(3.0)

    match form:
        case "plain":
            loop(task, after_evaluation=lambda: wait(3.0))
        case "huggingface":
            saving: dict[str, Any] = {
                "save_strategy": "steps" if task.every else "epoch",
                "save_steps": task.every or 500,
            }
            bert_trainer(task, str(folder), Saves(), ZeusTrainerCallback(task.session), **saving).train()
        case "lightnings":
            fit(task, ZeusLightningCallback(task.session), SavesToo())


# -- how attempts end ------------------------------------------------------------------------------------------------


@forms
def test_out_of_memory_is_about_the_batch_size(form: str) -> None:
    observed, _ = train(form, hungry=32)
    assert observed.outcome is Outcome.OUT_OF_MEMORY
    assert observed == train("plain", hungry=32)[0]


@forms
@pytest.mark.parametrize("breaks", [1, 2, 9])
def test_an_exception_is_a_failed_attempt_as_in_a_plain_loop(form: str, breaks: int) -> None:
    expected, found = failure("plain", breaks=breaks), failure(form, breaks=breaks)
    assert isinstance(found.__cause__, ZeroDivisionError)
    assert "frameworks.py" in found.observation.traceback

    def without_traceback(of: AttemptFailed) -> dict[str, Any]:
        kept = {name: getattr(of.observation, name) for name in Observation.__slots__ if name != "traceback"}
        return kept | {"resumable": of.resumable}

    assert without_traceback(found) == without_traceback(expected)


def interrupted(session: Session, *, form: str) -> None:
    """Press Ctrl-C in the third step."""
    task = Task(session)
    learn = task.learn

    def cancel(samples: int) -> None:
        learn(samples)
        if len(task.seen) == 3:
            raise KeyboardInterrupt

    task.learn = cancel  # type: ignore[method-assign]
    if form == "lightnings":
        fit(task, ZeusLightningCallback())
    else:
        bert_trainer(task, "unused", ZeusTrainerCallback()).train()


@forms
def test_cancelling_is_told_from_a_crash(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    function = {"function": "tests.training.test_callbacks:interrupted", "parameters": {"form": form}}
    file = job_of(form, {}, train=function)
    trainer = LocalTrainer(file, read_settings())
    with pytest.raises(AttemptFailed) as caught:
        trainer.train(file.core(), decision(1), None, lambda _: None)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert caught.value.observation.detail == "cancelled: the process was told to stop (SIGINT)"
    assert not caught.value.resumable
    assert signal.getsignal(signal.SIGINT) is before


@forms
def test_a_metric_that_never_comes_is_named_with_those_that_did(form: str) -> None:
    failed = failure(form, metric="score")
    assert isinstance(failed.__cause__, TrainingError)
    assert "target is about 'progress'" in str(failed.__cause__)
    assert re.search(r"what there was: .*score", str(failed.__cause__))
    assert failed.observation.epochs == 1


def test_a_trainer_that_never_evaluates_is_told_so_after_the_first_epoch() -> None:
    failed = failure("huggingface", arguments={"eval_strategy": "no"})
    assert "none was evaluated" in failed.observation.detail
    failed = failure("lightnings", trainer={"limit_val_batches": 0})
    assert "none was evaluated" in failed.observation.detail
    assert failed.observation.epochs == 1


@forms
def test_another_batch_size_than_the_decided_one_is_refused(form: str) -> None:
    options: dict[str, Any] = {"arguments" if form == "huggingface" else "trainer": {}}
    settings = next(iter(options.values()))
    settings["gradient_accumulation_steps" if form == "huggingface" else "accumulate_grad_batches"] = 4
    failed = failure(form, **options)
    assert "the job decided batch size 64" in failed.observation.detail
    assert "64 x 4 = 256 samples" in failed.observation.detail
    assert TASKS[0].seen == []


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def test_a_batch_size_that_the_trainer_may_change_is_refused() -> None:
    failed = failure("huggingface", arguments={"auto_find_batch_size": True})
    assert "leave auto_find_batch_size out" in failed.observation.detail


def test_the_epochs_are_the_jobs_and_too_few_steps_are_refused() -> None:
    observed, _ = train("huggingface", epochs=100.0, arguments={"num_train_epochs": 2})
    assert (observed.outcome, observed.epochs) == (Outcome.EXHAUSTED, 8)
    failed = failure("huggingface", arguments={"max_steps": 5})
    assert "would end after 2 epochs, and the job's max_epochs is 8" in failed.observation.detail


@pytest.mark.parametrize("strategy", ["epoch", "steps", "best"])
def test_checkpoints_belong_to_their_epoch_and_change_no_record(strategy: str) -> None:
    arguments = {"save_strategy": strategy, "save_steps": 3, "metric_for_best_model": "progress"}
    assert train("huggingface", arguments=arguments) == train("plain")


def test_the_metric_may_come_from_one_of_several_data_sets() -> None:
    changes = {"target": {"metric": "set1_progress", "value": 1.0, "better": "higher"}}
    observed, epochs = train("huggingface", arguments={"eval_sets": 2}, changes=changes)
    assert observed.outcome is Outcome.CONVERGED
    assert TASKS[0].evaluations == 2 * observed.epochs
    assert [epoch.metric is not None for epoch in epochs] == [True] * observed.epochs
    first = {"target": {"metric": "eval_set0_progress", "value": 1.0, "better": "higher"}}
    assert train("huggingface", arguments={"eval_sets": 2}, changes=first)[0].outcome is Outcome.CONVERGED


def test_an_evaluation_before_training_and_one_after_it_are_not_the_attempts(tmp_path: Path) -> None:
    with v100(tmp_path) as gpus:
        file = job_of("huggingface", {})
        session = Session(file, file.core(), decision(1), gpus)
        trainer = bert_trainer(Task(session), str(tmp_path), ZeusTrainerCallback(session), eval_on_start=True)
        assert trainer.evaluate()["eval_progress"] > 0
        trainer.train()
        found = session.observation()
        trainer.evaluate()
    assert found.outcome is Outcome.CONVERGED
    assert found.parts is not None
    assert found.parts.evaluations.count == found.epochs
    assert found.epochs == TASKS[0].evaluations - 3


def stopping_by_itself(session: Session) -> None:
    """Stop where another callback says so."""
    task = Task(session, metrics=(0.5, 0.4, 0.3, 0.2, 0.1))
    arguments: dict[str, Any] = {
        "metric_for_best_model": "progress",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
    }
    bert_trainer(task, "out", EarlyStoppingCallback(1), ZeusTrainerCallback(), **arguments).train()


def test_a_training_that_another_callback_stops_says_nothing_of_the_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    file = job_of("", {}, train={"function": "tests.training.test_callbacks:stopping_by_itself"})
    observed = LocalTrainer(file, read_settings()).train(file.core(), decision(1), None, lambda _: None)
    assert (observed.outcome, observed.epochs) == (Outcome.FAILED, 2)
    assert not observed.outcome.blames_the_arm
    assert "training ended by itself" in caplog.text


@forms
def test_outside_of_a_job_a_callback_does_nothing_and_says_so(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with v100(tmp_path) as gpus:
        file = job_of(form, {})
        task = Task(Session(file, file.core(), decision(1), gpus))
        caplog.set_level(logging.WARNING)
        if form == "huggingface":
            trainer = bert_trainer(task, str(tmp_path), ZeusTrainerCallback(), num_train_epochs=6)
            trainer.train()
        else:
            fit(task, ZeusLightningCallback(), max_epochs=6)
    assert sum(task.seen) == 6 * 200
    assert "does nothing: no job of zeus_flows runs this training" in caplog.text


# -- Accelerate ------------------------------------------------------------------------------------------------------


def accelerated(session: Session, *, accumulate: int = 1) -> None:
    """Loop over the session with what Accelerate prepared."""
    task = Task(session)
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    model = TinyBert(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=session.learning_rate)
    loader = DataLoader(Sentences(task.samples), batch_size=session.batch_size // accumulate, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _epoch in session.epochs():
        for batch in session.steps(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        session.report_metric(task.evaluate())


@pytest.mark.parametrize("accumulate", [1, 4])
def test_an_accelerate_loop_goes_through_the_session_as_any_loop(accumulate: int) -> None:
    function = {"function": "tests.training.test_callbacks:accelerated", "parameters": {"accumulate": accumulate}}
    file = job_of("", {}, train=function)
    observed = LocalTrainer(file, read_settings()).train(file.core(), decision(1), None, lambda _: None)
    expected, _ = train("plain")
    assert sum(TASKS[0].seen) == 200 * observed.epochs
    assert (observed.outcome, observed.epochs, observed.samples_per_epoch) == (Outcome.CONVERGED, expected.epochs, 200)
    assert observed.energy_j == pytest.approx(expected.energy_j, rel=0.05)  # profiled between smaller steps


# -- Lightning -------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Return a function that makes the session of a job."""
    with v100(tmp_path) as gpus:

        def make(metric: str = "progress") -> Session:
            file = job_of("lightnings", {}, target={"metric": metric, "value": 1.0, "better": "higher"})
            return Session(file, file.core(), decision(1), gpus)

        yield make


def test_a_training_that_imports_lightning_by_its_other_name_gets_a_callback_of_that_kind() -> None:
    code = (
        "import pytorch_lightning\nfrom zeus_flows import ZeusLightningCallback\n"
        "assert issubclass(ZeusLightningCallback, pytorch_lightning.Callback)\n"
        "print(pytorch_lightning.Trainer(callbacks=[ZeusLightningCallback()], logger=False).callbacks[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ZeusLightningCallback object" in done.stdout, done.stderr


class LogsInTraining(LinearModule):
    """Logs in training what the job asks for; validation logs something else."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Log how far the epochs are."""
        self.log("progress", (self.current_epoch + 1) / 3, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_metric_of_training_counts_in_its_own_epoch(session: Callable[..., Session]) -> None:
    task = Task(session())
    trainer = fit(task, ZeusLightningCallback(task.session), module=LogsInTraining(task, "other"))
    assert (task.session.observation().epochs, trainer.current_epoch) == (3, 3)


def test_epochs_without_a_validation_report_nothing(session: Callable[..., Session]) -> None:
    task = Task(session(), epochs=1.0, metrics=(0.5, 1.0))
    fit(task, ZeusLightningCallback(task.session), check_val_every_n_epoch=2)
    observed = task.session.observation()
    assert observed.parts is not None
    assert (observed.outcome, observed.epochs, observed.parts.evaluations.count) == (Outcome.CONVERGED, 4, 2)
    assert observed.curve == ((2, 0.5), (4, 1.0))


class ByHand(LinearModule):
    """Steps its optimizer by hand, after two batches."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Accumulate two batches."""
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
        return loss


def test_a_module_that_accumulates_by_hand_is_counted_by_its_batches(session: Callable[..., Session]) -> None:
    task = Task(session(), micro=32)
    fit(task, ZeusLightningCallback(task.session), module=ByHand(task), accumulate_grad_batches=1)
    observed = task.session.observation()
    assert (observed.outcome, observed.samples_per_epoch) == (Outcome.CONVERGED, 200)
    assert sum(task.seen) == 200 * observed.epochs


def test_limited_batches_are_the_epoch(session: Callable[..., Session]) -> None:
    task = Task(session())
    fit(task, ZeusLightningCallback(task.session), limit_train_batches=2)
    assert task.session.observation().samples_per_epoch == 128


def test_a_second_fit_of_one_attempt_is_refused(session: Callable[..., Session]) -> None:
    task = Task(session())
    callback = ZeusLightningCallback(task.session)
    fit(task, callback)
    with pytest.raises(TrainingError, match="once per attempt"):
        fit(task, callback)


def test_a_session_that_a_loader_without_length_trains(session: Callable[..., Session]) -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(192, 4))

    task = Task(session())

    class Streaming(LinearModule):
        def train_dataloader(self) -> Any:
            return DataLoader(Stream(), batch_size=64, collate_fn=lambda rows: [torch.stack(rows)])

        def val_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(8, 4)))

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    lightning.Trainer(callbacks=[ZeusLightningCallback(task.session)], **options).fit(Streaming(task))
    assert task.session.observation().samples_per_epoch == 192


# -- without the packages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("ZeusTrainerCallback", "transformers", "huggingface"), ("ZeusLightningCallback", "lightning", "lightning")],
)
def test_without_its_package_a_callback_says_what_to_install(name: str, package: str, extra: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None\nfrom zeus_flows import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"needs {package}: pip install 'zeus-flows[{extra}]'" in done.stderr
