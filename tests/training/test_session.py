"""The session on a simulated V100: what it profiles, when it stops, what it books."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.builders import decision
from tests.training import rig
from tests.training.rig import LIMITS, SAMPLES, Loader, job_file, v100
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.early_stop import CostCut, PlannedCut
from zeus_flows.core.job import Mode
from zeus_flows.core.learning_curve import Reference
from zeus_flows.core.power import best_setting, epoch_cost
from zeus_flows.core.power_profile import PowerProfile
from zeus_flows.core.records import Decision, Observation, Outcome
from zeus_flows.errors import TrainingError
from zeus_flows.gpu.open_gpus import open_gpus
from zeus_flows.gpu.simulated import Workload
from zeus_flows.job_file import JobFile
from zeus_flows.training.session import Session

Outcome_ = tuple[Observation, list[EpochReport]]


@pytest.fixture
def attempt(tmp_path: Path) -> Callable[..., Outcome_]:
    """Return a function that trains with given metrics, one per epoch, and returns observation and epochs."""

    def run(
        *metrics: float,
        file: JobFile | None = None,
        decided: Decision | None = None,
        known: PowerProfile | None = None,
        samples: int = SAMPLES,
        seconds_per_epoch: float = 60.0,
    ) -> Outcome_:
        file, decided = file or job_file(), decided or decision(1)
        with v100(tmp_path, decided.batch_size, seconds_per_epoch) as gpus:
            return rig.attempt(gpus, *metrics, file=file, decided=decided, known=known, samples=samples)

    return run


def test_the_target_ends_the_attempt_and_energy_and_time_are_to_accuracy(attempt: Callable[..., Outcome_]) -> None:
    observed, epochs = attempt(0.5, 0.7, 0.95)
    assert (observed.outcome, observed.epochs, observed.metric) == (Outcome.CONVERGED, 3, 0.95)
    assert [epoch.epoch for epoch in epochs] == [1, 2, 3]
    assert (observed.energy_j, observed.time_s) == pytest.approx((epochs[-1].energy_j, epochs[-1].time_s))
    assert observed.energy_j > 0


def test_the_first_epoch_profiles_the_limits_and_the_rest_runs_at_the_best(attempt: Callable[..., Outcome_]) -> None:
    energy = job_file(eta=1.0, power_limit={"profile_all_limits": True})
    observed, epochs = attempt(0.5, 0.7, 0.95, file=energy, decided=decision(1, batch_size=128))
    assert observed.profile is not None
    assert observed.profile.complete
    assert tuple(m.setting for m in observed.profile.measurements) == LIMITS
    best = best_setting(energy.core(), observed.profile).setting
    assert observed.setting == best < 250.0
    assert [epoch.setting for epoch in epochs[1:]] == [best, best]


def test_the_profile_agrees_with_the_gpu_model(attempt: Callable[..., Outcome_]) -> None:
    from zeus_flows.gpu.simulated import CHIPS

    observed, _ = attempt(0.95)
    assert observed.profile is not None
    load = Workload(seconds_per_epoch=60.0).at(64, CHIPS["v100"])
    for measured in observed.profile.measurements:
        epoch_s, watts = CHIPS["v100"].epoch(load, measured.setting)
        assert measured.average_power_w == pytest.approx(watts, rel=0.01)
        assert measured.samples_per_s == pytest.approx(SAMPLES / epoch_s, rel=0.01)


def test_profiling_is_booked_apart(attempt: Callable[..., Outcome_]) -> None:
    observed, _ = attempt(0.95)
    assert 7 * 6.0 <= observed.profiling_time_s <= observed.time_s
    assert 0 < observed.profiling_energy_j <= observed.energy_j


def test_a_stored_profile_is_used_and_nothing_is_profiled_again(attempt: Callable[..., Outcome_]) -> None:
    first, _ = attempt(0.95)
    second, epochs = attempt(0.95, known=first.profile)
    assert second.profiling_time_s == 0
    assert second.profile == first.profile
    assert epochs[0].setting == first.setting


def test_epochs_of_one_step_still_finish_a_profile(attempt: Callable[..., Outcome_]) -> None:
    file = job_file(max_epochs=200)
    observed, _ = attempt(*[0.1] * 150, 0.95, file=file, samples=64, seconds_per_epoch=0.2)
    assert observed.profile is not None
    assert observed.profile.complete
    assert len(observed.profile.measurements) == len(LIMITS)


def test_a_profile_that_training_ended_too_early_is_kept_and_completed_by_the_next(
    attempt: Callable[..., Outcome_],
) -> None:
    first, _ = attempt(0.95, seconds_per_epoch=1.0)
    assert first.profile is not None
    assert not first.profile.complete
    assert first.setting is None
    second, _ = attempt(0.5, 0.95, known=first.profile)
    assert second.profile is not None
    assert second.profile.complete
    done = [m for m in first.profile.measurements if m.begun_s is None]
    assert len(done) > 1
    assert list(second.profile.measurements[: len(done)]) == done


def test_where_epochs_are_short_a_span_takes_a_tenth_of_one_but_a_second_at_least(
    attempt: Callable[..., Outcome_],
) -> None:
    file = job_file(power_limit={"profile_all_limits": True})
    for seconds_per_epoch, at_least_s in ((100.0, 7 * 6.0), (6.0, 7 * 1.2 * 2.94), (0.5, 7 * 1.2)):
        observed, _ = attempt(*[0.1] * 9, 0.95, file=file, samples=640_000, seconds_per_epoch=seconds_per_epoch)
        assert observed.profile is not None
        assert observed.profile.complete
        assert at_least_s * 0.99 <= observed.profiling_time_s < at_least_s * 1.1


def test_no_warm_up_at_all_is_possible(attempt: Callable[..., Outcome_]) -> None:
    observed, _ = attempt(0.95, file=job_file(power_limit={"warmup_seconds": 0}))
    assert observed.profile is not None
    assert observed.profile.complete


def test_an_attempt_stops_before_the_epoch_that_would_cross_the_cut(attempt: Callable[..., Outcome_]) -> None:
    profile = attempt(0.95)[0].profile
    assert profile is not None
    one_epoch = epoch_cost(job_file().core(), profile, samples_per_epoch=SAMPLES)
    cut = CostCut(threshold_j=3.5 * one_epoch)
    observed, _ = attempt(decided=decision(1, cut=cut), known=profile)
    assert (observed.outcome, observed.epochs, observed.epochs_allowed) == (Outcome.STOPPED, 3, 3)
    assert "would cross the threshold of" in observed.detail


def test_an_attempt_whose_curve_leads_goes_on_and_one_whose_curve_lags_is_stopped(
    attempt: Callable[..., Outcome_],
) -> None:
    profile = attempt(0.95)[0].profile
    assert profile is not None
    file = job_file(max_epochs=40)
    one_epoch = epoch_cost(file.core(), profile, samples_per_epoch=SAMPLES)
    reference = Reference(((1, 0.2), (4, 0.5), (8, 0.7), (20, 0.9)))
    cut = PlannedCut(math.log(40), 0.09, 0.01, 0.05, 20 * one_epoch, 12.0, at_least=3, reference=reference)
    leading, lagging = (0.3, 0.5, 0.7, 0.75, 0.8, 0.85, 0.95), (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
    observed, _ = attempt(*leading, file=file, decided=decision(1, cut=cut), known=profile)
    assert (observed.outcome, observed.epochs) == (Outcome.CONVERGED, 7)
    assert observed.curve[:3] == ((1, 0.3), (2, 0.5), (3, 0.7))
    observed, _ = attempt(*lagging, file=file, decided=decision(1, cut=cut), known=profile)
    assert (observed.outcome, observed.epochs) == (Outcome.STOPPED, 3)
    assert "its learning curve says about 60.0" in observed.detail


def test_the_epoch_that_reaches_the_target_counts_even_where_it_is_the_last_allowed(
    attempt: Callable[..., Outcome_],
) -> None:
    profile = attempt(0.95)[0].profile
    assert profile is not None
    one_epoch = epoch_cost(job_file().core(), profile, samples_per_epoch=SAMPLES)
    decided = decision(1, cut=CostCut(threshold_j=2.5 * one_epoch))
    observed, _ = attempt(0.1, 0.95, decided=decided, known=profile)
    assert (observed.outcome, observed.epochs) == (Outcome.CONVERGED, 2)


def test_max_epochs_without_the_target_is_exhausted(attempt: Callable[..., Outcome_]) -> None:
    observed, _ = attempt(file=job_file(max_epochs=3))
    assert (observed.outcome, observed.epochs) == (Outcome.EXHAUSTED, 3)


def test_a_nan_metric_stops_at_once_and_never_converges(attempt: Callable[..., Outcome_]) -> None:
    observed, _ = attempt(0.5, math.nan)
    assert (observed.outcome, observed.epochs, observed.metric) == (Outcome.DIVERGED, 2, None)


def test_an_infinite_metric_never_converges_and_an_infinite_loss_may_yet_come_down(
    attempt: Callable[..., Outcome_],
) -> None:
    observed, epochs = attempt(0.5, math.inf)
    assert (observed.outcome, observed.epochs, epochs[-1].metric) == (Outcome.DIVERGED, 2, None)
    loss = job_file(target={"metric": "loss", "value": 0.2, "better": "lower"})
    observed, epochs = attempt(math.inf, 0.15, file=loss)
    assert (observed.outcome, observed.epochs, epochs[0].metric) == (Outcome.CONVERGED, 2, None)


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_modes_that_may_not_change_the_limit_train_at_the_previous_one(
    attempt: Callable[..., Outcome_], mode: Mode
) -> None:
    observed, epochs = attempt(0.5, 0.95, file=job_file(mode=mode))
    assert epochs[-1].setting == observed.setting == 250.0
    assert observed.profile is not None
    assert len(observed.profile.measurements) == (1 if mode is Mode.OFF else len(LIMITS))


def test_the_learning_rate_follows_the_batch_size(tmp_path: Path) -> None:
    with open_gpus(
        "simulated-v100", workload=None, batch_size=128, samples_per_epoch=1, state_dir=tmp_path, visible=None
    ) as gpus:
        session = Session(job_file(), job_file().core(), decision(1, batch_size=128), gpus)
        assert session.learning_rate == pytest.approx(1e-3 * math.sqrt(2))


def test_a_train_function_that_never_trains_or_reports_is_told_so(tmp_path: Path) -> None:
    with open_gpus(
        "simulated-v100", workload=None, batch_size=64, samples_per_epoch=640, state_dir=tmp_path, visible=None
    ) as gpus:
        session = Session(job_file(max_epochs=1), job_file(max_epochs=1).core(), decision(1), gpus)
        with pytest.raises(TrainingError, match=r"session\.epochs"):
            session.observation()
        for _ in session.epochs():
            list(session.steps(Loader(640, 64)))
        with pytest.raises(TrainingError, match="report_metric"):
            session.observation()


def test_training_on_after_the_target_books_energy_and_time_at_the_target(attempt: Callable[..., Outcome_]) -> None:
    metrics = (0.5, 0.7, 0.95, 0.5, 0.97)
    short, _ = attempt(*metrics)
    observed, epochs = attempt(*metrics, file=job_file(stop_at_target=False, max_epochs=6))
    assert [epoch.epoch for epoch in epochs] == [1, 2, 3, 4, 5, 6]
    assert (observed.outcome, observed.epochs) == (Outcome.CONVERGED, 3)
    assert (observed.energy_j, observed.time_s) == pytest.approx((short.energy_j, short.time_s))
    assert observed.detail == "accuracy reached 0.95 in epoch 3; trained on to epoch 6 (stop_at_target: false)"


def test_training_on_after_the_target_ignores_the_cut_and_nan(attempt: Callable[..., Outcome_]) -> None:
    profile = attempt(0.95)[0].profile
    assert profile is not None
    one_epoch = epoch_cost(job_file().core(), profile, samples_per_epoch=SAMPLES)
    file = job_file(stop_at_target=False, max_epochs=6)
    decided = decision(1, cut=CostCut(threshold_j=2.5 * one_epoch))
    observed, epochs = attempt(0.95, math.nan, file=file, decided=decided, known=profile)
    assert (observed.outcome, observed.epochs, len(epochs)) == (Outcome.CONVERGED, 1, 6)


def test_an_attempt_that_trains_on_and_never_reaches_the_target_is_exhausted_or_stopped(
    attempt: Callable[..., Outcome_],
) -> None:
    file = job_file(stop_at_target=False, max_epochs=3)
    assert attempt(file=file)[0].outcome is Outcome.EXHAUSTED
    assert attempt(file=file, decided=decision(1, cut=CostCut(threshold_j=1.0)))[0].outcome is Outcome.STOPPED


def test_how_an_attempt_ended_is_logged(attempt: Callable[..., Outcome_], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        attempt(0.5, 0.95)
        attempt(decided=decision(1, cut=CostCut(threshold_j=1.0)))
    assert "batch size 64 converged: accuracy reached 0.95 in epoch 2" in caplog.text
    assert "batch size 64 stopped: stopped after 1 epoch:" in caplog.text


def test_samples_are_counted_by_what_a_loader_yields(tmp_path: Path) -> None:
    with v100(tmp_path) as gpus:
        file = job_file(max_epochs=2)
        session = Session(file, file.core(), decision(1), gpus)
        for _ in session.epochs():
            for _batch in session.steps(DataLoader(range(1000), batch_size=64, drop_last=True)):  # type: ignore[arg-type]
                pass
            session.report_metric(0.1)
        assert session.observation().samples_per_epoch == 15 * 64
