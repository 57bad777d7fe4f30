"""A job's drift gate: what it makes of what its function returns, and of a function that breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training_functions import write_job
from zeus_flows.core.gate import GateCheck, Question
from zeus_flows.core.job import Mode
from zeus_flows.errors import ConfigError
from zeus_flows.job_file import Target, load_job
from zeus_flows.settings import read_settings
from zeus_flows.training.gate import Gate, load_gate
from zeus_flows.training.trainer import LocalTrainer

ACCURACY = Target(metric="accuracy", value=0.9, better="higher")
LOSS = Target(metric="log_loss", value=0.3, better="lower")


def check(found: object, target: Target = ACCURACY, *, max_age: int | None = None, recurrence: int = 5) -> GateCheck:
    return Gate(lambda _: found, target, max_age=max_age).check(Question(recurrence, 4, 1, 64), Mode.FULL)


@pytest.mark.parametrize(
    ("found", "target", "skips"),
    [
        (0.9, ACCURACY, True),
        (0.8999, ACCURACY, False),
        (0.3, LOSS, True),
        (0.31, LOSS, False),
        ({"accuracy": 0.95, "f1": 0.2}, ACCURACY, True),
        (float("inf"), LOSS, False),
    ],
)
def test_a_model_that_meets_the_target_skips_the_recurrence(found: object, target: Target, skips: bool) -> None:
    done = check(found, target)
    assert (done.skips, done.passes) == (skips, skips)
    assert done.verdict == ("skip" if skips else "retrain")
    assert "the model of recurrence 4" in done.text
    assert f"{target.value:g}" in done.text


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (float("nan"), "accuracy is not a number"),
        ("good", "it returned a str"),
        ({"f1": 0.95}, "it returned f1, and not the target's metric accuracy"),
        (None, "returned None"),
    ],
)
def test_what_cannot_be_read_skips_nothing_and_says_why(found: object, why: str) -> None:
    done = check(found)
    assert (done.skips, done.value) == (False, None)
    assert why in done.text


def test_what_asking_takes_is_measured_on_the_gpus(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path / "job.yaml", simulation={"evaluation_seconds": 20.0}))
    trainer = LocalTrainer(job, read_settings())
    done = Gate(lambda _: 0.95, ACCURACY, measure=trainer.measure).check(Question(5, 4, 1, 64), Mode.FULL)
    assert done.time_s == pytest.approx(20.0)
    assert 20.0 * 34 < done.energy_j < 20.0 * 250


def test_a_function_that_breaks_skips_nothing_and_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(question: Question) -> float:
        raise FileNotFoundError("model.pt")

    done = Gate(breaks, ACCURACY).check(Question(5, 4, 1, 64), Mode.FULL)
    assert (done.skips, done.value) == (False, None)
    assert "FileNotFoundError: model.pt" in done.text
    assert "FileNotFoundError" in caplog.text


def test_a_model_that_is_too_old_is_trained_again_however_good_it_is() -> None:
    assert check(0.99, max_age=3, recurrence=6).skips
    old = check(0.99, max_age=3, recurrence=7)
    assert (old.passes, old.skips) == (True, False)
    assert "it is 3 recurrences old (max_age 3)" in old.text


def test_a_job_file_names_its_gate(tmp_path: Path) -> None:
    assert load_gate(load_job(write_job(tmp_path / "without.yaml"))) is None
    section = {"function": "tests.training_functions:evaluate", "parameters": {"progress": 1.5}, "max_age": 7}
    gate = load_gate(load_job(write_job(tmp_path / "with.yaml", gate=section)))
    assert gate is not None
    assert gate.check(Question(2, 1, 1, 128), Mode.FULL).value == 1.5


def test_a_gate_that_cannot_be_found_is_a_wrong_job_file(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path / "job.yaml", gate={"function": "tests.training_functions:evaluat"}))
    with pytest.raises(ConfigError, match=r"gate\.function: .* did you mean 'evaluate'\?"):
        load_gate(job)


def test_a_gate_changes_nothing_that_runs_are_compared_by(tmp_path: Path) -> None:
    without = load_job(write_job(tmp_path / "without.yaml"))
    gated = load_job(write_job(tmp_path / "with.yaml", gate={"function": "tests.training_functions:evaluate"}))
    assert gated.fingerprint == without.fingerprint
