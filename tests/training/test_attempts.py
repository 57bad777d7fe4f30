"""Whole recurrences with a real trainer: what does not fit, what breaks, and one batch size alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training_functions import write_job
from zeus_flows.core.early_stop import NoCut
from zeus_flows.core.job import Mode
from zeus_flows.core.records import EnergySource, Observation, Outcome
from zeus_flows.job_file import load_job
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import Recurrence, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.settings import read_settings
from zeus_flows.training.trainer import LocalTrainer


class Nightly:
    """A job whose recurrences run here, on a ledger in memory."""

    def __init__(self, folder: Path, function: str, parameters: dict[str, Any] | None = None, **changes: Any) -> None:
        train = {"function": f"tests.training_functions:{function}", "parameters": parameters or {}}
        self.file = load_job(write_job(folder / "job.yaml", **{"train": train} | changes))
        self.ledger = MemoryLedger(self.file.core(), EnergySource.SIMULATED)
        self.steps = LocalSteps(self.file.core(), self.ledger, LocalTrainer(self.file, read_settings()))

    def run(self) -> Recurrence:
        return run_recurrence(self.file.core(), self.steps)

    def observations(self) -> tuple[Observation, ...]:
        return self.ledger.observations()


def test_batch_sizes_that_do_not_fit_are_left_and_the_recurrence_goes_on(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path, "hungry", {"fits": 16}, max_attempts=1)
    done = nightly.run()
    assert done.converged
    sizes = [o.batch_size for _, o in done.attempts]
    assert sizes[0] == 128
    assert sizes[-1] == 16
    assert {o.outcome for _, o in done.attempts[:-1]} == {Outcome.OUT_OF_MEMORY}
    for _ in range(5):
        assert [o.batch_size for _, o in nightly.run().attempts] == [16]


def test_where_not_even_the_smallest_batch_size_fits_the_recurrence_ends(tmp_path: Path) -> None:
    done = Nightly(tmp_path, "hungry", {"fits": 1}).run()
    assert not done.converged
    assert {o.outcome for _, o in done.attempts} == {Outcome.OUT_OF_MEMORY}


def test_memory_that_runs_out_in_evaluation_is_met_in_two_recurrences_and_not_twice_in_one(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path, "hungry_when_evaluating", {"fits": 32})
    done = [nightly.run() for _ in range(6)]
    assert all(recurrence.converged for recurrence in done)
    for recurrence in done:
        sizes = [o.batch_size for _, o in recurrence.attempts]
        assert len(set(sizes)) == len(sizes)
    met = [n for n, r in enumerate(done, start=1) if any(o.outcome is Outcome.OUT_OF_MEMORY for _, o in r.attempts)]
    assert met == [1, 2]
    assert all(o.batch_size <= 32 for _, o in done[-1].attempts)


def test_after_a_crash_the_arm_is_as_unknown_as_before(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path, "crash")
    before = nightly.ledger.history().state.belief
    with pytest.raises(ZeroDivisionError):
        nightly.run()
    (observed,) = nightly.observations()
    assert observed.outcome is Outcome.FAILED
    assert "in crash\n" in observed.traceback
    assert "ZeroDivisionError: the user's bug" in observed.traceback
    assert nightly.ledger.history().state.belief == before


def test_a_long_message_and_traceback_still_fit_an_observation(tmp_path: Path) -> None:
    from zeus_flows.ledger.mlflow.record_text import dump_observation

    nightly = Nightly(tmp_path, "verbose_crash")
    with pytest.raises(ValueError, match="xxx"):
        nightly.run()
    (observed,) = nightly.observations()
    assert len(dump_observation(observed)) < 6_000


def test_what_a_job_with_a_hundred_power_limits_brings_is_stored_whole(tmp_path: Path) -> None:
    from zeus_flows.ledger.mlflow.record_text import dump_observation, load_observation

    limits = [250 - 150 * i / 99 for i in range(100)]
    nightly = Nightly(
        tmp_path,
        "noisy",
        {"epochs": 130},
        batch_sizes=[1024],
        default_batch_size=1024,
        max_epochs=300,
        simulation={"seconds_per_epoch": 60},
        power_limit={"limits": limits, "profile_all_limits": True},
    )
    nightly.run()
    (observed,) = nightly.observations()
    stored = load_observation(dump_observation(observed))
    assert stored.profile is not None
    assert [m.setting for m in stored.profile.measurements] == limits
    assert stored.parts is not None
    assert len(stored.parts.evaluation) == 100
    assert stored.detail == observed.detail


def test_a_job_with_one_batch_size_tunes_the_power_limit_only(tmp_path: Path) -> None:
    nightly = Nightly(
        tmp_path, "noisy", batch_sizes=[128], default_batch_size=128, eta=1.0, simulation={"seconds_per_epoch": 600}
    )
    attempts = [attempt for _ in range(4) for attempt in nightly.run().attempts]
    assert len(attempts) == 4
    assert {type(a.decision.cut) for a, _ in attempts} == {NoCut}
    assert not any(a.decision.explores for a, _ in attempts)
    assert {o.setting for _, o in attempts} == {attempts[0][1].setting}
    assert attempts[0][1].setting != 250.0
    assert [o.profiling_time_s > 0 for _, o in attempts] == [True, False, False, False]


def test_a_search_trial_that_misses_the_target_is_not_repeated(tmp_path: Path) -> None:
    done = Nightly(tmp_path, "never", batch_sizes=[64], default_batch_size=64, max_epochs=2).run()
    assert [o.outcome for _, o in done.attempts] == [Outcome.EXHAUSTED]


@pytest.mark.parametrize(
    ("mode", "limits", "tuned"),
    [(Mode.OFF, 1, False), (Mode.OBSERVE, 7, False), (Mode.POWER, 7, True), (Mode.FULL, 7, True)],
)
def test_what_each_mode_may_do(tmp_path: Path, mode: Mode, limits: int, tuned: bool) -> None:
    nightly = Nightly(
        tmp_path,
        "noisy",
        mode=mode.value,
        eta=1.0,
        simulation={"seconds_per_epoch": 600},
        power_limit={"profile_all_limits": True},
    )
    ((_, observed),) = nightly.run().attempts
    assert observed.batch_size == 128
    assert observed.profile is not None
    assert len(observed.profile.measurements) == limits
    assert (observed.setting != 250.0) is tuned
    sizes = {o.batch_size for _ in range(6) for _, o in nightly.run().attempts}
    assert (sizes == {128}) is (mode is not Mode.FULL)
