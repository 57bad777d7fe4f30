"""A decision is explained by taking it again: on a thousand random histories it comes out as it is recorded."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.core.builders import ARMS, P100, V100, job, observation
from zeus_flows.core import policy
from zeus_flows.core.explaining import apply_change, ask_of, differences, explain, job_then, ways_folded
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.policy import POLICIES
from zeus_flows.core.records import Ask, Decision, InFlight, Observation, Outcome, decision_seed
from zeus_flows.ledger.mlflow.record_text import dump_decision, dump_observation, load_decision, load_observation

HISTORIES = 1_000


def random_job(chance: random.Random) -> Job:
    return job(
        chance.choice(sorted(POLICIES)),
        seed=chance.randrange(1_000),
        mode=chance.choice([Mode.FULL, Mode.FULL, Mode.FULL, Mode.POWER, Mode.OBSERVE]),
        exploration_budget=chance.choice([None, None, 0.05, 0.5]),
        deadline_s=chance.choice([None, None, 600.0]),
        control=chance.choice([None, None, 5]),
        window=chance.choice([None, 6]),
        eta=chance.choice([0.0, 0.5, 1.0]),
    )


def history(a_job: Job, chance: random.Random) -> Iterator[tuple[Decision, Observation | None]]:
    """Recurrences of a random world, some of which overlap; each decision as it is stored."""
    needed = {b: max(1, round(10 * abs(math.log2(b / chance.choice(ARMS))) + chance.uniform(3, 12))) for b in ARMS}
    state, waiting = policy.initial(a_job), list[tuple[Decision, Observation]]()
    for number in range(1, chance.randint(2, 14)):
        in_flight = tuple(InFlight(d.recurrence, d.attempt, d.batch_size, d.explores) for d, _ in waiting)
        under_way = tuple(d.recurrence for d, _ in waiting)
        gpu = chance.choice([V100, V100, V100, P100])
        ask = Ask(number, 1, decision_seed(a_job.seed, number, 1), gpu, None, in_flight, under_way=under_way)
        stored = load_decision(dump_decision(policy.decide(a_job, state, ask)))
        epochs = max(1, round(needed[stored.batch_size] * chance.lognormvariate(0, 0.2)))
        outcome = Outcome.CONVERGED if epochs <= 30 else chance.choice([Outcome.STOPPED, Outcome.FAILED])
        seen = observation(number, stored.batch_size, epochs, outcome=outcome, gpu=gpu, profiled=True, for_job=a_job)
        waiting.append((stored, load_observation(dump_observation(replace(seen, mode=stored.mode)))))
        if chance.random() < 0.8:  # else it is still under way when the next one decides
            for decided, observed in waiting:
                state = policy.advance(a_job, state, observed)
                yield decided, observed
            waiting = []
    yield from waiting


@pytest.mark.slow
def test_explained_decisions_of_a_thousand_histories_are_those_recorded() -> None:
    explained = changed = 0
    for seed in range(HISTORIES):
        chance = random.Random(seed)
        a_job = random_job(chance)
        found = list(history(a_job, chance))
        observations = [o for _, o in found if o is not None]
        for decided, _ in found:
            states = (policy.fold(a_job, way) for way in ways_folded(decided, observations))
            told = explain(a_job, states, decided, changes=False)
            assert told.same, (seed, decided.recurrence, told.differences)
            explained += 1
        last = found[-1][0]
        folded = [policy.fold(a_job, way) for way in ways_folded(last, observations)]
        for change in explain(a_job, folded, last).changes if seed % 3 == 0 else ():
            after = apply_change(job_then(a_job, last), folded[0], ask_of(last), change)
            assert after.batch_size == change.batch_size != last.batch_size, (seed, change.text)
            changed += 1
    assert explained > 5 * HISTORIES
    assert changed > HISTORIES / 10


def test_what_would_change_a_decision_does_change_it() -> None:
    a_job, observed = job(), [observation(n, b, e, profiled=True) for n, b, e in ((1, 32, 9), (2, 64, 8), (3, 16, 30))]
    state = policy.fold(a_job, observed)
    decided = policy.decide(a_job, state, Ask(4, 1, decision_seed(0, 4, 1), V100))
    told = explain(a_job, [state], decided)
    assert told.same
    assert told.changes
    for change in told.changes:
        assert apply_change(a_job, state, ask_of(decided), change).batch_size == change.batch_size != decided.batch_size


def test_a_mode_that_keeps_the_batch_size_is_named_as_what_would_change_it() -> None:
    a_job = job(mode=Mode.POWER)
    observed = [observation(1, 32, 20, profiled=True), observation(2, 64, 4, profiled=True)]
    state = policy.fold(a_job, observed)
    told = explain(a_job, [state], policy.decide(a_job, state, Ask(3, 1, 1, V100)))
    assert "in mode full" in [change.text for change in told.changes]


def test_a_history_that_lost_an_observation_is_not_passed_off_as_the_reason() -> None:
    a_job, observed = job(), [observation(n, 32, 9, profiled=True) for n in (1, 2, 3)]
    decided = policy.decide(a_job, policy.fold(a_job, observed), Ask(4, 1, 1, V100))
    told = explain(a_job, [policy.fold(a_job, observed[:-1])], decided)
    assert not told.same
    assert "3 observations had been folded, and 2 are there now" in told.differences


def test_a_changed_job_file_is_a_difference() -> None:
    a_job = job(max_epochs=50)
    observed = [observation(n, 32, 9, profiled=True) for n in (1, 2)]
    state = policy.fold(a_job, observed)
    decided = policy.decide(a_job, state, Ask(3, 1, 1, V100))
    other = replace(a_job, batch_sizes=(8, 16, 32), policy="default")
    assert differences(decided, policy.decide(other, policy.fold(other, observed), ask_of(decided)))


def test_a_decision_that_does_not_say_what_it_was_asked_is_not_taken_again() -> None:
    a_job = job()
    decided = replace(policy.decide(a_job, policy.initial(a_job), Ask(1, 1, 1)), asked=None)
    told = explain(a_job, [policy.initial(a_job)], decided)
    assert told.again is None
    assert "early version" in told.why_not
