"""A search over clocks: within its probes, its bound and its promise; `benchmarks/clocks.py` has the figures."""

from __future__ import annotations

import numpy as np
import pytest
from clock_worlds import ClockedJob, exhaustive, jobs_of, search, trees
from hypothesis import given
from hypothesis import strategies as st

from zeus_flows.core import json
from zeus_flows.core.clock_model import Aim, ClockReading, Objective, closed_form
from zeus_flows.core.clock_search import MOST, GaveUp, Keep, Probe, Step, next_clock
from zeus_flows.errors import ConfigError, MeasurementError
from zeus_flows.gpu.simulated import CHIPS, Load

CLOCKS = [600.0 + 25 * i for i in range(33)]
BOUND = Objective(slowdown=1.05)
OBJECTIVES = [BOUND, Objective(), Objective(Aim.ED2P), Objective(Aim.COST, eta=0.5, max_power_w=250.0)]


def exact(job: ClockedJob, objective: Objective) -> tuple[Step, list[ClockReading]]:
    """Search without noise."""
    readings: list[ClockReading] = []
    while isinstance(step := next_clock(readings, job.clocks_mhz, objective, ran_at_mhz=job.ran_at_mhz), Probe):
        readings.append(job.at(step.clock_mhz))
    return step, readings


@pytest.mark.parametrize("other", [False, True], ids=["fitted law", "another law"])
@pytest.mark.parametrize("kind", CHIPS)
def test_noisy_searches_come_near_exhaustive_ones_and_keep_the_bound(kind: str, other: bool) -> None:
    jobs = jobs_of(kind, None, other=other)
    done = [search(job, BOUND, np.random.default_rng([5, i]), closed_form) for i, job in enumerate(jobs)]
    assert np.mean([s.behind for s in done]) <= 0.015
    assert max(s.probes for s in done) <= MOST
    assert max(s.slower for s in done) <= 0.05 + 0.01
    assert max(s.dearer for s in done) <= 0.01


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.aim} {o.slowdown or ''}".strip())
@pytest.mark.parametrize("kind", CHIPS)
def test_without_noise_no_clock_is_kept_that_is_worse_than_the_default(kind: str, objective: Objective) -> None:
    for job in jobs_of(kind, None):
        step, readings = exact(job, objective)
        assert len(readings) <= MOST
        if isinstance(step, Keep):
            kept, default = job.at(step.clock_mhz), job.at(job.clocks_mhz[-1])
            assert objective.of(kept) < objective.of(default)
            assert not objective.too_slow(kept, default)
            assert objective.of(kept) <= 1.03 * objective.of(exhaustive(job, objective))


def test_a_prediction_takes_fewer_probes_than_none_and_no_more_than_trees_trained_on_other_gpus() -> None:
    grown = trees(["v100", "a40", "rtx6000"], jobs=40)
    jobs = jobs_of("p100", None)

    def probes(model: str) -> float:
        models = {"none": lambda _: None, "closed form": lambda _: closed_form, "trees": grown}
        done = [search(job, BOUND, np.random.default_rng([1, i]), models[model](job)) for i, job in enumerate(jobs)]
        return float(np.mean([s.probes for s in done]))

    assert probes("closed form") <= probes("none") - 0.5
    assert probes("closed form") <= probes("trees") + 0.25


def test_a_job_that_waits_for_its_data_is_left_alone() -> None:
    starved = ClockedJob(CHIPS["v100"], Load(60.0, 77.1, active=0.11, clock_bound=0.05))
    step, readings = exact(starved, BOUND)
    assert isinstance(step, GaveUp)
    assert "none of" in step.why
    assert len(readings) <= 4


def test_a_power_limit_that_holds_the_clock_back_costs_no_probe_above_it() -> None:
    capped = ClockedJob(CHIPS["v100"], Load(60.0, 300.0, active=0.95, clock_bound=0.55))
    assert capped.ran_at_mhz < 0.95 * capped.clocks_mhz[-1]
    step, readings = exact(capped, BOUND)
    assert isinstance(step, Keep)
    assert all(r.clock_mhz <= capped.ran_at_mhz for r in readings if r.clock_mhz != capped.clocks_mhz[-1])


def test_a_search_goes_on_from_readings_of_an_earlier_run_in_any_order() -> None:
    job = jobs_of("a40", None, other=True)[7]
    _, readings = exact(job, Objective())
    assert len(readings) > 3
    for seen in range(len(readings)):
        step = next_clock(readings[:seen][::-1], job.clocks_mhz, Objective(), ran_at_mhz=job.ran_at_mhz)
        assert step == Probe(readings[seen].clock_mhz)


def test_a_small_gain_is_read_twice_before_it_is_believed() -> None:
    def step(*readings: tuple[float, float, float]) -> Step:
        return next_clock([ClockReading(*r) for r in readings], CLOCKS, Objective())

    lucky = [(1400, 200, 1.0), (1125, 200, 1.0), (1400, 200, 1.0)]
    assert step(*lucky[:2], (1325, 196, 1.0), (1300, 200, 1.0), (1225, 200, 1.0)) == Probe(1325)
    twice = step(*lucky, (1325, 196, 1.0), (1325, 204, 1.0), (1300, 200, 1.0), (1225, 200, 1.0), (1375, 200, 1.0))
    assert isinstance(twice, GaveUp)


def test_steps_are_written_and_read_as_json() -> None:
    for step in (Probe(1200.0), Keep(1200.0, "why"), GaveUp("why")):
        assert json.from_text(type(step), json.to_text(step)) == step


@given(st.lists(st.tuples(st.sampled_from(CLOCKS), st.floats(1.0, 500.0), st.floats(0.01, 10.0)), max_size=12))
def test_whatever_was_read_there_is_a_next_step_and_it_can_be_taken(read: list[tuple[float, float, float]]) -> None:
    readings = [ClockReading(*r) for r in read]
    for objective in OBJECTIVES:
        step = next_clock(readings, CLOCKS, objective)
        if isinstance(step, Probe):
            assert step.clock_mhz in CLOCKS
            assert len(readings) < MOST or CLOCKS[-1] not in {r.clock_mhz for r in readings}
        elif isinstance(step, Keep):
            assert step.clock_mhz in {r.clock_mhz for r in readings}


@pytest.mark.parametrize("clocks", [[], [1400.0, 1200.0], [1200.0, 1200.0]])
def test_clocks_that_are_not_ascending_are_refused(clocks: list[float]) -> None:
    with pytest.raises(ConfigError):
        next_clock([], clocks, Objective())


def test_a_slowdown_below_one_and_a_reading_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError):
        Objective(slowdown=0.9)
    with pytest.raises(MeasurementError):
        ClockReading(1200.0, float("nan"), 1.0)


def test_one_clock_leaves_nothing_to_choose() -> None:
    assert next_clock([], [1400.0], BOUND) == Probe(1400.0)
    assert isinstance(next_clock([ClockReading(1400.0, 200.0, 1.0)], [1400.0], BOUND), GaveUp)


def test_no_slowdown_at_all_probes_nothing_that_was_measured_to_be_slower() -> None:
    job = ClockedJob(CHIPS["v100"], Load(60.0, 240.0, active=0.9, clock_bound=0.5))
    step, _ = exact(job, Objective(slowdown=1.0))
    assert isinstance(step, GaveUp)
