"""`zeus-paper`, recurrence by recurrence, on a trace small enough to be worked out with pencil and paper.

The objective weighs energy and time equally (eta = 1/2) on a GPU of 200 W at most, so t seconds at p watts cost
p t / 2 + 200 t / 2 joules (eq. 2). An epoch that takes t seconds at 100 W, drawing 100 W, takes 0.9 t at 200 W,
drawing 180 W:

    at 100 W    50 t + 100 t = 150   t      the best limit of every batch size
    at 200 W    81 t +  90 t = 171   t
    profiling   half of each = 160.5 t      the first epoch of a batch size (section 4.2)

    batch size     t   epochs   an epoch   profiling
            16    20    never       3000        3210
            32    12        5       1800        1926
            64    10        8       1500        1605     the default
           128     8        9       1200        1284

Nothing here was recorded from the published package: the numbers follow from the paper's Algorithms 2 and 3, and from
what `zeus_flows.core.policy.zeus_paper` says that the package does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zeus_flows.core import policy
from zeus_flows.core.early_stop import CostCut, NoCut
from zeus_flows.core.records import Outcome
from zeus_flows.experiments.replay.replaying import replay, replay_job
from zeus_flows.experiments.replay.traces import POWER_COLUMNS, TRAIN_COLUMNS, Trace, TraceJob, read_trace
from zeus_flows.recurrence.loop import Recurrence

SECONDS = {16: 20.0, 32: 12.0, 64: 10.0, 128: 8.0}
EPOCHS = {16: "nan", 32: "5", 64: "8", 128: "9"}
SPEC = TraceJob("pencil", "paper", "sgd", 0.9, max_epochs=20, default_batch_size=64)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    train, power = [",".join(TRAIN_COLUMNS)], [",".join(POWER_COLUMNS)]
    for b, t in SECONDS.items():
        train.append(f"pencil,paper,{b},sgd,0.1,1,0.9,{EPOCHS[b]}")
        power += [f"pencil,paper,{b},sgd,100,{t},100", f"pencil,paper,{b},sgd,200,{0.9 * t},180"]
    (tmp_path / "summary_train.csv").write_text("\n".join(train) + "\n")
    (tmp_path / "summary_power_v100.csv").write_text("\n".join(power) + "\n")
    return read_trace(tmp_path, "pencil", "v100", SPEC)


def replayed(trace: Trace, recurrences: int, seed: int = 0, **changes: object) -> list[Recurrence]:
    seen: list[Recurrence] = []
    replay(trace, replay_job(trace, "zeus-paper", **changes), recurrences=recurrences, seed=seed, watch=seen.append)
    return seen


def test_what_a_batch_size_costs_is_its_epochs_at_its_best_power_limit(trace: Trace) -> None:
    job = replay_job(trace, "zeus-paper")
    assert {b: trace.epoch_cost(job, b) for b in SECONDS} == pytest.approx({16: 3000, 32: 1800, 64: 1500, 128: 1200})
    expected = trace.expected_costs(job)
    assert (expected[32], expected[64], expected[128]) == pytest.approx((9000, 12000, 10800))
    assert trace.best_cost_j(job) == pytest.approx(9000)


def test_pruning_goes_down_until_a_batch_size_fails_then_up_and_again_from_the_cheapest(trace: Trace) -> None:
    steps = [
        (recurrence.number, decision.attempt, decision.batch_size, observed.outcome, observed.epochs)
        for recurrence in replayed(trace, 6)
        for decision, observed in ((attempt.decision, observed) for attempt, observed in recurrence.attempts)
    ]
    reached, stopped = Outcome.CONVERGED, Outcome.STOPPED
    assert steps == [
        (1, 1, 64, reached, 8),  # round 1 begins at the default
        (2, 1, 32, reached, 5),  # down
        (3, 1, 16, stopped, 6),  # down: it may cost 18252, and six epochs cost 18000; it and all below are pruned
        (3, 2, 128, reached, 9),  # up, in the same recurrence
        (4, 1, 32, reached, 5),  # round 2 begins at the cheapest, below which nothing is left
        (5, 1, 64, reached, 8),  # up
        (6, 1, 128, reached, 9),
    ]


def test_the_first_run_of_a_batch_size_pays_for_its_profile_and_the_attempts_of_a_recurrence_add_up(
    trace: Trace,
) -> None:
    job = replay_job(trace, "zeus-paper")
    costs = [recurrence.cost_j(job) for recurrence in replayed(trace, 6)]
    assert costs == pytest.approx(
        [
            1605 + 7 * 1500,  # 12105
            1926 + 4 * 1800,  # 9126
            (3210 + 5 * 3000) + (1284 + 8 * 1200),  # 18210 + 10884
            5 * 1800,
            8 * 1500,
            9 * 1200,
        ]
    )


@pytest.mark.parametrize("beta", [2.0, 1.5])
def test_a_run_may_cost_beta_times_the_cheapest_recurrence_so_far(trace: Trace, beta: float) -> None:
    cuts = [attempt.decision.cut for r in replayed(trace, 6, beta=beta) for attempt, _ in r.attempts]
    assert cuts[0] == NoCut(), "nothing is known before the first run"
    least = [12105, 9126, 9126, 9126, 9000, 9000]
    assert [cut.threshold_j for cut in cuts[1:] if isinstance(cut, CostCut)] == pytest.approx([beta * c for c in least])


@pytest.mark.parametrize("seed", range(5))
def test_after_pruning_each_draw_is_far_nearer_to_its_mean_than_to_another_s(trace: Trace, seed: int) -> None:
    seen = replayed(trace, 12, seed=seed)
    job = replay_job(trace, "zeus-paper", seed=seed)
    costs = policy.fold(job, [o for r in seen[:6] for _, o in r.attempts]).belief.costs
    assert {b: costs[b].mean for b in (32, 64, 128)} == pytest.approx(
        {32: (9126 + 9000) / 2, 64: (12105 + 12000) / 2, 128: (10884 + 10800) / 2}
    )
    assert {b: costs[b].count for b in costs} == {16: 1, 32: 2, 64: 2, 128: 2}
    later = [attempt.decision for r in seen[6:] for attempt, _ in r.attempts]
    assert {(d.reason.kind, d.batch_size) for d in later} == {("sampled", 32)}
    assert [r.cost_j(job) for r in seen[6:]] == pytest.approx([9000] * 6)


def test_a_run_that_may_not_train_one_epoch_counts_as_a_hundred_thresholds(trace: Trace) -> None:
    # With a beta of a seventh, 12105 / 7 = 1729 is less than an epoch of 32 (1800) and more than one of 128 (1200).
    job = replay_job(trace, "zeus-paper", beta=1 / 7, max_attempts=2)
    (first, second) = replayed(trace, 2, beta=1 / 7, max_attempts=2)
    (_, refused), (_, stopped) = second.attempts
    assert (refused.batch_size, refused.epochs, refused.energy_j) == (32, 0, 0.0)
    assert (stopped.batch_size, stopped.epochs) == (128, 1)
    belief = policy.fold(job, [first.attempts[0][1], refused, stopped]).belief
    assert belief.costs[32].mean == pytest.approx(100 * 12105 / 7)
    assert belief.costs[128].mean == pytest.approx(1284)
