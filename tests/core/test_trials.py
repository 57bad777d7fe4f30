"""Arms that the belief expects nothing of are looked at, rarely, and never locked out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core import builders
from tests.core.builders import V100, profile
from zeus_flows.core.belief import EpochsBelief, StoppedRuns
from zeus_flows.core.policy.base import Costs, View
from zeus_flows.core.policy.outlook import Outlook
from zeus_flows.core.policy.trials import LATEST, TIMES, best_look
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
    def worth(fruitless: int) -> float:
        look = best_look(outlook(completions=3_000, stopped=StoppedRuns(fruitless, newest=3_000)))
        return 0.0 if look is None else look.reason.numbers["worth"]

    assert worth(1) > worth(2) > 0
    assert worth(1_000) == 0


def outlook(*, completions: int, stopped: StoppedRuns, dead: bool = False) -> Outlook:
    """Return what is believed where 32 is the best known, and 128 alone has never reached the target."""
    job = builders.job("thompson")
    belief = EpochsBelief.empty(job.batch_sizes, 32)
    for b in job.batch_sizes:
        if b != 128:
            belief = belief.complete(job, b, 30 if b == 32 else 200)
    at = job.batch_sizes.index(128)
    belief = replace(
        belief,
        stopped=tuple(stopped if i == at else s for i, s in enumerate(belief.stopped)),
        dead=tuple(dead and i == at for i in range(len(job.batch_sizes))),
        completions=completions,
    )
    costs = Costs({b: 100.0 * 32 / b for b in job.batch_sizes})
    view = View(builders.ask(40), job.batch_sizes, 32, may_explore=True, look_up_costs=lambda: costs)
    return Outlook(job, belief, view)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**5), st.integers(1, 10**4))
def test_a_look_is_due_whenever_the_runs_have_doubled_since_the_last(
    completions: int, last: int, count: int, epochs: int
) -> None:
    """However often it was stopped, and however much that has cost."""
    last = min(last, completions)
    seen = StoppedRuns(count, count * epochs, epochs, newest=last)
    look = best_look(outlook(completions=completions, stopped=seen))
    assert look is None or look.batch_size == 128
    if completions >= max(LATEST, TIMES * last):
        assert look is not None
    assert best_look(outlook(completions=completions, stopped=seen, dead=True)) is None, "its own run has ruled it out"


HUMPS = {
    "the optimum behind two dearer ones": ({16: 6, 32: 7, 64: 12, 128: 19, 256: 17, 512: 10}, 16),
    "an arm that nobody would hope for": ({16: 90, 32: 60, 64: 30, 128: 30, 256: 31}, 256),
    "a wall on either side": ({16: 150, 32: 140, 64: 20, 128: 150, 256: 300}, 64),
    "the optimum far below, behind a wall": ({16: 3, 32: 80, 64: 60, 128: 40, 256: 30, 512: 20}, 512),
}


@pytest.mark.slow
@pytest.mark.parametrize("curves", [False, True], ids=["ends", "curves"])
@pytest.mark.parametrize("hump", HUMPS)
def test_while_an_arm_has_never_completed_looks_go_on_at_a_falling_rate(hump: str, curves: bool) -> None:
    """At 1,000 and at 3,000 recurrences: one in every doubling, at most a few, and in the end the best is found."""
    epochs, default = HUMPS[hump]
    humped = trace(epochs, default=default, curves=curves)
    seen: list[Recurrence] = []
    done = replay(humped, replay_job(humped, "thompson"), recurrences=3_250, seed=1, watch=seen.append)
    attempts = [o for r in seen for _, o in r.attempts]
    completed = {o.batch_size for o in attempts if o.converged}
    looks = [o.recurrence for o in attempts if o.explores and o.batch_size not in completed]
    for begin in (200, 400, 800, 1_600):
        if completed != set(epochs):
            assert 1 <= sum(begin < r <= 2 * begin + 10 for r in looks) <= 5
    assert done.last(done.last_costs_j) < 1.15 * done.best_cost_j


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
