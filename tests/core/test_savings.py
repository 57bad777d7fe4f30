from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.builders import LIMITS, P100, SAMPLES, job, observation, profile
from zeus_flows.core.records import EnergySource, Observation, Outcome
from zeus_flows.core.savings import Amount, savings

HISTORY = [
    observation(1, 32, 20, profiled=True),
    observation(2, 64, 5, outcome=Outcome.STOPPED, profiled=True),
    observation(2, 32, 20, attempt=2),
    observation(3, 64, 10),
]


def default_energy(epochs: float, samples: int = SAMPLES) -> float:
    at = next(m for m in profile(32).measurements if m.power_limit_w == max(LIMITS))
    return epochs * samples / at.samples_per_s * at.average_power_w


def test_nothing_is_known_before_the_default_has_converged_and_been_profiled() -> None:
    assert savings(job(), []) is None
    assert savings(job(), [observation(1, 64, 10, profiled=True)]) is None
    assert savings(job(), [observation(1, 32, 10)]) is None
    assert savings(job(), [observation(1, 32, 10, outcome=Outcome.EXHAUSTED, profiled=True)]) is None
    assert savings(job(), [replace(observation(1, 32, 10), profile=profile(32, complete=False))]) is None
    assert savings(job(), [observation(1, 32, 10, profiled=True)]) is not None


@given(st.lists(st.tuples(st.sampled_from([16, 32, 64]), st.integers(1, 40), st.booleans()), max_size=10))
def test_the_parts_sum_to_the_whole(runs: list[tuple[int, int, bool]]) -> None:
    history = [observation(1, 32, 20, profiled=True)] + [
        observation(i, b, e, profiled=True, outcome=Outcome.CONVERGED if ok else Outcome.STOPPED)
        for i, (b, e, ok) in enumerate(runs, start=2)
    ]
    result = savings(job(), history)
    assert result is not None
    for saving in (result.so_far, result.from_now_on):
        assert saving.total == saving.power + saving.batch_size
    spent = sum(o.energy_j for o in history)
    assert result.so_far.baseline.energy_j - result.so_far.total.energy_j == pytest.approx(spent)


def test_so_far_counts_failed_attempts_and_profiling() -> None:
    result = savings(job(), HISTORY)
    assert result is not None
    assert result.recurrences == 3
    assert result.so_far.baseline.energy_j == pytest.approx(3 * default_energy(20))
    spent = sum(o.energy_j for o in HISTORY)
    assert result.so_far.total.energy_j == pytest.approx(3 * default_energy(20) - spent)


def test_from_now_on_is_the_best_known_batch_size_at_its_best_limit() -> None:
    result = savings(job(), HISTORY)
    assert result is not None
    assert result.best_batch_size == 64
    once = HISTORY[3]
    assert result.from_now_on.baseline.energy_j - result.from_now_on.total.energy_j == pytest.approx(once.energy_j)
    assert 0 < result.from_now_on.percent.energy_j < 100


def test_the_default_is_scaled_to_each_recurrences_data() -> None:
    grown = [*HISTORY, observation(4, 64, 10, samples=2 * SAMPLES)]
    result = savings(job(), grown)
    assert result is not None
    assert result.so_far.baseline.energy_j == pytest.approx(5 * default_energy(20))


def test_recurrences_on_a_gpu_the_default_was_not_profiled_on_are_left_out() -> None:
    result = savings(job(), [*HISTORY, observation(4, 64, 10, gpu=P100, profiled=True)])
    assert result is not None
    assert result.recurrences == 3


def test_the_energy_source_is_named() -> None:
    measured: list[Observation] = [replace(o, energy_source=EnergySource.MEASURED) for o in HISTORY]
    result = savings(job(), measured)
    assert result is not None
    assert result.energy_source is EnergySource.MEASURED


def test_percent_of_nothing_is_zero() -> None:
    assert Amount(1.0, 1.0, 1.0).percent_of(Amount()) == Amount()
