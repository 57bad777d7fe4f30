"""Observer Mode: nothing is changed, and what could be saved is said."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import JOB, decision, observation
from tests.training.rig import SAMPLES, attempt, fitted_gpu, job_file, v100
from tests.training.test_profiling import heavy
from zeus_flows.core import policy
from zeus_flows.core.job import Mode
from zeus_flows.core.observer import tried_batch_sizes, would_have_saved
from zeus_flows.core.power_profile import PowerProfile, SettingMeasurement
from zeus_flows.core.records import Decision, EnergySource, Observation
from zeus_flows.gpu.group import Gpus
from zeus_flows.ledger.memory import MemoryLedger
from zeus_flows.recurrence.loop import run_recurrence
from zeus_flows.recurrence.steps import LocalSteps


def test_the_best_limit_would_have_saved_what_running_at_it_saves() -> None:
    """The report of an observed attempt comes true in an attempt that runs at the best limit."""
    observe, power = job_file(mode=Mode.OBSERVE), job_file(mode=Mode.POWER)
    watched, _ = attempt(fitted_gpu("v100", heavy()), 0.5, 0.5, 0.95, file=observe)
    saved = would_have_saved(observe.core(), watched)
    assert saved is not None
    assert watched.setting == saved.setting == 250.0
    tuned, _ = attempt(fitted_gpu("v100", heavy()), 0.5, 0.5, 0.95, file=power, known=watched.profile)
    assert tuned.setting == saved.best_setting < 250.0
    assert saved.spent.energy_j - saved.saved.energy_j == pytest.approx(tuned.energy_j, rel=0.01)
    assert saved.spent.time_s - saved.saved.time_s == pytest.approx(tuned.time_s, rel=0.01)
    assert saved.saved.cost_j > 0
    assert saved.saved.energy_j > 0 > saved.saved.time_s


def test_the_report_is_part_of_how_the_attempt_ended(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        watched, epochs = attempt(fitted_gpu("v100", heavy()), 0.5, 0.95, file=job_file(mode=Mode.OBSERVE))
    sentence = r"at \d+ W instead of 250 W it would have taken [\d.]+ % less energy, [\d.]+ % more time, [\d.]+ % less"
    assert re.search(sentence, watched.detail)
    assert re.search(sentence, caplog.text)
    assert epochs[-1].setting == 250.0


def test_a_limit_that_somebody_else_set_is_measured_and_kept(tmp_path: Path) -> None:
    with v100(tmp_path) as gpus:
        gpus.devices[0].set_power_limit_w(240.0)
        watched, _ = attempt(gpus, 0.5, 0.95, file=job_file(mode=Mode.OBSERVE))
        assert gpus.power.limit_w() == watched.setting == 240.0
    assert watched.profile is not None
    assert 240.0 in {m.setting for m in watched.profile.measurements}
    assert "instead of 240 W" in watched.detail


def test_without_permission_there_is_nothing_to_profile_and_training_is_measured(tmp_path: Path) -> None:
    with v100(tmp_path) as gpus:
        gpus.power.can_set, gpus.power.why_not = False, "may not"
        watched, _ = attempt(gpus, 0.5, 0.95, file=job_file(mode=Mode.OBSERVE))
    assert watched.energy_j > 0
    assert watched.profile is not None
    assert len(watched.profile.measurements) == 1
    assert "no power limit could be tried: may not" in watched.detail


def test_where_the_limit_is_the_best_already_that_is_said() -> None:
    file = job_file(mode=Mode.OBSERVE, eta=0.0)
    watched, _ = attempt(fitted_gpu("v100", heavy()), 0.95, file=file)
    assert "250 W is the best power limit for it already" in watched.detail


def tried(recurrence: int, batch_size: int, epochs: int) -> Observation:
    measured = (SettingMeasurement(250.0, 200.0, 100.0), SettingMeasurement(150.0, 130.0, 95.0))
    profile = PowerProfile(batch_size, observation(1).gpu, measured)
    return observation(recurrence, batch_size=batch_size, epochs=epochs, profile=profile)


def test_batch_sizes_that_were_tried_are_compared_with_their_doubt_and_untried_ones_are_not_named() -> None:
    history = [tried(1, 64, 10), tried(2, 32, 5), tried(3, 64, 12), tried(4, 32, 6)]
    (found,) = tried_batch_sizes(JOB, policy.fold(JOB, history))
    assert (found.batch_size, found.runs) == (32, 2)
    assert found.saved_percent == pytest.approx(50.0)
    again = [replace(o, recurrence=o.recurrence + 4) for o in history]
    (twice,) = tried_batch_sizes(JOB, policy.fold(JOB, [*history, *again]))
    assert found.uncertainty_percent is not None
    assert twice.uncertainty_percent is not None
    assert 0 < twice.uncertainty_percent < found.uncertainty_percent < 10


def test_one_run_each_leaves_the_doubt_unsaid() -> None:
    (found,) = tried_batch_sizes(JOB, policy.fold(JOB, [tried(1, 64, 10), tried(2, 32, 5)]))
    assert found.uncertainty_percent is None
    assert found.sentence == "batch size 32 would have cost 50 % less (1 run)"


def test_nothing_is_compared_before_the_default_has_run() -> None:
    assert tried_batch_sizes(JOB, policy.fold(JOB, [tried(1, 32, 5)])) == ()
    assert tried_batch_sizes(JOB, policy.initial(JOB)) == ()


class Watching:
    """A trainer that trains on a simulated GPU."""

    energy_source = EnergySource.SIMULATED
    power_limits_w: tuple[float, ...] = ()

    def __init__(self, gpus: Gpus) -> None:
        self.gpu = gpus.gpu
        self._gpus = gpus

    def train(
        self,
        job: object,
        decision: Decision,
        profile: object,
        report: object,
        *,
        overheads: object = None,
        attempt_id: str = "",
    ) -> Observation:
        return attempt(self._gpus, 0.95, file=job_file(mode=Mode.OBSERVE), decided=decision)[0]


def test_an_observed_recurrence_says_what_tried_batch_sizes_would_have_cost() -> None:
    gpus = fitted_gpu("v100", heavy())
    job = replace(JOB, mode=Mode.OBSERVE, fingerprint=job_file().fingerprint)
    ledger = MemoryLedger(job, EnergySource.SIMULATED)
    for n, b in ((1, 64), (2, 32)):
        assert ledger.begin() == n
        attempt_id = ledger.decided(decision(n, batch_size=b), {})
        ledger.observed(
            attempt_id, replace(tried(n, b, 1), gpu=gpus.gpu, fingerprint=job.fingerprint, samples_per_epoch=SAMPLES)
        )
    steps = LocalSteps(job, ledger, Watching(gpus))
    done = run_recurrence(job, steps)
    detail = ledger.observations()[-1].detail
    assert "would have taken" in detail
    assert "batch size 32 would have cost" in detail
    assert "128" not in detail
    assert done.attempts[0][1].detail == detail
