"""Arms that the belief expects nothing of are looked at, rarely, and never locked out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.core import builders
from tests.core.builders import V100, profile
from zeus_flows.core.belief import EpochsBelief, StoppedRuns
from zeus_flows.core.policy.base import Costs, View
from zeus_flows.core.policy.outlook import Outlook
from zeus_flows.core.policy.trials import look_at
from zeus_flows.core.records import Outcome
from zeus_flows.experiments.replay.comparison import dearest, default_run
from zeus_flows.experiments.replay.replaying import replay, replay_job
from zeus_flows.experiments.replay.traces import Trace
from zeus_flows.recurrence.loop import Recurrence

LEVELS = (0.5, 0.7, 0.8, 0.9)


def trace(epochs: dict[int, int], *, default: int, curves: bool = True) -> Trace:
    """Return a trace in which every run of a batch size takes the same epochs, passing levels at equal shares."""
    arms = tuple(epochs)
    runs = {b: tuple(max(1, e + off) for off in (-1, 0, 0, 1)) for b, e in epochs.items()}
    shares = (0.1, 0.3, 0.6, 1.0)
    curve = {
        b: tuple(tuple((max(1, round(s * e)), v) for s, v in zip(shares, LEVELS, strict=True)) for e in each)
        for b, each in runs.items()
    }
    return Trace(
        workload="stepped",
        gpu=V100,
        epochs=runs,
        profiles={b: profile(b) for b in arms},
        default_batch_size=default,
        max_epochs=3 * max(epochs.values()),
        curves=curve if curves else {},
    )


STEPPED = trace({16: 6, 32: 7, 64: 40, 128: 42, 256: 44}, default=128)  # five times as many epochs from 64 on


def explored(of: Trace, policy: str, *, recurrences: int, seed: int) -> list[tuple[int, int, Outcome]]:
    """Return recurrence, batch size and outcome of every exploration."""
    seen: list[Recurrence] = []
    replay(of, replay_job(of, policy), recurrences=recurrences, seed=seed, watch=seen.append)
    tries = [(a.decision, o) for r in seen for a, o in r.attempts]
    return [(d.recurrence, d.batch_size, o.outcome) for d, o in tries if d.explores]


@pytest.mark.parametrize("policy", ["thompson", "lookahead"])
def test_a_step_that_no_law_has_is_found_by_its_learning_curve(policy: str) -> None:
    for seed in range(5):
        done = replay(STEPPED, replay_job(STEPPED, policy), recurrences=40, seed=seed)
        assert done.last(done.last_costs_j) < 1.2 * done.best_cost_j


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["thompson", "lookahead"])
def test_looks_become_rare_but_are_never_over(policy: str) -> None:
    flat = trace({16: 30, 32: 30, 64: 30, 128: 30, 256: 30}, default=256, curves=False)
    tries = [r for r, b, _ in explored(flat, policy, recurrences=3_000, seed=0) if b < 128]
    assert any(r <= 10 for r in tries)
    assert 1 <= sum(r > 500 for r in tries) <= 10, "what its own runs have not ruled out is looked at later too"


def test_an_optimum_behind_a_dearer_batch_size_is_found_by_a_look() -> None:
    humped = trace({16: 12, 32: 16, 64: 36, 128: 40, 256: 40}, default=256, curves=False)
    tries = explored(humped, "thompson", recurrences=40, seed=0)
    assert any(b < 64 for _, b, _ in tries)


def test_looks_that_found_nothing_make_the_next_one_worth_less() -> None:
    job = builders.job("thompson")
    belief = EpochsBelief.empty(job.batch_sizes, 32).complete(job, 32, 30).complete(job, 32, 31)
    costs = Costs({16: 110.0, 32: 100.0})
    view = View(builders.ask(40), job.batch_sizes, 32, may_explore=True, look_up_costs=lambda: costs)

    def worth(fruitless: int) -> float:
        stopped = tuple(StoppedRuns(fruitless if b == 128 else 0) for b in job.batch_sizes)
        look = look_at(Outlook(job, replace(belief, stopped=stopped, completions=3_000), view), 1)
        return look.worth if look is not None else 0.0

    assert worth(0) > worth(1) > 0
    assert worth(1_000) == 0


def test_a_look_costs_a_fraction_of_a_run_where_curves_tell() -> None:
    lagging = trace({16: 60, 32: 50, 64: 40, 128: 40, 256: 40}, default=128)
    seen: list[Recurrence] = []
    replay(lagging, replay_job(lagging, "thompson"), recurrences=60, seed=0, watch=seen.append)
    stopped = [o for r in seen for _, o in r.attempts if o.outcome is Outcome.STOPPED]
    assert stopped
    assert all(o.epochs <= 0.5 * 40 for o in stopped)


def test_a_decision_says_how_epochs_depend_on_the_batch_size_in_words() -> None:
    growing = trace({16: 10, 32: 14, 64: 20, 128: 28, 256: 40}, default=128)
    seen: list[Recurrence] = []
    replay(growing, replay_job(growing, "thompson"), recurrences=12, seed=0, watch=seen.append)
    told = re.search(r"epochs grow about (\d+) % per doubling here", seen[-1].attempts[0][0].decision.reason.text)
    assert told is not None
    assert float(told[1]) == pytest.approx(41, abs=6)


def test_the_same_observations_give_the_same_look() -> None:
    once, again = (explored(STEPPED, "thompson", recurrences=30, seed=2) for _ in range(2))
    assert once == again


@pytest.mark.parametrize("policy", ["thompson", "lookahead"])
def test_a_budget_keeps_what_trials_cost_within_bounds_that_are_passed_without_it(policy: str) -> None:
    deceiving = trace({8: 40, 16: 36, 32: 20, 64: 36, 128: 66}, default=32, curves=False)

    def dearest_with(budget: float | None) -> float:
        job = replay_job(deceiving, policy, exploration_budget=budget)
        replays = [replay(deceiving, job, recurrences=30, seed=s) for s in range(5)]
        return dearest(replays, default_run(deceiving, job).cost_j, since=10)

    assert dearest_with(0.05) <= 1.05
    assert dearest_with(None) > 1.1
