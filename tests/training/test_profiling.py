"""Power profiles: what is measured, what is left out, what is kept and when it is measured again."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import decision
from tests.conftest import SHARED
from tests.training.rig import LIMITS, SAMPLES, Loader, attempt, fitted_gpu, job_file, v100
from zeus_flows.core.power import best_limit, cost_per_sample, may_win
from zeus_flows.core.records import Gpu, Job, LimitMeasurement, PowerProfile, Selector
from zeus_flows.gpu.group import candidate_limits
from zeus_flows.gpu.simulated import CHIPS, Load
from zeus_flows.training.session import Session

FITS = SHARED / "gpu_model"


def fitted_jobs() -> list[tuple[str, Load]]:
    if not FITS.exists():
        pytest.skip("the fitted GPU models are not beside this checkout")
    return [
        (kind, Load(job["T0"], job["Pd"], job["u"], job["b"]))
        for kind in ("v100", "p100")
        for job in json.loads((FITS / f"fit_{kind}.json").read_text())["jobs"]
    ]


def profile_of(kind: str, load: Load, noise: float = 0.0, rng: np.random.Generator | None = None) -> PowerProfile:
    measurements = []
    for limit in candidate_limits(*CHIPS[kind].limits_w):
        seconds, watts = CHIPS[kind].epoch(load, limit)
        power, speed = (1 + noise * rng.standard_normal(2)) if rng is not None else (1.0, 1.0)
        measurements.append(LimitMeasurement(limit, watts * power, 1000 / seconds * speed))
    return PowerProfile(64, Gpu(kind, 1, CHIPS[kind].limits_w[1]), tuple(measurements))


def measured_down_to_the_first_loser(job: Job, full: PowerProfile) -> PowerProfile:
    kept: tuple[LimitMeasurement, ...] = ()
    for m in full.measurements:
        if not may_win(job, replace(full, measurements=kept), m.power_limit_w):
            break
        kept += (m,)
    return replace(full, measurements=kept)


OBJECTIVES = [(Selector.COST, eta) for eta in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)] + [
    (Selector.ENERGY, 0.5),
    (Selector.TIME, 0.5),
    (Selector.MAX_SLOWDOWN, 0.5),
]


@pytest.mark.parametrize(("selector", "eta"), OBJECTIVES)
def test_leaving_out_losers_never_misses_the_best_limit_of_a_fitted_job(selector: Selector, eta: float) -> None:
    job = Job("nightly", (64,), 64, 1, eta=eta, selector=selector)
    jobs = fitted_jobs()
    assert len(jobs) == 113
    for kind, load in jobs:
        full = profile_of(kind, load)
        assert best_limit(job, measured_down_to_the_first_loser(job, full)) == best_limit(job, full)


@pytest.mark.parametrize(("selector", "eta"), OBJECTIVES)
def test_leaving_out_losers_never_misses_the_best_limit_of_a_published_trace(selector: Selector, eta: float) -> None:
    job = Job("nightly", (64,), 64, 1, eta=eta, selector=selector)
    for kind in ("v100", "p100"):
        path = SHARED / "traces" / f"summary_power_{kind}.csv"
        if not path.exists():
            pytest.skip("the published traces are not beside this checkout")
        rows = list(csv.DictReader(path.open()))
        names = sorted({(r["dataset"], r["network"], r["optimizer"], r["batch_size"]) for r in rows})
        for name in names:
            mine = [r for r in rows if (r["dataset"], r["network"], r["optimizer"], r["batch_size"]) == name]
            mine.sort(key=lambda r: -float(r["power_limit"]))
            measurements = tuple(
                LimitMeasurement(float(r["power_limit"]), float(r["average_power"]), 1e4 / float(r["time_per_epoch"]))
                for r in mine
            )
            full = PowerProfile(64, Gpu(kind, 1, 250.0), measurements)
            chosen = best_limit(job, measured_down_to_the_first_loser(job, full))
            missed = cost_per_sample(job, full, chosen) / cost_per_sample(job, full, best_limit(job, full)) - 1
            assert missed == 0, (kind, name, missed)


def test_with_noisy_readings_leaving_out_losers_costs_nothing() -> None:
    rng, job = np.random.default_rng(1), Job("nightly", (64,), 64, 1)
    losses = []
    for kind, load in fitted_jobs() * 5:
        noisy, true = profile_of(kind, load, 0.01, rng), profile_of(kind, load)
        costs = {m.power_limit_w: cost_per_sample(job, true, m) for m in true.measurements}
        chosen = best_limit(job, measured_down_to_the_first_loser(job, noisy)).power_limit_w
        losses.append(costs[chosen] / costs[best_limit(job, noisy).power_limit_w] - 1)
    assert max(losses) == 0


def heavy() -> Load:
    return Load(600.0, 238.0, active=0.92, clock_bound=0.52)


def test_limits_that_cannot_win_are_not_measured_and_the_profile_is_complete() -> None:
    observed, _ = attempt(fitted_gpu("v100", heavy()), 0.95)
    assert observed.profile is not None
    assert observed.profile.complete
    measured = tuple(m.power_limit_w for m in observed.profile.measurements)
    assert measured == LIMITS[: len(measured)] != LIMITS
    again, _ = attempt(fitted_gpu("v100", heavy()), 0.95, known=observed.profile)
    assert again.profile == observed.profile
    assert again.profiling_time_s == 0


def test_a_flag_measures_every_limit() -> None:
    file = job_file(power_limit={"profile_all_limits": True})
    observed, _ = attempt(fitted_gpu("v100", heavy()), 0.95, file=file)
    assert observed.profile is not None
    assert tuple(m.power_limit_w for m in observed.profile.measurements) == LIMITS


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
    assert second.profile.stale_w == ()
    for again, true in zip(second.profile.measurements, first.profile.measurements, strict=True):
        assert again.average_power_w == pytest.approx(true.average_power_w, rel=1e-3)
        assert again.samples_per_s == pytest.approx(true.samples_per_s, rel=1e-3)
    assert second.power_limit_w == first.power_limit_w


def test_measuring_again_goes_on_in_the_next_recurrence_and_the_old_profile_serves_meanwhile() -> None:
    first, _ = attempt(fitted_gpu("v100", heavy()), 0.95)
    assert first.profile is not None
    slower = replace(heavy(), seconds_per_epoch=3.0)
    second, _ = attempt(fitted_gpu("v100", slower), 0.95, known=first.profile)
    assert second.profile is not None
    assert second.profile.complete
    assert second.profile.stale_w != ()
    third, _ = attempt(fitted_gpu("v100", slower), 0.5, 0.95, known=second.profile)
    assert third.profile is not None
    assert third.profile.stale_w == ()
    for measured in third.profile.measurements:
        seconds, watts = CHIPS["v100"].epoch(slower, measured.power_limit_w)
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
    from zeus_flows.gpu.open import open_gpus
    from zeus_flows.training.trainer import _made_with

    emulate()
    with open_gpus(
        "nvml", workload=None, batch_size=1, samples_per_epoch=None, state_dir=Path("/nonexistent"), visible=None
    ) as gpus:
        assert _made_with(gpus).startswith("torch 2, driver ")
