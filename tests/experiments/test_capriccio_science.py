"""Science: regret that is exact, a known shift, a detector on trial; and drift windows as functions of the history."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.builders import GPU, JOB, observation, profile
from zeus_flows.core import policy
from zeus_flows.core.drift_windows import beliefs, best_arm, boundary, fold_windows
from zeus_flows.core.job import Job
from zeus_flows.core.records import Observation, Outcome
from zeus_flows.experiments.capriccio.science import (
    Findings,
    Oracle,
    Replays,
    detections,
    interval,
    recorded_regret,
    replay_slices,
    simulated_profiles,
)
from zeus_flows.experiments.replay.traces import Trace
from zeus_flows.job_file import parse_job
from zeus_flows.reporting import figures

BEFORE, AFTER, SEEDS = 60, 40, 8


def trace(**epochs: int) -> Trace:
    """Return a slice on which batch size b takes about `epochs[b]` epochs; all epochs cost the same."""
    arms = {int(name[1:]): count for name, count in epochs.items()}
    return Trace(
        workload="known",
        gpu=GPU,
        epochs={b: (count - 1, count, count, count + 1) for b, count in arms.items()},
        profiles={b: profile(b) for b in arms},
        default_batch_size=64,
        max_epochs=200,
        samples_per_epoch=1000,
    )


BEFORE_SHIFT = trace(b32=40, b64=20, b128=28)
AFTER_SHIFT = trace(b32=60, b64=34, b128=20)  # the best arm became dearer, its neighbour the best


def best(traces: list[Trace], job: Job) -> npt.NDArray[np.float64]:
    return np.array([t.best_cost_j(job) for t in traces])


def regret_after_the_shift(name: str, window: int | None = None) -> float:
    job = Job("known", (32, 64, 128), 64, 200, policy=name, window=window, beta=4.0)
    slices = [BEFORE_SHIFT] * BEFORE + [AFTER_SHIFT] * AFTER
    found = replay_slices(slices, job, best(slices, job), seeds=range(SEEDS))
    return float(found.regret[:, BEFORE:].sum(axis=1).mean())


def test_after_a_known_shift_the_window_and_the_reset_recover_and_no_window_does_not() -> None:
    without = regret_after_the_shift("zeus")
    windowed = regret_after_the_shift("zeus", window=10)
    reset = regret_after_the_shift("thompson")

    assert without > 0.6 * 0.7 * AFTER  # it stays with an arm that costs 70 % more nearly all the time
    assert windowed < 0.6 * without
    assert reset < 0.4 * without


def test_once_recovered_the_window_and_the_reset_run_the_new_best_arm() -> None:
    job = Job("known", (32, 64, 128), 64, 200, policy="thompson", beta=4.0)
    slices = [BEFORE_SHIFT] * BEFORE + [AFTER_SHIFT] * AFTER

    found = replay_slices(slices, job, best(slices, job), seeds=range(SEEDS))

    assert found.regret[:, -10:].mean() < 0.1
    assert all(any(BEFORE < a <= BEFORE + 3 for a in alarms) for alarms in found.alarms)


def test_the_detector_notices_what_is_planted_and_raises_few_false_alarms() -> None:
    job = Job("known", (32, 64, 128), 64, 200, policy="thompson")
    slices = [BEFORE_SHIFT] * 40

    quiet = replay_slices(slices, job, best(slices, job), seeds=range(SEEDS))
    found = {d.factor: d for d in detections(slices, job, times=SEEDS)}

    assert sum(map(len, quiet.alarms)) <= 0.02 * 40 * SEEDS
    assert found[3.0].noticed.mean == 1.0
    assert found[3.0].noticed.low < 1.0  # so many replays prove no certainty
    soon, later = found[3.0].delay, found[1.5].delay
    assert soon is not None
    assert later is not None
    assert soon.low <= soon.mean <= min(2.0, soon.high, later.mean)


def test_cost_against_another_contender_is_of_the_whole_experiment() -> None:
    oracle = Oracle((32, 64), np.array([[10.0, 20.0], [30.0, 60.0]]), np.zeros((2, 2, 3)))
    costs = {"best": [[10.0, 30.0]] * 2, "worse": [[20.0, 30.0], [10.0, 50.0]]}  # in all 40, and 50 and 60
    replays = {name: Replays(np.array(c) / oracle.best_costs_j - 1.0, ((), ())) for name, c in costs.items()}

    against = Findings(oracle, replays).cost_against("worse", "best")

    assert against.mean == pytest.approx(37.5)
    assert 25.0 - 1e-9 <= against.low <= against.high <= 50.0 + 1e-9


def test_regret_of_always_running_the_best_arm_is_zero_on_average() -> None:
    costs = np.array([[10.0, 20.0], [30.0, 20.0]])
    oracle = Oracle((32, 64), costs, np.zeros((2, 2, 3)))

    assert recorded_regret([10.0, 20.0], oracle).sum() == 0
    assert recorded_regret([20.0, 30.0], oracle).tolist() == [1.0, 0.5]
    assert oracle.best_arms == (32, 64)
    assert oracle.best_fixed_arm == 32  # 40 either way: the smaller
    assert oracle.worth_of_adapting == pytest.approx(40 / 30 - 1)


def test_intervals_hold_the_mean_and_shrink_with_more_replays() -> None:
    values = np.random.default_rng(0).normal(5.0, 1.0, size=400)

    few, many = interval(values[:20]), interval(values)

    assert few.low < few.mean < few.high
    assert many.high - many.low < few.high - few.low
    assert interval(values) == many


def test_the_simulated_gpu_is_known_to_the_oracle_as_the_session_measures_it() -> None:
    text = """
name: known
device: simulated-v100
train: {function: "a:b"}
target: {metric: accuracy, value: 0.9, better: higher}
batch_sizes: [32, 64]
default_batch_size: 64
max_epochs: 5
"""
    gpu, profiles, overheads = simulated_profiles(parse_job(text), 1000)

    assert overheads[32].evaluations_per_epoch == pytest.approx(1.0)
    assert overheads[32].evaluation_at(250.0).time_s == pytest.approx(6.0)

    assert gpu.max_power_w == 250.0
    assert [m.setting for m in profiles[32].measurements] == [250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0]
    assert profiles[64].measurements[0].samples_per_s > profiles[32].measurements[0].samples_per_s


def history(*epochs: int) -> list[Observation]:
    return [observation(n, epochs=e, energy_j=1000.0 * e, time_s=8.0 * e) for n, e in enumerate(epochs, start=1)]


def test_a_surprising_run_ends_a_drift_window_with_its_evidence() -> None:
    windows = fold_windows(JOB, history(5, 5, 5, 5, 5, 5, 15, 15, 15))

    assert [(w.first, w.last) for w in windows] == [(1, 7), (8, 9)]
    ended = windows[0].ended_by
    assert ended is not None
    assert ended.kind == "drift"
    assert "took 15 epochs where about 5.0 were expected" in ended.text
    assert ended.numbers["surprise"] > 5
    assert windows[1].ended_by is None
    assert windows[1].best == 64


def test_a_full_window_ends_after_n_recurrences() -> None:
    from dataclasses import replace

    job = replace(JOB, policy="zeus", window=3)

    windows = fold_windows(job, history(5, 5, 6, 5, 5, 6, 5))

    assert [(w.first, w.last) for w in windows] == [(1, 3), (4, 6), (7, 7)]
    assert [w.ended_by.kind if w.ended_by else None for w in windows] == ["full", "full", None]


def test_nothing_observed_makes_no_window_and_no_boundary() -> None:
    state = policy.initial(JOB)

    assert fold_windows(JOB, []) == ()
    assert boundary(JOB, state, state, [], recurrences=1) is None
    assert best_arm(beliefs(JOB, state)) is None


def test_figure_10_is_written_as_svg_and_png_with_windows_and_resets(tmp_path: Path) -> None:
    observations = [
        *history(5, 5, 5, 5, 5, 5, 15),
        observation(8, 1, 32, explores=True, epochs=20, outcome=Outcome.STOPPED),
        observation(8, 2, 64, epochs=15),
    ]

    figure = figures.figure_10(figures.points(observations), fold_windows(JOB, observations), title="nightly")
    svg, png = figures.write(figure, tmp_path, "figure-10")

    text = svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")
    for words in ("ETA", "TTA", "batch size", "drift: epochs forgotten", "stopped, then retried"):
        assert words in text
    figures.write(figure, tmp_path, "again")
    assert (tmp_path / "again.svg").read_text() == text
