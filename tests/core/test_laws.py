from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.core.builders import ARMS
from zeus_flows.core.belief import EpochsBelief
from zeus_flows.core.job import Drift, Job, WindowOf
from zeus_flows.core.laws import CRITICAL

WIDE = (16, 32, 64, 128, 256, 512)
JOB = Job("t", WIDE, 512, 200)


def believe(epochs: dict[int, int], job: Job = JOB) -> EpochsBelief:
    belief = EpochsBelief.empty(job.batch_sizes, job.default_batch_size)
    for batch_size, each in epochs.items():
        belief = belief.complete(job, batch_size, each)
    return belief


def test_epochs_that_halve_with_the_batch_size_favour_a_small_critical_one() -> None:
    steep, flat = believe({512: 80, 256: 42}).posterior, believe({512: 80, 256: 79}).posterior
    centres = [sum(q * float(w) for q, w in zip(CRITICAL, p.laws, strict=True)) for p in (steep, flat)]
    assert centres[0] < centres[1] - 2
    arm = WIDE.index(128)
    assert math.exp(steep.mean[arm]) == pytest.approx(23, rel=0.2)
    assert math.exp(flat.mean[arm]) > 65


def test_before_a_second_arm_ran_a_neighbour_may_need_half_the_epochs() -> None:
    p, arm = believe({512: 80}).posterior, WIDE.index(256)
    least = float(p.mean[arm]) - 2 * math.sqrt(p.variance[arm])
    assert math.exp(least) < 45


def test_a_step_that_no_law_has_is_followed_by_wider_beliefs() -> None:
    smooth, stepped = believe({512: 33, 256: 31, 128: 29}).posterior, believe({512: 33, 256: 31, 128: 3}).posterior
    assert stepped.variance[WIDE.index(64)] > 4 * smooth.variance[WIDE.index(64)]


def test_a_step_next_door_does_not_talk_an_arm_out_of_what_its_own_run_took() -> None:
    job = Job("t", WIDE, 16, 200)
    belief = believe({16: 3, 32: 3}, job).stop(64, 9, max_epochs=200)
    assert math.exp(belief.posterior.mean[WIDE.index(32)]) < 3.5


def test_a_window_of_the_job_counts_the_newest_runs_of_all_arms() -> None:
    job = Job("t", ARMS, 32, 100, window=3, window_of=WindowOf.JOB, drift=Drift.IGNORE)
    runs = {8: 10, 16: 11, 32: 12, 64: 13}
    assert believe(runs, job).runs == (0, 1, 1, 1, 0)
    assert believe(runs, replace(job, window_of=WindowOf.ARM)).runs == (1, 1, 1, 1, 0)


@pytest.mark.parametrize("epochs", [1, 2, 3, 5])
def test_one_epoch_more_or_less_is_no_drift_where_runs_take_a_few(epochs: int) -> None:
    job = Job("t", ARMS, 32, 100)
    belief = EpochsBelief.empty(ARMS, 32)
    for recurrence in range(60):
        belief = belief.complete(job, 32, epochs + (recurrence % 7 == 0))
    assert belief.resets == 0


def test_epochs_that_double_are_drift_where_runs_take_more_than_a_few() -> None:
    job = Job("t", ARMS, 32, 100)
    belief = EpochsBelief.empty(ARMS, 32)
    for epochs in [10] * 8 + [20] * 3:
        belief = belief.complete(job, 32, epochs)
    assert belief.resets == 1
