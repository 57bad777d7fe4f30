"""Power profiles: what is measured, what is left out, what is kept and when it is measured again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import decision
from tests.training.rig import LIMITS, SAMPLES, Loader, attempt, disturbed_gpu, fitted_gpu, job_file, v100
from zeus_flows.core.power_profile import PowerProfile
from zeus_flows.gpu.simulated import CHIPS, Load
from zeus_flows.training.profiler import PowerProfiler
from zeus_flows.training.session import Session


def heavy() -> Load:
    return Load(600.0, 238.0, active=0.92, clock_bound=0.52)


def test_limits_that_cannot_win_are_not_measured_and_the_profile_is_complete() -> None:
    observed, _ = attempt(fitted_gpu("v100", heavy()), 0.95)
    assert observed.profile is not None
    assert observed.profile.complete
    measured = tuple(m.setting for m in observed.profile.measurements)
    assert measured == LIMITS[: len(measured)] != LIMITS
    again, _ = attempt(fitted_gpu("v100", heavy()), 0.95, known=observed.profile)
    assert again.profile == observed.profile
    assert again.profiling_time_s == 0


def test_a_flag_measures_every_limit() -> None:
    file = job_file(power_limit={"profile_all_limits": True})
    observed, _ = attempt(fitted_gpu("v100", heavy()), 0.95, file=file)
    assert observed.profile is not None
    assert tuple(m.setting for m in observed.profile.measurements) == LIMITS


def test_a_changed_eta_measures_the_limits_that_can_win_now() -> None:
    for_time, _ = attempt(fitted_gpu("v100", heavy()), 0.95, file=job_file(eta=0.0))
    assert for_time.profile is not None
    for_energy, _ = attempt(fitted_gpu("v100", heavy()), 0.95, file=job_file(eta=1.0), known=for_time.profile)
    assert for_energy.profile is not None
    assert len(for_energy.profile.measurements) > len(for_time.profile.measurements)
    assert for_energy.profile.measurements[: len(for_time.profile.measurements)] == for_time.profile.measurements
    assert for_energy.profiling_time_s > 0


def test_attempts_shorter_than_one_limits_span_still_finish_a_profile_over_recurrences(tmp_path: Path) -> None:
    known: PowerProfile | None = None
    for recurrence in range(1, 60):
        with v100(tmp_path, seconds_per_epoch=0.5) as gpus:
            observed, _ = attempt(gpus, 0.95, decided=decision(recurrence), known=known)
        assert observed.time_s < 5.0
        known = observed.profile
        if known is not None and known.complete:
            break
    assert known is not None
    assert known.complete
    with v100(tmp_path, seconds_per_epoch=600.0) as gpus:
        once, _ = attempt(gpus, 0.95)
    assert once.profile is not None
    for pieced, whole in zip(known.measurements, once.profile.measurements, strict=True):
        assert pieced.begun_s is None
        assert pieced.average_power_w == pytest.approx(whole.average_power_w, rel=1e-6)


def test_a_loop_that_is_left_early_every_epoch_still_finishes_a_profile(tmp_path: Path) -> None:
    file = job_file(max_epochs=400)
    with v100(tmp_path) as gpus:
        session = Session(file, file.core(), decision(1), gpus)
        for _ in session.epochs():
            for i, _batch in enumerate(session.steps(Loader(SAMPLES, 64))):
                if i == 3:
                    break
            session.report_metric(0.1)
        observed = session.observation()
    assert observed.profile is not None
    assert observed.profile.complete
    assert observed.samples_per_epoch == 4 * 64  # counted when they are handed out


def test_a_stored_profile_that_is_right_is_not_measured_again() -> None:
    first, _ = attempt(fitted_gpu("v100", heavy()), 0.95)
    slightly_off = replace(
        first.profile,  # type: ignore[type-var]
        measurements=tuple(replace(m, samples_per_s=m.samples_per_s * 1.04) for m in first.profile.measurements),  # type: ignore[union-attr]
    )
    second, _ = attempt(fitted_gpu("v100", heavy()), 0.95, known=slightly_off)
    assert second.profiling_time_s == 0
    assert second.profile == slightly_off


@pytest.mark.parametrize("what", ["average_power_w", "samples_per_s"])
def test_a_stored_profile_that_is_off_by_more_than_five_percent_is_measured_again(what: str) -> None:
    first, _ = attempt(fitted_gpu("v100", heavy()), 0.95)
    assert first.profile is not None
    wrong = replace(
        first.profile,
        measurements=tuple(replace(m, **{what: getattr(m, what) * 0.93}) for m in first.profile.measurements),
    )
    second, _ = attempt(fitted_gpu("v100", heavy()), 0.95, known=wrong)
    assert second.profiling_time_s > 0
    assert second.profile is not None
    assert second.profile.stale == ()
    for again, true in zip(second.profile.measurements, first.profile.measurements, strict=True):
        assert again.average_power_w == pytest.approx(true.average_power_w, rel=1e-3)
        assert again.samples_per_s == pytest.approx(true.samples_per_s, rel=1e-3)
    assert second.setting == first.setting


def test_measuring_again_goes_on_in_the_next_recurrence_and_the_old_profile_serves_meanwhile() -> None:
    first, _ = attempt(fitted_gpu("v100", heavy()), 0.95)
    assert first.profile is not None
    slower = replace(heavy(), seconds_per_epoch=3.0)
    second, _ = attempt(fitted_gpu("v100", slower), 0.95, known=first.profile)
    assert second.profile is not None
    assert second.profile.complete
    assert second.profile.stale != ()
    third, _ = attempt(fitted_gpu("v100", slower), 0.5, 0.95, known=second.profile)
    assert third.profile is not None
    assert third.profile.stale == ()
    for measured in third.profile.measurements:
        seconds, watts = CHIPS["v100"].epoch(slower, measured.setting)
        assert measured.samples_per_s == pytest.approx(SAMPLES / seconds, rel=0.02)
        assert measured.average_power_w == pytest.approx(watts, rel=0.02)


@pytest.mark.parametrize(
    ("then", "now", "again"),
    [
        ("torch 2, driver 550", "torch 2, driver 550", False),
        ("torch 2, driver 550", "torch 2, driver 575", True),
        ("torch 1, driver 550", "torch 2, driver 550", True),
        ("", "torch 2, driver 550", False),
    ],
)
def test_a_profile_made_with_other_versions_is_measured_again(then: str, now: str, again: bool) -> None:
    first, _ = attempt(fitted_gpu("v100", heavy()), 0.95, made_with=then)
    assert first.profile is not None
    assert first.profile.made_with == then
    second, _ = attempt(fitted_gpu("v100", heavy()), 0.95, known=first.profile, made_with=now)
    assert (second.profiling_time_s > 0) is again
    assert second.profile is not None
    assert second.profile.made_with == now


def test_real_gpus_name_their_versions(emulate: Any) -> None:
    from zeus_flows.gpu.open_gpus import open_gpus
    from zeus_flows.training.trainer import _made_with

    emulate()
    with open_gpus(
        "nvml", workload=None, batch_size=1, samples_per_epoch=None, state_dir=Path("/nonexistent"), visible=None
    ) as gpus:
        assert _made_with(gpus).startswith("torch 2, driver ")


def reading(profile: PowerProfile | None, limit_w: float) -> float:
    assert profile is not None
    return next(m.samples_per_s for m in profile.measurements if m.setting == limit_w)


def true_speed(limit_w: float) -> float:
    return SAMPLES / CHIPS["v100"].epoch(heavy(), limit_w)[0]


@pytest.mark.parametrize("times", [1, math.inf])
def test_a_limit_that_is_slow_while_it_is_measured_does_not_hide_the_best_one_below_it(times: float) -> None:
    gpus, _ = disturbed_gpu("v100", heavy(), limit_w=150.0, speed=-0.12, times=times)
    observed, _ = attempt(gpus, 0.95, file=job_file(eta=1.0))
    undisturbed, _ = attempt(fitted_gpu("v100", heavy()), 0.95, file=job_file(eta=1.0))
    assert observed.setting == undisturbed.setting == 125.0


def test_a_limit_that_was_fast_while_it_was_measured_is_measured_again_and_not_chosen() -> None:
    gpus, set_w = disturbed_gpu("v100", heavy(), limit_w=175.0, speed=0.12)
    observed, _ = attempt(gpus, 0.95, file=job_file(eta=1.0))
    assert tuple(set_w) == (*LIMITS, 175.0, 125.0)
    assert reading(observed.profile, 175.0) == pytest.approx(true_speed(175.0), rel=1e-3)
    assert observed.setting == 125.0


def test_limits_that_only_a_wrong_reading_ruled_out_are_measured_after_it_was_taken_again() -> None:
    gpus, set_w = disturbed_gpu("v100", heavy(), limit_w=225.0, speed=0.12)
    observed, _ = attempt(gpus, 0.95)
    undisturbed, _ = attempt(fitted_gpu("v100", heavy()), 0.95)
    assert set_w == [250.0, 225.0, 200.0, 175.0, 150.0, 225.0, 125.0, 200.0]
    assert observed.setting == undisturbed.setting == 200.0
    assert observed.profile is not None
    assert undisturbed.profile is not None
    assert len(observed.profile.measurements) == len(undisturbed.profile.measurements)


def test_a_limit_that_stays_odd_is_measured_twice_and_in_no_later_recurrence() -> None:
    gpus, set_w = disturbed_gpu("v100", heavy(), limit_w=175.0, speed=0.12, times=math.inf)
    first, _ = attempt(gpus, 0.95, file=job_file(eta=1.0))
    assert tuple(set_w) == (*LIMITS, 175.0)
    once, _ = attempt(disturbed_gpu("v100", heavy(), limit_w=175.0, speed=0.12)[0], 0.95, file=job_file(eta=1.0))
    assert first.profiling_time_s == pytest.approx(once.profiling_time_s, rel=0.02)
    gpus, _ = disturbed_gpu("v100", heavy(), limit_w=175.0, speed=0.12, times=math.inf)
    second, _ = attempt(gpus, 0.95, file=job_file(eta=1.0), known=first.profile)
    assert second.profiling_time_s == 0
    assert second.profile == first.profile


def test_where_every_limit_is_asked_for_none_is_measured_again() -> None:
    gpus, set_w = disturbed_gpu("v100", heavy(), limit_w=175.0, speed=0.12)
    file = job_file(eta=1.0, power_limit={"profile_all_limits": True})
    observed, _ = attempt(gpus, 0.95, file=file)
    assert tuple(set_w) == (*LIMITS, 175.0)
    assert observed.setting == 175.0
    assert reading(observed.profile, 175.0) == pytest.approx(1.12 * true_speed(175.0), rel=1e-3)


def test_the_first_reading_serves_until_the_second_is_done() -> None:
    gpus, set_w = disturbed_gpu("v100", heavy(), limit_w=175.0, speed=0.12)
    gpus.samples_per_epoch = SAMPLES
    job = job_file(eta=1.0).core()
    profiler = PowerProfiler(
        gpus, job=job, batch_size=64, settings=LIMITS, known=None, profile_s=5.0, warmup_s=1.0, least_s=1.0
    )
    profiler.begin()
    while set_w.count(175.0) < 2:
        gpus.ran(64)
        profiler.ran(64)
    profiler.end()
    assert profiler.active
    assert profiler.profile is not None
    assert profiler.profile.complete
    assert reading(profiler.profile, 175.0) == pytest.approx(1.12 * true_speed(175.0), rel=1e-3)


def test_measuring_anew_forgets_limits_that_cannot_win_any_more() -> None:
    for_energy, _ = attempt(fitted_gpu("v100", heavy()), 0.95, file=job_file(eta=1.0), made_with="torch 1")
    assert for_energy.profile is not None
    assert tuple(m.setting for m in for_energy.profile.measurements) == LIMITS
    for_time, _ = attempt(
        fitted_gpu("v100", heavy()), 0.95, file=job_file(eta=0.0), known=for_energy.profile, made_with="torch 2"
    )
    assert for_time.profile is not None
    assert for_time.profile.stale == ()
    left = tuple(m.setting for m in for_time.profile.measurements)
    assert left == LIMITS[: len(left)] != LIMITS
