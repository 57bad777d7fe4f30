from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.builders import HISTORIES, LIMITS, P100, SAMPLES, job, observation, profile
from zeus_flows.core import policy
from zeus_flows.core.job import Job, Mode
from zeus_flows.core.json import from_plain, jsonable
from zeus_flows.core.overheads import Overheads
from zeus_flows.core.power import best_setting
from zeus_flows.core.power_profile import Part, Parts, PowerProfile
from zeus_flows.core.records import EnergySource, Observation, Outcome
from zeus_flows.core.savings import (
    BATCH_SIZE,
    LEARNING,
    LUCK,
    POWER_LIMIT,
    Account,
    Amount,
    Compared,
    Line,
    Savings,
    advance,
    close,
    document,
    killed,
    savings,
    skip,
)
from zeus_flows.ledger.mlflow.charts import of_savings

HISTORY = [
    observation(1, 32, 20, profiled=True),
    observation(2, 64, 5, outcome=Outcome.STOPPED, profiled=True),
    observation(2, 32, 20, attempt=2),
    observation(3, 64, 10),
]

Kept = tuple[Account, dict[tuple[int, str], PowerProfile], dict[tuple[int, str], Overheads]]


def fold(a_job: Job, observations: Iterable[Observation], boundaries: dict[int, int] | None = None) -> Kept:
    """The account of a history, and what is known after it; `boundaries` by recurrence."""
    account = Account()
    profiles: dict[tuple[int, str], PowerProfile] = {}
    overheads: dict[tuple[int, str], Overheads] = {}
    for o in observations:
        key = (o.batch_size, o.gpu.key)
        if o.profile is not None and o.profile.measurements:
            profiles[key] = o.profile
        if o.parts is not None:
            overheads[key] = overheads.get(key, Overheads()).add(o.parts)
        boundary = (boundaries or {}).get(o.recurrence, 0) if o.converged else 0
        account = advance(a_job, account, o, profiles=profiles, overheads=overheads, boundary=boundary)
    return account, profiles, overheads


def saved(observations: Iterable[Observation], a_job: Job | None = None, boundaries: Any = None) -> Savings:
    """What may be said of a history."""
    a_job = a_job or job()
    account, profiles, overheads = fold(a_job, observations, boundaries)
    return savings(a_job, account, profiles=profiles, overheads=overheads)


def compared(found: Savings) -> Compared:
    assert found.so_far is not None
    return found.so_far


def line(found: Savings, name: str) -> Line:
    one = compared(found).line(name)
    assert one is not None
    return one


def energy_at(batch_size: int, limit_w: float, epochs: float, samples: int = SAMPLES) -> float:
    at = next(m for m in profile(batch_size).measurements if m.setting == limit_w)
    return epochs * samples / at.samples_per_s * at.average_power_w


def default_energy(epochs: float, samples: int = SAMPLES) -> float:
    return energy_at(32, max(LIMITS), epochs, samples)


def as_ever(recurrence: int, epochs: int, **changes: Any) -> Observation:
    """The default: b0 at the greatest limit, nothing applied."""
    at = next(m for m in profile(32).measurements if m.setting == max(LIMITS))
    time_s = epochs * SAMPLES / at.samples_per_s
    values = {"setting": None, "time_s": time_s, "energy_j": time_s * at.average_power_w, **changes}
    return observation(recurrence, 32, epochs, **values)


def test_nothing_is_said_before_the_default_has_reached_the_target_and_been_measured() -> None:
    assert saved([]).so_far is None
    assert saved([]).why == "no recurrence has reached the target"
    other = saved([observation(1, 64, 10, profiled=True)])
    assert other.so_far is None
    assert other.unknown_since == 1
    assert "batch size 32 has not reached the target" in other.why
    assert saved([observation(1, 32, 10, outcome=Outcome.EXHAUSTED, profiled=True)]).so_far is None
    assert saved([observation(1, 32, 10, profiled=True)]).so_far is not None


@given(st.lists(st.tuples(st.sampled_from([16, 32, 64]), st.integers(1, 40), st.booleans()), max_size=10))
def test_the_lines_sum_to_the_total_and_the_total_to_what_was_spent(runs: list[tuple[int, int, bool]]) -> None:
    history = [observation(1, 32, 20, profiled=True)] + [
        observation(i, b, e, profiled=True, outcome=Outcome.CONVERGED if ok else Outcome.STOPPED)
        for i, (b, e, ok) in enumerate(runs, start=2)
    ]
    found = saved(history)
    so_far = compared(found)
    whole = so_far.total.amount
    for figure in ("energy_j", "time_s", "cost_j"):
        parts = sum(getattr(part.amount, figure) for part in so_far.lines)
        assert parts == pytest.approx(getattr(whole, figure), abs=1e-6 * getattr(so_far.baseline, figure))
    spent = sum(o.energy_j for o in history)
    lost = found.apart.lost.took.energy_j
    assert so_far.baseline.energy_j - whole.energy_j + lost == pytest.approx(spent)


def test_so_far_counts_stopped_attempts_as_learning() -> None:
    found = saved(HISTORY)
    so_far = compared(found)
    assert so_far.recurrences == 3
    assert so_far.baseline.energy_j == pytest.approx(3 * default_energy(20))
    assert so_far.total.amount.energy_j == pytest.approx(3 * default_energy(20) - sum(o.energy_j for o in HISTORY))
    best_at_b0 = HISTORY[0].energy_j
    assert line(found, POWER_LIMIT).amount.energy_j == pytest.approx(3 * (default_energy(20) - best_at_b0))
    assert line(found, BATCH_SIZE).amount.energy_j == pytest.approx(3 * (best_at_b0 - HISTORY[3].energy_j))
    learning = 2 * (best_at_b0 - HISTORY[3].energy_j) + HISTORY[1].energy_j
    assert line(found, LEARNING).amount.energy_j == pytest.approx(-learning)
    assert line(found, LUCK).amount.energy_j == pytest.approx(0, abs=1e-6)


def test_profiling_is_learning() -> None:
    dear = replace(HISTORY[0], energy_j=HISTORY[0].energy_j + 5_000.0, time_s=HISTORY[0].time_s + 30.0)
    more, plain = saved([dear, *HISTORY[1:]]), saved(HISTORY)
    for figure, extra in (("energy_j", 5_000.0), ("time_s", 30.0)):
        before, after = (getattr(line(s, LEARNING).amount, figure) for s in (plain, more))
        assert after == pytest.approx(before - extra)
        total = getattr(compared(more).total.amount, figure)
        assert total == pytest.approx(getattr(compared(plain).total.amount, figure) - extra)


def test_from_now_on_is_the_best_known_batch_size_at_its_best_limit() -> None:
    found = saved(HISTORY)
    ahead = found.from_now_on
    assert ahead is not None
    assert found.default.best_batch_size == 64
    assert found.default.best_setting == best_setting(job(), profile(64)).setting
    assert ahead.baseline.energy_j - ahead.total.amount.energy_j == pytest.approx(HISTORY[3].energy_j)
    assert ahead.total.low.energy_j < ahead.total.amount.energy_j < ahead.total.high.energy_j
    assert [part.name for part in ahead.lines] == [POWER_LIMIT, BATCH_SIZE]


def test_the_default_is_the_limit_that_was_set_before() -> None:
    history = [replace(o, setting_before=175.0) for o in HISTORY]
    found = saved(history)
    assert found.default.setting == 175.0
    assert compared(found).baseline.energy_j == pytest.approx(3 * energy_at(32, 175.0, 20))


def test_a_run_of_the_default_batch_size_is_compared_with_its_own_epochs() -> None:
    history = [observation(i, 32, epochs, profiled=i == 1) for i, epochs in enumerate((20, 30, 10, 26), start=1)]
    found = saved(history, job(mode=Mode.POWER))
    assert compared(found).baseline.energy_j == pytest.approx(default_energy(86))
    doubt = compared(found).total.high.energy_j - compared(found).total.amount.energy_j
    assert doubt < 0.05 * default_energy(86)  # of the profile only: however much the epochs scatter


def test_the_default_is_scaled_to_each_recurrences_data() -> None:
    grown = [*HISTORY, observation(4, 64, 10, samples=2 * SAMPLES)]
    assert compared(saved(grown)).baseline.energy_j == pytest.approx(5 * default_energy(20))


@pytest.mark.parametrize("changes", [{"policy_name": "default"}, {"mode": Mode.OFF}, {"mode": Mode.OBSERVE}])
def test_where_nothing_was_changed_nothing_was_saved(changes: dict[str, Any]) -> None:
    mode = changes.get("mode")
    history = [as_ever(i, epochs, mode=mode) for i, epochs in enumerate((20, 31, 17, 22), start=1)]
    found = saved(history, job(**changes))
    nothing = Amount()
    assert compared(found).recurrences == 4
    for one in (compared(found).total, *compared(found).lines):
        assert (one.amount, one.low, one.high) == (nothing, nothing, nothing)
    assert compared(found).spent.energy_j == pytest.approx(sum(o.energy_j for o in history))


def test_observing_costs_what_looking_took_and_says_what_could_be_saved() -> None:
    a_job = job(mode=Mode.OBSERVE)
    looked = as_ever(1, 20, profile=profile(32), profiling_time_s=5.0, mode=Mode.OBSERVE, setting=250.0)
    looked = replace(looked, energy_j=looked.energy_j + 900.0, time_s=looked.time_s + 5.0)
    found = saved([looked, as_ever(2, 20, mode=Mode.OBSERVE, setting=250.0)], a_job)
    assert line(found, LEARNING).amount.energy_j == pytest.approx(-900.0)
    assert compared(found).total.amount.energy_j == pytest.approx(-900.0)
    assert found.from_now_on is not None
    best = best_setting(a_job, profile(32)).setting
    assert found.from_now_on.total.amount.energy_j == pytest.approx(default_energy(20) - energy_at(32, best, 20))


def test_power_mode_has_no_line_for_the_batch_size() -> None:
    found = saved([observation(i, 32, 20, profiled=i == 1) for i in (1, 2)], job(mode=Mode.POWER))
    assert [part.name for part in compared(found).lines] == [POWER_LIMIT, LEARNING, LUCK]
    assert found.from_now_on is not None
    assert [part.name for part in found.from_now_on.lines] == [POWER_LIMIT]


def test_control_runs_sharpen_the_comparison_and_save_nothing_themselves() -> None:
    start = [observation(1, 32, 20, profiled=True), observation(2, 64, 10, profiled=True)]
    tuned = [observation(i, 64, 10) for i in range(3, 23)]
    with_controls = [as_ever(i, 20, control=True) if i % 5 == 0 else o for i, o in enumerate(tuned, start=3)]
    plain, sharp = saved([*start, *tuned]), saved([*start, *with_controls])
    assert sharp.default.controls == 4
    assert sharp.default.runs == 5
    assert compared(sharp).recurrences == compared(plain).recurrences == 22
    widths = [s.total.high.cost_j - s.total.low.cost_j for s in (compared(plain), compared(sharp))]
    assert widths[1] < 0.7 * widths[0]
    each = compared(plain).total.amount.energy_j - compared(sharp).total.amount.energy_j
    assert each == pytest.approx(4 * (default_energy(20) - tuned[0].energy_j))


def test_recurrences_that_reach_no_target_are_lost_and_no_saving() -> None:
    failed = replace(observation(4, 64, 3), outcome=Outcome.FAILED)
    given_up = [observation(5, b, 50, outcome=Outcome.EXHAUSTED, attempt=i) for i, b in ((1, 64), (2, 32))]
    plain, found = saved(HISTORY), saved([*HISTORY, failed, *given_up])
    assert compared(found) == compared(plain)
    assert found.apart.lost.count == 2
    assert found.apart.lost.took.energy_j == pytest.approx(sum(o.energy_j for o in (failed, *given_up)))


def test_an_attempt_that_failed_is_lost_where_the_recurrence_went_on() -> None:
    failed = replace(observation(4, 64, 3), outcome=Outcome.FAILED)
    found = saved([*HISTORY, failed, observation(4, 64, 10, attempt=2)])
    assert found.apart.lost.count == 0
    assert found.apart.failed.count == 1
    assert found.apart.failed.took.energy_j == pytest.approx(failed.energy_j)
    assert line(found, LEARNING).amount == line(saved([*HISTORY, observation(4, 64, 10)]), LEARNING).amount


def test_kills_and_skips_are_counted_apart() -> None:
    account, profiles, overheads = fold(job(), HISTORY)
    account = skip(killed(killed(account)), time_s=12.0, energy_j=100.0)
    found = savings(job(), account, profiles=profiles, overheads=overheads)
    assert compared(found) == compared(saved(HISTORY))
    assert found.apart.lost.count == 2
    assert (found.apart.skipped.count, found.apart.skipped.took.time_s) == (1, 12.0)
    assert found.apart.skipped.took.energy_j == 100.0


def test_out_of_memory_is_learning() -> None:
    burst = observation(4, 128, 0, outcome=Outcome.OUT_OF_MEMORY, energy_j=400.0, time_s=3.0)
    found, plain = (
        saved([*HISTORY, burst, observation(4, 64, 10, attempt=2)]),
        saved([*HISTORY, observation(4, 64, 10)]),
    )
    difference = line(plain, LEARNING).amount - line(found, LEARNING).amount
    assert difference.energy_j == pytest.approx(400.0)


def test_incomplete_readings_never_enter_a_mean() -> None:
    partial = replace(observation(4, 32, 45), energy_complete=False, energy_j=1.0)
    found = saved([*HISTORY, partial])
    assert compared(found) == compared(saved(HISTORY))
    assert found.apart.not_compared.count == 1


def test_recurrences_on_a_gpu_the_default_was_not_measured_on_are_not_compared() -> None:
    found = saved([*HISTORY, observation(4, 64, 10, gpu=P100, profiled=True)])
    assert compared(found).recurrences == 3
    assert found.apart.not_compared.count == 1
    later = saved(
        [*HISTORY, observation(4, 64, 10, gpu=P100, profiled=True), observation(5, 32, 20, gpu=P100, profiled=True)]
    )
    assert compared(later).recurrences == 5
    assert later.apart.not_compared.count == 0


def test_after_a_drift_the_baseline_is_not_known_until_the_default_has_run() -> None:
    drifted = [observation(4, 64, 30), observation(5, 64, 31)]
    found = saved([*HISTORY, *drifted], boundaries={4: 1})
    assert compared(found).total.amount == compared(saved(HISTORY)).total.amount
    assert found.unknown_since == 4
    assert found.why == "batch size 32 has not reached the target since epochs changed"
    assert found.apart.unknown.count == 2
    known = saved([*HISTORY, *drifted, observation(6, 32, 60)], boundaries={4: 1})
    assert known.unknown_since is None
    assert compared(known).recurrences == 6
    assert compared(known).baseline.energy_j == pytest.approx(3 * default_energy(20) + 3 * default_energy(60))


def test_the_first_of_two_surprises_belongs_to_the_new_era() -> None:
    history = [*HISTORY, observation(4, 64, 30), observation(5, 64, 30), observation(6, 32, 60)]
    found = saved(history, boundaries={5: 2})
    assert compared(found).baseline.energy_j == pytest.approx(3 * default_energy(20) + 3 * default_energy(60))


def test_eras_add_up_with_their_variances() -> None:
    account, profiles, overheads = fold(job(), HISTORY)
    once = savings(job(), account, profiles=profiles, overheads=overheads)
    account = close(job(), account, profiles=profiles, overheads=overheads)
    for o in HISTORY:
        again = replace(o, recurrence=o.recurrence + 3)
        account = advance(job(), account, again, profiles=profiles, overheads=overheads)
    twice = savings(job(), account, profiles=profiles, overheads=overheads)
    assert compared(twice).total.amount.cost_j == pytest.approx(2 * compared(once).total.amount.cost_j)
    widths = [s.total.high.cost_j - s.total.low.cost_j for s in (compared(once), compared(twice))]
    assert widths[0] < widths[1] < 2 * widths[0]


def test_runs_without_parts_are_compared_as_what_they_took() -> None:
    """Evaluation that nobody measured apart (schema 1) scales all expected costs alike, and is no loss."""

    def slower(o: Observation) -> Observation:
        return replace(o, energy_j=1.3 * o.energy_j, time_s=1.3 * o.time_s)

    history = [observation(1, 32, 20, profiled=True), *(observation(i, 32, 20) for i in (2, 3))]
    history += [observation(4, 64, 10, profiled=True), *(observation(i, 64, 10) for i in range(5, 12))]
    plain, found = saved(history), saved([slower(o) for o in history])
    share, unmeasured = (
        100 * s.total.amount.energy_j / s.baseline.energy_j for s in (compared(plain), compared(found))
    )
    assert unmeasured == pytest.approx(share, abs=0.1)


def test_evaluation_and_start_up_are_part_of_what_the_default_takes() -> None:
    limit = best_setting(job(), profile(32)).setting

    def whole(o: Observation) -> Observation:
        parts = Parts(Part(1, 500.0, 10.0), ((limit, Part(o.epochs, 30.0 * o.epochs, 2.0 * o.epochs)),))
        beside = parts.together
        return replace(o, parts=parts, energy_j=o.energy_j + beside.energy_j, time_s=o.time_s + beside.time_s)

    found = saved([whole(observation(1, 32, 20, profiled=True)), whole(observation(2, 32, 20))], job(mode=Mode.POWER))
    assert compared(found).baseline.time_s > 2 * (default_energy(20) / (0.9 * 250.0) + 10.0 + 20 * 2.0 * 0.5)
    assert line(found, LEARNING).amount.cost_j == 0.0


def test_the_host_is_its_own_part_of_the_energy() -> None:
    history = [replace(o, host_energy_j=100.0 * o.time_s) for o in HISTORY]
    bare, found = saved(HISTORY), saved(history)
    more = compared(found).baseline.energy_j - compared(bare).baseline.energy_j
    assert more == pytest.approx(100.0 * compared(bare).baseline.time_s)
    assert compared(found).baseline.host_j == pytest.approx(more)
    assert compared(found).spent.host_j == pytest.approx(100.0 * sum(o.time_s for o in HISTORY))


def test_without_a_sensor_there_are_no_joules_anywhere() -> None:
    a_job = job(in_seconds=True)
    history = [
        replace(o, energy_j=0.0, energy_source=EnergySource.NONE, profile=None, setting=None, profiling_time_s=0.0)
        for o in HISTORY
    ]
    found = saved(history, a_job)
    assert compared(found).baseline.cost_j == compared(found).baseline.time_s > 0
    assert line(found, BATCH_SIZE).amount.time_s > 0
    assert not [name for name in of_savings(found) if "energy" in name or name.endswith("_j")]
    text = json.dumps(document(found))
    assert "_j" not in text
    assert '"cost_s"' in text


def test_the_default_batch_size_is_a_choice_where_no_limit_can_be_set() -> None:
    """Without permission to set limits, a policy still chooses: what b0 took above the best is what learning cost."""
    free = [replace(o, setting=None, profile=None, profiling_time_s=0.0, mode=Mode.FULL) for o in HISTORY]
    found = saved(free)
    assert found.default.unchanged == 0
    assert line(found, POWER_LIMIT).amount == Amount()
    assert line(found, BATCH_SIZE).amount.energy_j == pytest.approx(3 * (free[0].energy_j - free[3].energy_j))


def test_the_series_has_the_figures_of_the_table() -> None:
    found = saved(HISTORY)
    figures = of_savings(found)
    total = compared(found).total.amount
    assert figures["zf.saved/energy_j"] == pytest.approx(total.energy_j, rel=1e-4)
    assert figures["zf.saved/cost_j"] == pytest.approx(total.cost_j, rel=1e-4)
    assert figures["zf.saved/time_s"] == pytest.approx(total.time_s, rel=1e-4)
    parts = sum(figures[f"zf.saved/by_{name}_j"] for name in ("power_limit", "batch_size", "learning", "luck"))
    assert parts == pytest.approx(figures["zf.saved/cost_j"], rel=1e-4)
    assert of_savings(saved([])) == {"zf.saved/lost_recurrences": 0.0, "zf.saved/skipped_recurrences": 0.0}


def test_the_energy_source_is_named() -> None:
    assert (
        saved([replace(o, energy_source=EnergySource.MEASURED) for o in HISTORY]).energy_source is EnergySource.MEASURED
    )


@settings(deadline=None)
@given(HISTORIES)
def test_any_history_has_an_account_that_survives_json_and_finite_savings(history: list[Observation]) -> None:
    ordered = sorted(history, key=lambda o: o.order)
    account, profiles, overheads = fold(job(), ordered, {o.recurrence: o.recurrence % 3 for o in ordered})
    assert from_plain(Account, json.loads(json.dumps(jsonable(account)))) == account
    found = savings(job(), account, profiles=profiles, overheads=overheads)
    json.dumps(document(found), allow_nan=False)
    for figure in of_savings(found).values():
        assert figure == figure


def test_the_account_does_not_grow_with_the_history() -> None:
    def size(recurrences: int) -> int:
        arms = (32, 64, 16)
        history = (observation(i, arms[i % 3], 20, profiled=i < 4) for i in range(1, recurrences))
        kept, _, _ = fold(job(), history, dict.fromkeys(range(50, recurrences, 50), 1))
        return len(json.dumps(jsonable(kept)))

    assert size(2_000) < 1.2 * size(200)


def test_percent_of_nothing_is_zero() -> None:
    assert Amount(1.0, 1.0, 1.0).percent_of(Amount()) == Amount()


def test_memory_that_runs_out_before_the_first_batch_is_learning_not_a_recurrence_that_cannot_be_compared() -> None:
    a_job = job(batch_sizes=(32, 64))
    state = policy.fold(
        a_job,
        [
            observation(1, 32, 10, profiled=True),
            observation(2, 64, 0, outcome=Outcome.OUT_OF_MEMORY, samples=0, energy_j=500.0, time_s=10.0),
            observation(2, 32, 10, attempt=2),
        ],
    )
    saved = policy.saved(a_job, state)
    assert saved.apart.not_compared.count == 0
    assert saved.so_far is not None
    learning = saved.so_far.line(LEARNING)
    assert learning is not None
    assert learning.amount.energy_j < -400


def test_each_limit_that_a_grid_tries_stays_in_the_profile_and_the_default_is_the_limit_before() -> None:
    a_job = job("grid")
    known = profile(32)
    history = [
        observation(
            n,
            32,
            10,
            profile=replace(known, measurements=(m,)),
            setting=m.setting,
            energy_j=10 * 1_000 / m.samples_per_s * m.average_power_w,
            time_s=10 * 1_000 / m.samples_per_s,
            setting_before=250.0,
        )
        for n, m in enumerate(sorted(known.measurements, key=lambda m: -m.setting), start=1)
    ]
    saved = policy.saved(a_job, policy.fold(a_job, history))
    spent = sum(o.energy_j for o in history)
    assert saved.default.setting == 250.0
    assert saved.so_far is not None
    assert saved.so_far.total.amount.energy_j == pytest.approx(3 * history[0].energy_j - spent, rel=0.02)


def test_runs_at_the_limit_before_of_which_nothing_was_tried_save_nothing() -> None:
    a_job = job("default")
    one = replace(profile(32), measurements=profile(32).measurements[-1:])
    runs = [
        observation(n, 32, 9 + n, profile=one, profiling_time_s=5.0, setting=250.0, setting_before=250.0)
        for n in (1, 2, 3)
    ]
    saved = policy.saved(a_job, policy.fold(a_job, runs))
    assert saved.so_far is not None
    assert saved.default.unchanged == 3
    assert saved.so_far.total.low == saved.so_far.total.high


def test_a_gpu_without_power_limits_is_given_none() -> None:
    a_job = job(batch_sizes=(32, 64))
    runs = [replace(observation(n, 32, 10, profiled=True), setting=None, parts=Parts(rest=Part(10))) for n in (1, 2)]
    saved = policy.saved(a_job, policy.fold(a_job, runs))
    assert (saved.default.setting, saved.default.best_setting) == (None, None)
    assert saved.so_far is not None
    assert saved.so_far.line(POWER_LIMIT) is None
