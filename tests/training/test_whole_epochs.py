"""Costs count whole epochs: on the emulated driver, where evaluation, start-up and checkpoints take time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.nvml_emulator import Emulator
from tests.training.emulated_job import CHIP, SAMPLES, EmulatedJob, Loader, SimulatedJob, Training
from zeus_flows.core import policy
from zeus_flows.core.overheads import nearest
from zeus_flows.core.power import run_at
from zeus_flows.core.records import Observation
from zeus_flows.core.savings import POWER_LIMIT
from zeus_flows.recurrence.loop import Recurrence
from zeus_flows.training.session import Session

Emulate = Callable[..., Emulator]

# Steps alone favour a large batch; each epoch that it needs more pays for an evaluation too.
EPOCHS = {64: 6, 128: 6, 256: 7, 512: 9, 1024: 14}
TWICE = 80.0  # seconds of an evaluation: twice an epoch's steps with very large batches


CADENCES = {
    "every epoch": {},
    "every third epoch": {"every": 3},
    "every 8 steps": {"every_steps": 8},
    "accumulated": {"accumulation": 4},
    "accumulated, every 16 steps": {"accumulation": 4, "every_steps": 16},
    "waiting for the host": {"busy": False},
}


def settle(emulate: Emulate, folder: Path, training: Training, **changes: object) -> EmulatedJob:
    emulator = emulate(NVMLEMU_CLOCK="virtual", NVMLEMU_UPDATE_MS="20")
    return EmulatedJob(emulator, folder, training, **changes)


def most_of_the_last(newest: int, done: list[Recurrence]) -> int:
    """Return the batch size that is run; `zeus` goes on drawing others now and then."""
    sizes = [recurrence.attempts[-1][1].batch_size for recurrence in done[-newest:]]
    return max(sizes, key=sizes.count)


def cheapest(training: Training) -> int:
    return min(training.epochs, key=training.true_cost)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["thompson", "lookahead", "zeus"])
@pytest.mark.parametrize("evaluation", [0.0, 20.0, TWICE])
def test_the_batch_size_settled_on_is_the_cheapest_in_truth(
    emulate: Emulate, tmp_path: Path, policy: str, evaluation: float
) -> None:
    training = Training(EPOCHS, evaluation=evaluation, start_s=20.0, compile_s=10.0, checkpoint_s=2.0)
    job = settle(emulate, tmp_path, training, policy=policy)
    settled = most_of_the_last(10, job.recur(30))
    assert training.true_cost(settled) <= 1.02 * training.true_cost(cheapest(training))


@pytest.mark.slow
@pytest.mark.parametrize("cadence", [name for name in CADENCES if name not in ("every epoch", "waiting for the host")])
def test_so_it_is_however_often_and_in_however_small_batches(emulate: Emulate, tmp_path: Path, cadence: str) -> None:
    evaluation = 10.0 if "steps" in cadence else TWICE
    training = replace(Training(EPOCHS, evaluation=evaluation), **CADENCES[cadence])  # type: ignore[arg-type]
    settled = most_of_the_last(10, settle(emulate, tmp_path, training, policy="zeus").recur(30))  # it tries every arm
    assert training.true_cost(settled) <= 1.02 * training.true_cost(cheapest(training))


@pytest.mark.parametrize("policy", ["thompson", "lookahead", "zeus"])
@pytest.mark.parametrize("evaluation", [0.0, TWICE])
def test_so_it_is_on_the_simulated_gpu(tmp_path: Path, policy: str, evaluation: float) -> None:
    training = Training(EPOCHS, evaluation=evaluation)
    job = SimulatedJob(tmp_path, training, policy=policy)
    settled = most_of_the_last(10, job.recur(30))
    assert training.true_cost(settled) <= 1.02 * training.true_cost(cheapest(training))


def test_evaluation_shifts_which_batch_size_is_cheapest() -> None:
    without, with_it = Training(EPOCHS), Training(EPOCHS, evaluation=TWICE)
    assert cheapest(without) > cheapest(with_it)


@pytest.mark.parametrize("evaluation", [0.0, 10.0, TWICE])
@pytest.mark.parametrize("cadence", CADENCES)
def test_what_a_run_takes_is_predicted_given_its_epochs_and_evaluations(
    emulate: Emulate, tmp_path: Path, cadence: str, evaluation: float
) -> None:
    scale = 0.25 if "steps" in cadence else 1.0
    training = Training({64: 4, 256: 4}, evaluation=scale * evaluation, start_s=15.0, compile_s=8.0, checkpoint_s=3.0)
    training = replace(training, **CADENCES[cadence])  # type: ignore[arg-type]
    job = settle(emulate, tmp_path, training, policy="power")
    runs = [attempt for done in job.recur(4) for attempt in done.attempts]
    assert len(runs) == 4
    for attempt, observed in runs[2:]:
        assert observed.parts is not None
        assert observed.parts.evaluations.count == training.evaluations(observed.batch_size, observed.epochs)
        assert attempt.profile is not None
        predicted = run_at(
            attempt.profile,
            nearest(attempt.profile, observed.setting or 0.0),
            epochs=observed.epochs,
            evaluations=observed.parts.evaluations.count,
            samples_per_epoch=observed.samples_per_epoch,
            overheads=attempt.overheads,
        )
        assert predicted.time_s == pytest.approx(observed.time_s, rel=0.02)
        assert predicted.energy_j == pytest.approx(observed.energy_j, rel=0.02)


@pytest.mark.parametrize("cadence", ["every 8 steps", "accumulated, every 16 steps"])
def test_spans_of_profiling_are_free_of_evaluation(emulate: Emulate, tmp_path: Path, cadence: str) -> None:
    def profiled(evaluation: float) -> Observation:
        training = replace(Training({64: 4, 256: 4}, evaluation=evaluation), **CADENCES[cadence])  # type: ignore[arg-type]
        return settle(emulate, tmp_path / str(evaluation), training, policy="power").recur(1)[0].attempts[0][1]

    (tmp_path / "0.0").mkdir()
    (tmp_path / "20.0").mkdir()
    clean, loaded = profiled(0.0), profiled(20.0)
    assert clean.profile is not None
    assert loaded.profile is not None
    assert clean.profile.complete
    for at, other in zip(clean.profile.measurements, loaded.profile.measurements, strict=True):
        assert other.samples_per_s == pytest.approx(at.samples_per_s, rel=0.01)
        assert other.average_power_w == pytest.approx(at.average_power_w, rel=0.01)


def test_the_parts_of_an_attempt_are_what_it_did(emulate: Emulate, tmp_path: Path) -> None:
    training = Training({64: 4, 256: 4}, evaluation=10.0, start_s=15.0, compile_s=8.0, checkpoint_s=3.0, busy=False)
    parts = settle(emulate, tmp_path, training, policy="power").recur(1)[0].attempts[0][1].parts
    assert parts is not None
    assert parts.once.time_s == pytest.approx(23.0, rel=0.02)
    assert (parts.evaluations.count, parts.rest.count) == (4, 4)
    assert (parts.evaluations.time_s, parts.rest.time_s) == pytest.approx((40.0, 12.0), rel=0.02)


@pytest.mark.parametrize("every", [1, 3])
def test_a_policy_that_changes_nothing_saves_nothing_however_long_it_evaluates(
    emulate: Emulate, tmp_path: Path, every: int
) -> None:
    training = Training({64: 4, 256: 4}, evaluation=TWICE, every=every, start_s=30.0, compile_s=8.0, checkpoint_s=5.0)
    job = settle(emulate, tmp_path, training, policy="default")
    job.recur(6)
    so_far = policy.saved(job.job, policy.fold(job.job, job.ledger.observations())).so_far
    assert so_far is not None
    assert so_far.recurrences == 6
    assert so_far.total.amount.cost_j == so_far.total.amount.energy_j == so_far.total.amount.time_s == 0.0


def test_what_the_power_limit_saves_is_what_runs_at_either_limit_differ_by(emulate: Emulate, tmp_path: Path) -> None:
    training = Training({64: 4, 256: 4}, evaluation=20.0, start_s=10.0, checkpoint_s=2.0)
    tuned = settle(emulate, tmp_path, training, mode="power", control=4)
    runs = [done.attempts[-1][1] for done in tuned.recur(12)]
    controls, others = ([o for o in runs if o.control is control] for control in (True, False))
    assert len(controls) == 3
    saved = policy.saved(tuned.job, policy.fold(tuned.job, tuned.ledger.observations()))
    line = None if saved.so_far is None else saved.so_far.line(POWER_LIMIT)
    assert line is not None
    true = len(others) * (controls[0].energy_j - others[-1].energy_j)
    assert line.low.energy_j <= true <= line.high.energy_j
    assert line.amount.energy_j == pytest.approx(true, rel=0.05)
    assert saved.default.controls == 3


class Loops(EmulatedJob):
    """The same training, whose loop goes through its batches in another way."""

    way = ""

    def _train(self, session: Session) -> None:
        training, b = self.training, session.batch_size
        load, steps = training.load(b), math.ceil(SAMPLES / b)
        for epoch in session.epochs():
            batches = session.steps(iter(range(steps)) if "length" in self.way else Loader(b))
            half = steps // 2 if "breaks" in self.way else steps
            for step in range(1, half + 1):
                next(batches)
                self._pass(load, b / SAMPLES * load.seconds_per_epoch)
                if "between" in self.way and step % 4 == 0:
                    self._evaluate(load)
                    session.report_metric(0.0)
            if "between" in self.way:
                assert next(batches, None) is None
            else:
                self._evaluate(load)
            session.report_metric(float(epoch == training.epochs[b]))


@pytest.mark.parametrize(
    "way",
    [
        "never asks past the last batch",
        "never asks past the last batch of a loader without a length",
        "evaluates between steps and does not mark it",
        "breaks off in the middle of an epoch",
    ],
)
def test_evaluation_is_told_from_steps_in_whichever_way_a_loop_goes(emulate: Emulate, tmp_path: Path, way: str) -> None:
    training = Training({256: 5}, evaluation=5.0 if "between" in way else 40.0)
    job = Loops(
        emulate(NVMLEMU_CLOCK="virtual", NVMLEMU_UPDATE_MS="20"),
        tmp_path,
        training,
        policy="power",
        batch_sizes=[256],
        default_batch_size=256,
    )
    job.way = way
    observed = job.recur(2)[-1].attempts[-1][1]
    load = training.load(256)
    assert observed.profile is not None
    assert observed.parts is not None
    assert observed.setting is not None
    for m in observed.profile.measurements:
        seconds, watts = CHIP.epoch(load, m.setting)
        assert m.samples_per_s == pytest.approx(SAMPLES / seconds, rel=0.02)
        assert m.average_power_w == pytest.approx(watts, rel=0.02)
    evaluations = observed.parts.evaluations
    slower = CHIP.epoch(load, observed.setting)[0] / load.seconds_per_epoch
    assert evaluations.count == (5 * 8 if "between" in way else 5)
    assert evaluations.time_s == pytest.approx(evaluations.count * training.evaluation * slower, rel=0.05)


def test_a_limit_that_is_best_for_whole_epochs_is_chosen(emulate: Emulate, tmp_path: Path) -> None:
    """A long evaluation that waits for the host prices time: a limit that slows steps costs no more of it."""
    waiting = Training({64: 4, 256: 4}, evaluation=TWICE, busy=False)
    job = settle(emulate, tmp_path, waiting, policy="power")
    last = job.recur(3)[-1].attempts[-1][1]
    assert last.profile is not None

    def true_cost(limit: float) -> float:
        seconds, watts = CHIP.epoch(waiting.load(256), limit)
        return 0.5 * (seconds * watts + TWICE * CHIP.idle_w) + 0.5 * 250.0 * (seconds + TWICE)

    best = min((m.setting for m in last.profile.measurements), key=true_cost)
    assert last.setting is not None
    assert true_cost(last.setting) <= 1.005 * true_cost(best)
