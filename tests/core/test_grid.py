"""The paper's Grid Search with Pruning (section 6.1)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.builders import ARMS, ask, cost_of_epoch, decide, job, observation
from zeus_flows.core.early_stop import CostCut, NoCut
from zeus_flows.core.job import WindowOf
from zeus_flows.core.records import Observation, Outcome

LIMITS = (100.0, 250.0)


def ran(recurrence: int, batch_size: int, limit: float, epochs: int = 10, **changes: Any) -> Observation:
    return observation(recurrence, batch_size, epochs, setting=limit, **changes)


def test_a_configuration_is_stopped_at_beta_times_the_cheapest_so_far() -> None:
    a_job = job("grid", beta=3.0)
    history = [observation(1, 32, 12, profiled=True)]
    decision = decide(a_job, history)
    assert decision.explores
    assert isinstance(decision.cut, CostCut)
    assert decision.cut.threshold_j == pytest.approx(36 * cost_of_epoch(a_job, 32))


def test_the_first_run_and_the_cheapest_configuration_are_never_stopped() -> None:
    assert decide(job("grid"), [], ask(1, power_limits_w=LIMITS)).cut == NoCut()
    history = [ran(i, b, w) for i, (b, w) in enumerate(((b, w) for b in ARMS for w in LIMITS), start=1)]
    decision = decide(job("grid"), history, ask(99, power_limits_w=LIMITS))
    assert (decision.reason.kind, decision.cut) == ("exploit", NoCut())


@pytest.mark.parametrize("outcome", [Outcome.STOPPED, Outcome.EXHAUSTED, Outcome.DIVERGED])
def test_a_batch_size_that_failed_is_dropped_with_all_its_limits(outcome: Outcome) -> None:
    history = [ran(1, 32, 250.0), ran(2, 32, 100.0), ran(3, 8, 250.0, 30, outcome=outcome)]
    tried = []
    for recurrence in range(4, 20):
        decision = decide(job("grid"), history, ask(recurrence, power_limits_w=LIMITS))
        tried.append((decision.batch_size, decision.setting))
        history.append(ran(recurrence, decision.batch_size, decision.setting or 250.0))
    assert 8 not in {b for b, _ in tried}
    assert {(b, w) for b in (16, 64, 128) for w in LIMITS} <= set(tried)


def test_a_batch_size_that_reached_the_target_once_and_then_failed_is_not_kept_as_the_cheapest() -> None:
    history = [ran(1, 32, 250.0, 12), ran(2, 64, 250.0, 4), ran(3, 64, 100.0, 8, outcome=Outcome.STOPPED)]
    retry = decide(job("grid"), history, ask(3, 2, tried=(64,), power_limits_w=LIMITS))
    assert (retry.batch_size, retry.cut) == (32, NoCut())


def test_where_every_batch_size_failed_the_cheapest_that_ever_reached_the_target_runs() -> None:
    history = [ran(1, 32, 250.0), *(ran(i, b, 250.0, 50, outcome=Outcome.EXHAUSTED) for i, b in enumerate(ARMS, 2))]
    decision = decide(job("grid"), history, ask(99, power_limits_w=LIMITS))
    assert (decision.batch_size, decision.reason.kind) == (32, "exploit")


def test_a_window_of_the_job_begins_the_grid_again_with_what_it_forgot() -> None:
    cells = [(b, w) for b in ARMS for w in LIMITS]
    history = [ran(i, b, w) for i, (b, w) in enumerate(cells, start=1)]
    forgetful = job("grid", window=4, window_of=WindowOf.JOB)
    assert decide(job("grid", window=4), history, ask(99, power_limits_w=LIMITS)).reason.kind == "exploit"
    again = decide(forgetful, history, ask(99, power_limits_w=LIMITS))
    assert (again.reason.kind, again.batch_size) == ("explore", 32)
