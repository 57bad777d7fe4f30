"""Train functions in this process: found by name, and what becomes of their exceptions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.builders import decision
from zeus_flows.core.attempt import AttemptFailed
from zeus_flows.core.records import Decision, Observation, Outcome
from zeus_flows.errors import ConfigError, NoDevice
from zeus_flows.job_file import JobFile
from zeus_flows.settings import read_settings
from zeus_flows.training.session import Session
from zeus_flows.training.trainer import LocalTrainer, _is_out_of_memory, code_revision, load_function

FIELDS = {
    "name": "nightly",
    "target": {"metric": "accuracy", "value": 0.9, "better": "higher"},
    "batch_sizes": [32, 64, 128],
    "default_batch_size": 64,
    "max_epochs": 3,
    "device": "simulated-v100",
}


def good(session: Session, *, metric: float = 0.95) -> None:
    for _ in session.epochs():
        for _batch in session.steps([0] * 10):
            pass
        session.report_metric(metric)


def crashing(session: Session) -> None:
    for _ in session.epochs():
        list(session.steps([0] * 10))
        raise ZeroDivisionError("the user's bug")


def hungry(session: Session) -> None:
    for _ in session.epochs():
        raise torch.OutOfMemoryError("CUDA out of memory")


def train(name: str, decided: Decision | None = None, **parameters: object) -> Observation:
    function = {"function": f"tests.training.test_trainer:{name}", "parameters": parameters}
    job_file = JobFile.model_validate(FIELDS | {"train": function})
    trainer = LocalTrainer(job_file, read_settings())
    return trainer.train(job_file.core(), decided or decision(1), None, lambda _: None)


def test_parameters_reach_the_train_function() -> None:
    assert train("good").outcome is Outcome.CONVERGED
    assert train("good", metric=0.2).outcome is Outcome.EXHAUSTED


def test_a_crash_in_user_code_is_a_failed_attempt_and_the_exception_is_kept() -> None:
    with pytest.raises(AttemptFailed) as caught:
        train("crashing")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    observed = caught.value.observation
    assert (observed.outcome, observed.detail) == (Outcome.FAILED, "ZeroDivisionError: the user's bug")
    assert not observed.outcome.blames_the_arm


def test_out_of_memory_is_about_the_batch_size_and_not_an_error() -> None:
    observed = train("hungry", decision(1, batch_size=128))
    assert observed.outcome is Outcome.OUT_OF_MEMORY
    assert "128" in observed.detail


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no_such_module:train", "there is no module 'no_such_module'"),
        ("tests.training.test_trainer:trian", "has no function 'trian'; did you mean 'train'"),
    ],
)
def test_a_function_that_is_not_there_is_named(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_function(spec)


def test_a_module_in_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_training.py").write_text("def train(session):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert callable(load_function("my_own_training:train"))


def test_a_machine_without_a_gpu_says_what_to_type() -> None:
    function = {"function": "tests.training.test_trainer:good"}
    job_file = JobFile.model_validate(FIELDS | {"device": "nvml", "train": function})
    with pytest.raises(NoDevice, match="--simulate v100"):
        LocalTrainer(job_file, read_settings())


def test_gpus_that_cannot_be_had_fail_the_attempt_and_blame_no_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    job_file = JobFile.model_validate(FIELDS | {"train": {"function": "tests.training.test_trainer:good"}})
    trainer = LocalTrainer(job_file, read_settings())

    def gone(*_: object, **__: object) -> None:
        raise NoDevice("the driver has no GPU")

    monkeypatch.setattr("zeus_flows.training.trainer.open_gpus", gone)
    with pytest.raises(AttemptFailed) as caught:
        trainer.train(job_file.core(), decision(1), None, lambda _: None)
    assert isinstance(caught.value.__cause__, NoDevice)
    assert caught.value.observation.outcome is Outcome.FAILED


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"]
)
def test_out_of_memory_is_known_by_any_name(text: str) -> None:
    def wrapped() -> None:
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            raise ValueError("training failed") from error

    with pytest.raises(ValueError, match="training failed") as caught:
        wrapped()
    assert _is_out_of_memory(caught.value)
    assert not _is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.slow
def test_the_code_revision_is_the_commit_of_the_functions_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "revised_training.py").write_text("def train(session):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    function = load_function("revised_training:train")
    assert code_revision(function) == ""
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "revised_training.py"), (*identity, "commit", "-qm", "first")):
        subprocess.run(["git", *words], check=True, cwd=tmp_path)
    first = code_revision(function)
    assert len(first) == 40
    (tmp_path / "revised_training.py").write_text("def train(session):\n    return None\n")
    assert code_revision(function) == f"{first}-dirty"
