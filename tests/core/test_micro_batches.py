"""A batch size that does not fit a GPU's memory may be trained in micro-batches: decided by the fold of what fitted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.builders import GPU, JOB, observation, profile
from zeus_flows.core import policy
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.power_profile import Gpu, PowerProfile
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.core.records import Ask, Decision, Observation, Outcome, decision_seed
from zeus_flows.ledger.mlflow.record_text import dump_decision, dump_observation, load_decision, load_observation

ACCUMULATES = replace(JOB, accumulate=True)
EVERY = pytest.mark.parametrize("name", sorted(policy.POLICIES))


def ran_out(recurrence: int, attempt: int, batch_size: int, micro: int | None = None) -> Observation:
    return observation(
        recurrence,
        attempt,
        batch_size,
        outcome=Outcome.OUT_OF_MEMORY,
        epochs=0,
        profile=None,
        samples_per_epoch=0,
        micro_batch_size=micro,
    )


def ran(recurrence: int, attempt: int, batch_size: int, micro: int | None = None, **changes: Any) -> Observation:
    """A run that profiled and reached the target."""
    measured = replace(profile(batch_size), micro_batch_size=micro)
    fields = {"profile": measured, "profiling_time_s": 1.0, "micro_batch_size": micro} | changes
    return observation(recurrence, attempt, batch_size, **fields)


def decide(job: Job, history: list[Observation], recurrence: int, *, gpu: Gpu = GPU) -> Decision:
    """Decide on the next attempt of a recurrence, given everything before it."""
    earlier = [o for o in history if o.recurrence == recurrence]
    trailing = 0
    for o in reversed(earlier):
        if o.outcome is not Outcome.OUT_OF_MEMORY:
            break
        trailing += 1
    ask = Ask(
        recurrence,
        len(earlier) + 1,
        decision_seed(job.seed, recurrence, len(earlier) + 1),
        gpu=gpu,
        tried=tuple(o.batch_size for o in earlier),
        out_of_memory=tuple(o.micro for o in earlier if o.outcome is Outcome.OUT_OF_MEMORY),
        ran_out=trailing,
    )
    return policy.decide(job, policy.fold(job, history), ask)


@EVERY
def test_the_batch_size_stays_and_the_micro_batch_halves(name: str) -> None:
    job = replace(ACCUMULATES, policy=name)
    first = decide(job, [], 1)
    b = first.batch_size
    assert first.micro_batch_size is None
    second = decide(job, [ran_out(1, 1, b)], 1)
    third = decide(job, [ran_out(1, 1, b), ran_out(1, 2, b, b // 2)], 1)
    assert [(d.batch_size, d.micro_batch_size) for d in (second, third)] == [(b, b // 2), (b, b // 4)]
    assert (second.cut, second.explores, second.seed) == (first.cut, first.explores, first.seed)
    assert third.reason.kind is ReasonKind.ACCUMULATE
    assert third.reason.text.startswith(f"batch size {b} again, in 4 micro-batches of {b // 4}, as more at once does")


@EVERY
def test_without_accumulate_a_smaller_batch_size_follows_as_ever(name: str) -> None:
    job = replace(JOB, policy=name)
    again = decide(job, [ran_out(1, 1, 64)], 1)
    assert (again.batch_size, again.micro_batch_size) == (32, None)


def test_what_fitted_is_remembered_for_every_batch_size_on_that_gpu_alone() -> None:
    history = [ran_out(1, 1, 64), ran(1, 2, 64, 32)]
    for recurrence in range(2, 30):
        on_this, on_another = (
            decide(ACCUMULATES, history, recurrence, gpu=gpu) for gpu in (GPU, Gpu("Simulated A40", 1, 300.0))
        )
        assert on_this.micro_batch_size == {32: None, 64: 32, 128: 32}[on_this.batch_size]
        assert on_another.micro_batch_size is None


def test_a_decision_that_is_known_to_need_parts_says_so() -> None:
    decided = decide(replace(ACCUMULATES, mode=Mode.POWER), [ran_out(1, 1, 64), ran(1, 2, 64, 32)], 2)
    assert (decided.batch_size, decided.micro_batch_size, decided.reason.kind) == (64, 32, ReasonKind.MODE)
    assert decided.reason.text.endswith("stays 64; in 2 micro-batches of 32, as more at once does not fit the GPU")


def test_a_micro_batch_that_cannot_be_shared_out_is_not_halved_and_the_batch_size_is_left_alone() -> None:
    job, two = replace(ACCUMULATES, batch_sizes=(4, 6), default_batch_size=6), Gpu("Simulated V100", 2, 500.0)
    out = [replace(ran_out(1, 1, 6), gpu=two)]
    again = decide(job, out, 1, gpu=two)
    assert (again.batch_size, again.micro_batch_size) == (4, None)
    last = decide(job, [*out, replace(ran_out(1, 2, 4), gpu=two)], 1, gpu=two)
    assert (last.batch_size, last.micro_batch_size) == (4, 2)


def test_where_nothing_fits_the_smallest_part_of_the_smallest_batch_size_is_tried() -> None:
    job = replace(ACCUMULATES, batch_sizes=(6, 12), default_batch_size=12)
    history = [ran_out(1, n, 12, micro) for n, micro in ((1, None), (2, 6), (3, 3))]
    decided = decide(job, history, 1)
    assert (decided.batch_size, decided.micro_batch_size) == (6, 3)


def test_profiles_of_different_micro_batches_are_never_mixed() -> None:
    whole, parts = profile(64), replace(profile(64), micro_batch_size=32)
    half_known = replace(parts, measurements=parts.measurements[:1], complete=False)
    state = policy.fold(ACCUMULATES, [ran(1, 1, 64), ran_out(2, 1, 64), ran(2, 2, 64, 32, profile=half_known)])
    assert state.profile(64, GPU, 32) == half_known
    assert state.profile(64, GPU) == whole
    assert 64 not in state.sample_costs[GPU.key], "what a whole batch costs says nothing of parts"
    done = policy.advance(ACCUMULATES, state, ran(3, 1, 64, 32))
    assert (done.profile(64, GPU, 32), done.profile(64, GPU)) == (parts, whole)
    back = policy.advance(ACCUMULATES, done, ran(4, 1, 64, profile=replace(whole, complete=False)))
    assert (back.profile(64, GPU), back.profile(64, GPU, 32)) == (whole, parts), "from the shelf, and back on it"


def test_a_rate_without_a_profile_begins_anew_with_another_micro_batch() -> None:
    state = policy.fold(ACCUMULATES, [observation(1, profile=None), ran(2, 1, 64, 32, profile=None)])
    assert state.rates[64, GPU.key].samples == 5000
    assert state.rates[64, GPU.key].micro_batch_size == 32


def test_a_micro_batch_that_has_trained_is_not_condemned_by_one_shortage() -> None:
    history = [ran_out(1, 1, 64), ran(1, 2, 64, 32), ran_out(2, 1, 128, 32)]
    state = policy.fold(ACCUMULATES, history)
    assert state.too_large(GPU, 3) == 64
    assert decide(ACCUMULATES, history, 2).micro == 16, "but not in that recurrence again"


def test_a_whole_batch_that_fits_again_makes_parts_needless() -> None:
    history = [ran_out(1, 1, 64), ran(1, 2, 64, 32), ran(2, 1, 128, 128)]
    assert policy.fold(ACCUMULATES, history).too_large(GPU, 3) is None


def test_a_snapshot_holds_what_the_fold_does() -> None:
    history = [ran(1, 1, 64), ran_out(2, 1, 64), ran(2, 2, 64, 32), ran(3, 1, 128, 32, profile=None)]
    state = policy.fold(ACCUMULATES, history)
    read = policy.from_json(ACCUMULATES, json.loads(json.dumps(policy.to_json(state))))
    assert read == state
    assert len(state.shelf) == 1


def test_records_say_the_micro_batch_once_and_only_where_there_is_one() -> None:
    parts, whole = ran(1, 1, 64, 32), ran(1, 1, 64)
    assert load_observation(dump_observation(parts)) == parts
    assert dump_observation(parts).count("micro_batch_size") == 1
    assert "micro_batch_size" not in dump_observation(whole)
    odd = replace(parts, profile=PowerProfile(64, GPU, profile(64).measurements, micro_batch_size=16))
    assert load_observation(dump_observation(odd)) == odd
    decided = decide(ACCUMULATES, [ran_out(1, 1, 64)], 1)
    assert load_decision(dump_decision(decided)) == decided


def test_what_ran_out_of_memory_counts_as_spent() -> None:
    lost = replace(ran_out(2, 1, 64), energy_j=700.0, time_s=7.0)
    history = [ran(1, 1, 64), lost, ran(2, 2, 64, 32), ran(3, 1, 64, 32)]
    so_far, without = (
        policy.saved(ACCUMULATES, policy.fold(ACCUMULATES, observations)).so_far
        for observations in (history, [o for o in history if o is not lost])
    )
    assert so_far is not None
    assert without is not None
    assert so_far.spent.energy_j == pytest.approx(without.spent.energy_j + 700.0)
