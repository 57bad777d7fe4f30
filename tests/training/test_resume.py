"""A training that broke goes on from its checkpoint: nothing is counted, measured or logged twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import decision
from tests.training.rig import SAMPLES, Loader, attempt, job_file, v100
from zeus_flows.core.attempt import AttemptFailed, EpochReport
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.errors import TrainingError
from zeus_flows.job_file import JobFile
from zeus_flows.settings import read_settings
from zeus_flows.training.checkpoint import Checkpoints, Progress
from zeus_flows.training.session import Session
from zeus_flows.training.trainer import LocalTrainer

SEEN: list[Any] = []


def fragile(session: Session, *, breaks_in: list[int], save_every: int = 1, resumes: bool = True) -> None:
    """Learn one step an epoch towards 10; break in the middle of given epochs, once each."""
    model = torch.zeros(1)
    saved = session.load() if resumes else None
    if saved is not None:
        model = saved["model"]
    SEEN.append(("starts", session.resumed_epoch))
    for epoch in session.epochs():
        for i, _ in enumerate(session.steps([0] * 100)):
            if i == 50 and epoch in breaks_in:
                breaks_in.remove(epoch)
                raise ConnectionError("the disk of the data went away")
        model += 1
        session.report_metric(float(model))
        if epoch % save_every == 0:
            session.save({"model": model, "epoch": epoch})


def trainer(**parameters: Any) -> tuple[JobFile, LocalTrainer]:
    file = job_file(
        train={"function": "tests.training.test_resume:fragile", "parameters": parameters},
        target={"metric": "steps", "value": 10, "better": "higher"},
        max_epochs=20,
        device="simulated-v100",
    )
    return file, LocalTrainer(file, read_settings())


def tries(**parameters: Any) -> tuple[list[AttemptFailed], Observation, list[EpochReport]]:
    """Train as the Prefect task does: again where that goes on from a checkpoint."""
    SEEN.clear()
    file, local = trainer(**parameters)
    failures: list[AttemptFailed] = []
    epochs: list[EpochReport] = []
    while True:
        try:
            return failures, local.train(file.core(), decision(1), None, epochs.append), epochs
        except AttemptFailed as failure:
            if not failure.resumable:
                raise
            failures.append(failure)


def test_a_training_that_broke_goes_on_after_its_last_checkpoint() -> None:
    failures, observed, _ = tries(breaks_in=[4, 7])
    assert SEEN == [("starts", 0), ("starts", 3), ("starts", 6)]
    assert [f.observation.outcome for f in failures] == [Outcome.FAILED] * 2
    assert (observed.outcome, observed.epochs, observed.metric) == (Outcome.CONVERGED, 10, 10.0)


def test_energy_and_time_are_those_of_a_training_that_never_broke() -> None:
    _, broken, _ = tries(breaks_in=[4, 7])
    _, whole, _ = tries(breaks_in=[])
    assert broken.energy_j == pytest.approx(whole.energy_j, rel=0.02)
    assert broken.time_s == pytest.approx(whole.time_s, rel=0.02)
    assert broken.profiling_time_s == pytest.approx(whole.profiling_time_s, rel=0.2)
    assert broken.setting == whole.setting


def test_epochs_are_logged_once_even_where_the_checkpoint_is_older_than_the_last_logged_one() -> None:
    _, observed, epochs = tries(breaks_in=[6], save_every=4)
    assert SEEN == [("starts", 0), ("starts", 4)]
    assert [epoch.epoch for epoch in epochs] == list(range(1, 11))
    assert [epoch.metric for epoch in epochs] == [float(e) for e in range(1, 11)]
    assert observed.epochs == 10


def test_a_profile_that_was_measured_before_it_broke_is_not_measured_again() -> None:
    failures, observed, _ = tries(breaks_in=[4])
    before = failures[0].observation
    assert before.profile is not None
    assert before.profile.complete
    assert observed.profile == before.profile


def test_without_progress_since_the_last_try_it_is_not_tried_again() -> None:
    with pytest.raises(AttemptFailed) as caught:
        tries(breaks_in=[4, 4, 5])
    assert not caught.value.resumable
    assert SEEN == [("starts", 0), ("starts", 3)]


def test_a_train_function_that_saves_nothing_is_not_tried_again() -> None:
    with pytest.raises(AttemptFailed) as caught:
        tries(breaks_in=[4], save_every=100)
    assert not caught.value.resumable
    assert "the disk of the data went away" in caught.value.observation.traceback
    assert "test_resume.py" in caught.value.observation.traceback


def test_a_train_function_that_never_loads_starts_over_and_counts_from_there() -> None:
    _, observed, epochs = tries(breaks_in=[4], resumes=False)
    assert SEEN == [("starts", 0), ("starts", 0)]
    assert observed.epochs == 10
    assert [epoch.epoch for epoch in epochs] == list(range(1, 11))


def test_checkpoints_are_gone_when_the_attempt_has_ended() -> None:
    tries(breaks_in=[4])
    assert list(read_settings().state_dir.glob("checkpoints/*/state.pt")) == []


def test_what_a_killed_process_left_is_swept_and_a_running_ones_checkpoint_is_not(tmp_path: Path) -> None:
    left = tmp_path / "left-behind"
    left.mkdir()
    (left / "lock").touch()
    (left / "state.pt").touch()
    running, mine = Checkpoints(tmp_path), Checkpoints(tmp_path)
    running.save({"a": 1}, Progress(epoch=1), None)
    mine.save({"a": 2}, Progress(epoch=1), None)
    assert not left.exists()
    assert running.load() == {"a": 1}


class Sneaky:
    """What a checkpoint must not hold."""


def test_only_what_loads_without_running_code_can_be_saved(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="tensors, numbers, strings"):
        Checkpoints(tmp_path).save({"object": Sneaky()}, Progress(epoch=1), None)


def test_saving_and_loading_have_their_place(tmp_path: Path) -> None:
    with v100(tmp_path) as gpus:
        session = Session(job_file(), job_file().core(), decision(1), gpus, checkpoints=Checkpoints(tmp_path))
        assert session.load() is None
        with pytest.raises(TrainingError, match="inside"):
            session.save({})
        for _ in session.epochs():
            with pytest.raises(TrainingError, match="before"):
                session.load()
            break


def test_where_nothing_is_kept_saving_does_nothing(tmp_path: Path) -> None:
    with v100(tmp_path) as gpus:
        observed, _ = attempt(gpus, 0.95)
    assert observed.converged


def test_the_parts_and_the_curve_of_a_training_that_broke_are_those_of_one_that_did_not(tmp_path: Path) -> None:
    def train(*, breaks_in: int | None) -> Observation:
        checkpoints = Checkpoints(tmp_path / str(breaks_in))
        for last in (breaks_in is None, True):
            with v100(tmp_path) as gpus:
                session = Session(job_file(), job_file().core(), decision(1), gpus, checkpoints=checkpoints)
                session.load()
                for epoch in session.epochs():
                    if epoch == breaks_in and not last:
                        checkpoints.profile = session.failed(Outcome.FAILED, "broke").profile
                        break
                    for _batch in session.steps(Loader(SAMPLES, 64)):
                        pass
                    session.report_metric(0.15 * epoch)
                    session.save({"epoch": epoch})
                if session.converged:
                    return session.observation()
        raise AssertionError("it never converged")

    whole, broken = train(breaks_in=None), train(breaks_in=4)
    assert whole.parts is not None
    assert broken.parts is not None
    assert (broken.parts.once.count, broken.parts.rest.count) == (1, whole.parts.rest.count)
    assert broken.parts.evaluations.count == whole.parts.evaluations.count
    assert broken.curve == whole.curve
