from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.builders import ARMS
from zeus_flows.core.belief import EpochsBelief
from zeus_flows.core.early_stop import PlannedCut, epochs_allowed
from zeus_flows.core.job import Job
from zeus_flows.core.learning_curve import Curve, Reference, forecast, seen_by

JOB = Job("t", ARMS, 32, 100)
LEVELS = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8)


def curve(epochs: int, *, sign: float = 1.0) -> Curve:
    """Return the curve of a run that passes the same levels at the same shares of its epochs."""
    shares = (0.05, 0.15, 0.3, 0.5, 0.75, 1.0)
    points = {max(1, round(share * epochs)): sign * level for share, level in zip(shares, LEVELS, strict=True)}
    return tuple(sorted(points.items()))


def cut(*, believed: float, best_cost_j: float = 40.0, reference: Reference | None) -> PlannedCut:
    return PlannedCut(math.log(believed), 0.3**2, 0.1**2, 0.05, best_cost_j, 12.0, reference=reference)


@given(st.integers(20, 90), st.integers(20, 90), st.sampled_from([1.0, -1.0]))
def test_a_run_that_passes_the_same_levels_at_other_epochs_is_foretold(mine: int, others: int, sign: float) -> None:
    reference, so_far = Reference(curve(others, sign=sign)), seen_by(curve(mine, sign=sign), mine // 2)
    foretold = forecast(reference, so_far, mine // 2)
    assert foretold is not None
    assert foretold.log_epochs == pytest.approx(math.log(mine), abs=0.3)


def test_the_later_the_level_the_surer_the_forecast() -> None:
    reference, run = Reference(curve(40)), curve(20)
    early, late = (forecast(reference, seen_by(run, epoch), epoch) for epoch in (2, 15))
    assert early is not None
    assert late is not None
    assert late.variance < 0.5 * early.variance


def test_a_run_that_waits_for_the_next_level_falls_behind() -> None:
    reference = Reference(curve(40))
    waiting = [forecast(reference, ((2, 0.3),), epoch) for epoch in (2, 12, 30)]
    expected = [math.exp(f.log_epochs) for f in waiting if f is not None]
    assert expected == sorted(expected)
    assert expected[-1] > 4 * expected[0]


@pytest.mark.parametrize(
    ("reference", "run"),
    [(((5, 0.8),), ((1, 0.3),)), (curve(20), ()), (curve(20), ((1, 0.95),))],
    ids=["a reference of one point", "no metric yet", "a level that the reference never reached"],
)
def test_curves_with_nothing_in_common_foretell_nothing(reference: Curve, run: Curve) -> None:
    assert forecast(Reference(reference), run, 3) is None


def test_a_trial_that_leads_goes_on_and_one_that_lags_is_stopped() -> None:
    planned = cut(believed=80.0, reference=Reference(curve(40)))
    alone = epochs_allowed(replace(planned, reference=None), epoch_cost_j=1.2, max_epochs=100)
    leads, lags = (
        epochs_allowed(planned, epoch_cost_j=1.2, max_epochs=100, curve=seen_by(curve(epochs), 8), epoch=8)
        for epochs in (16, 80)
    )
    assert alone == 1, "by the belief alone it is not worth a second epoch"
    assert leads > 16
    assert lags <= 8


def test_a_trial_never_costs_more_than_two_runs_of_the_best_known_arm() -> None:
    planned = cut(believed=30.0, best_cost_j=40.0, reference=Reference(curve(40), doubt=25.0))
    for epoch in range(1, 100):
        so_far = seen_by(curve(300), epoch)
        if epochs_allowed(planned, epoch_cost_j=1.0, max_epochs=400, curve=so_far, epoch=epoch) <= epoch:
            break
    assert epoch <= 80


def test_a_stopped_run_that_led_makes_its_arm_look_better() -> None:
    belief = EpochsBelief.empty(ARMS, 32).complete(JOB, 32, 40, curve=curve(40))
    blind, led = belief.stop(16, 6, max_epochs=100), belief.stop(16, 6, max_epochs=100, curve=seen_by(curve(12), 6))
    arm = ARMS.index(16)
    assert led.posterior.mean[arm] < belief.posterior.mean[arm] < blind.posterior.mean[arm] + 1e-9


def test_ten_short_looks_that_mislead_alike_count_as_one() -> None:
    belief = EpochsBelief.empty(ARMS, 32).complete(JOB, 32, 40, curve=curve(40))
    arm, misleading = ARMS.index(16), seen_by(curve(12), 4)
    once = belief.stop(16, 4, max_epochs=100, curve=misleading)
    often = once
    for _ in range(9):
        often = often.stop(16, 4, max_epochs=100, curve=misleading)
    assert often.posterior.mean[arm] > once.posterior.mean[arm] - 0.05
    assert often.posterior.variance[arm] > 0.8 * once.posterior.variance[arm]


def test_curves_that_do_not_foretell_the_end_are_trusted_less() -> None:
    honest = deceiving = EpochsBelief.empty(ARMS, 32).complete(JOB, 32, 40, curve=curve(40))
    for arm in (16, 64, 128):
        honest = honest.complete(JOB, arm, 38, curve=curve(38))
        deceiving = deceiving.complete(JOB, arm, 38, curve=(*curve(12)[:-1], (38, 0.8)))
    trusted, doubted = honest.reference(0), deceiving.reference(0)
    assert trusted is not None
    assert doubted is not None
    assert trusted.doubt < 1 < doubted.doubt


def test_the_reference_is_the_nearest_other_arm_that_completed() -> None:
    belief = EpochsBelief.empty(ARMS, 32).complete(JOB, 128, 40, curve=curve(40)).complete(JOB, 16, 20, curve=curve(20))
    of_32, of_16 = belief.reference(ARMS.index(32)), belief.reference(ARMS.index(16))
    assert of_32 is not None
    assert of_16 is not None
    assert (of_32.epochs, of_16.epochs) == (20, 40)
    assert EpochsBelief.empty(ARMS, 32).complete(JOB, 32, 20).reference(0) is None
