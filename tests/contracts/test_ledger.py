"""One suite for every ledger: whatever the store, the same promises."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.builders import GPU, JOB, decision, gate_check, observation
from zeus_flows.core import policy
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.job import Job
from zeus_flows.core.policy import engine
from zeus_flows.core.power_profile import Part, Parts, PowerProfile, SettingMeasurement
from zeus_flows.core.reasons import ArmBelief, ArmStatus, Reason, ReasonKind
from zeus_flows.core.records import EnergySource, Gap
from zeus_flows.errors import AlreadyObserved, StoreError, UnknownAttempt
from zeus_flows.ledger.memory import MemoryLedger, MemoryStore
from zeus_flows.ledger.protocol import Ledger

Open = Callable[..., Ledger]


def _slower(backend: str) -> ParameterSet:
    """Making and opening MLflow's tables takes seconds too."""
    return pytest.param(backend, marks=pytest.mark.slow)


def _slow(backend: str) -> ParameterSet:
    """Servers take seconds to start: those who share them run in one process."""
    return pytest.param(backend, marks=[pytest.mark.slow, pytest.mark.xdist_group("ledger-servers")])


#: Backend -> the fixture that says where it is, and whether an outbox is before it.
BACKENDS = {
    "sqlite": ("sqlite_uri", False),
    "durable on sqlite": ("sqlite_uri", True),
    "PostgreSQL": ("postgres_uri", False),
    "server on sqlite": ("server_on_sqlite", False),
    "server on PostgreSQL": ("server_on_postgres", False),
    "durable on a server on PostgreSQL": ("server_on_postgres", True),
    "server with authentication": ("server_with_authentication", False),
}


@pytest.fixture(params=["memory", *map(_slower, list(BACKENDS)[:2]), *map(_slow, list(BACKENDS)[2:])])
def open_ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Return a function that opens a ledger on one store; each call is another process's view of it."""
    if request.param == "memory":
        store = MemoryStore()

        def memory(job: Job = JOB, energy_source: EnergySource = EnergySource.SIMULATED) -> Ledger:
            return MemoryLedger(job, energy_source, store)

        return memory

    from zeus_flows.ledger.open_ledger import open_direct, open_durable

    fixture, durable = BACKENDS[request.param]
    uri, own_name = str(request.getfixturevalue(fixture)), uuid.uuid4().hex[:8]

    def opened(job: Job = JOB, energy_source: EnergySource = EnergySource.SIMULATED) -> Ledger:
        job = replace(job, name=f"{job.name}-{own_name}")
        if not durable:
            return open_direct(job, tracking_uri=uri, energy_source=energy_source)
        ledger = open_durable(job, tracking_uri=uri, energy_source=energy_source, state_dir=tmp_path / "state")
        request.addfinalizer(ledger.close)
        return ledger

    return opened


def test_recurrence_numbers_are_given_out_once(open_ledger: Open) -> None:
    first, second = open_ledger(), open_ledger()
    assert [first.begin(), second.begin(), first.begin()] == [1, 2, 3]


def test_the_history_is_the_fold_of_what_was_observed(open_ledger: Open) -> None:
    ledger = open_ledger()
    observations = []
    for batch_size in (64, 32):
        number = ledger.begin()
        attempt = ledger.decided(decision(number, batch_size=batch_size), {})
        observations.append(observation(number, batch_size=batch_size))
        ledger.observed(attempt, observations[-1])
    again = open_ledger()
    assert again.observations() == tuple(observations)
    assert again.history().state == policy.fold(JOB, observations)
    assert again.history().in_flight == ()


def test_an_attempt_without_an_observation_is_in_flight(open_ledger: Open) -> None:
    ledger = open_ledger()
    ledger.decided(decision(ledger.begin(), batch_size=128, explores=True), {})
    (flying,) = open_ledger().history().in_flight
    assert (flying.recurrence, flying.attempt, flying.batch_size, flying.explores) == (1, 1, 128, True)


def test_an_attempt_has_one_decision(open_ledger: Open) -> None:
    ledger = open_ledger()
    number = ledger.begin()
    ledger.decided(decision(number, batch_size=64), {})
    with pytest.raises(StoreError, match="has a decision already"):
        open_ledger().decided(decision(number, batch_size=32), {})
    assert [f.batch_size for f in open_ledger().history().in_flight] == [64]


def test_an_attempt_has_one_observation_and_the_first_one_stands(open_ledger: Open) -> None:
    ledger = open_ledger()
    number = ledger.begin()
    attempt = ledger.decided(decision(number), {})
    ledger.observed(attempt, observation(number, energy_j=1000.0))
    with pytest.raises(AlreadyObserved):
        open_ledger().observed(attempt, observation(number, energy_j=2000.0))
    assert [o.energy_j for o in open_ledger().observations()] == [1000.0]


def test_delivering_the_same_observation_twice_changes_nothing(open_ledger: Open) -> None:
    ledger = open_ledger()
    number = ledger.begin()
    attempt = ledger.decided(decision(number), {})
    ledger.observed(attempt, observation(number))
    ledger.observed(attempt, observation(number))
    assert len(open_ledger().observations()) == 1


def test_an_observation_without_a_decision_is_refused(open_ledger: Open) -> None:
    ledger = open_ledger()
    ledger.begin()
    with pytest.raises(UnknownAttempt):
        ledger.observed("0" * 32, observation(1))


def test_the_fold_has_one_order_whatever_order_reports_arrive_in(open_ledger: Open) -> None:
    ledger = open_ledger()
    numbers = [ledger.begin(), ledger.begin(), ledger.begin()]
    attempts = [ledger.decided(decision(n), {}) for n in numbers]
    for i in (2, 0, 1):
        ledger.observed(attempts[i], observation(numbers[i], energy_j=1000.0 * (i + 1)))
    expected = [observation(n, energy_j=1000.0 * (i + 1)) for i, n in enumerate(numbers)]
    assert ledger.history().state == policy.fold(JOB, expected)
    assert open_ledger().history().state == policy.fold(JOB, expected)


def test_an_observation_with_a_hundred_power_limits_comes_back_whole(open_ledger: Open) -> None:
    ledger = open_ledger()
    rows = tuple(SettingMeasurement(400 - 10 / 3 * i, 100.25 + i, 1000.5 + 7 * i) for i in range(100))
    parts = Parts(evaluation=tuple((row.setting, Part(2, 80.5 + i, 1.25)) for i, row in enumerate(rows)))
    number = ledger.begin()
    attempt = ledger.decided(decision(number, reason=Reason(ReasonKind.EXPLORE, "because", fifty_arms())), {})
    observed = observation(number, profile=PowerProfile(64, GPU, rows), parts=parts)
    for _ in range(2):
        ledger.observed(attempt, observed)
    ledger.ended(number, [observed])
    again = open_ledger()
    assert again.observations() == (observed,)
    assert again.history().state.profile(64, GPU) == observed.profile


def fifty_arms() -> tuple[ArmBelief, ...]:
    return tuple(ArmBelief(8 * b, 3, 1234.5 + b, 0.12, 1200.25 - b, ArmStatus.KNOWN, 0.02, -5.5) for b in range(1, 51))


def test_measured_and_simulated_runs_are_never_mixed(open_ledger: Open) -> None:
    simulated = open_ledger()
    attempt = simulated.decided(decision(simulated.begin()), {})
    simulated.observed(attempt, observation(1))
    measured = open_ledger(energy_source=EnergySource.MEASURED)
    assert measured.observations() == ()
    assert measured.begin() == 2


def test_a_new_fingerprint_starts_from_nothing(open_ledger: Open) -> None:
    ledger = open_ledger()
    ledger.observed(ledger.decided(decision(ledger.begin()), {}), observation(1))
    assert open_ledger(replace(JOB, fingerprint="another")).observations() == ()
    assert len(open_ledger().observations()) == 1


def test_a_gate_that_skips_a_recurrence_ends_it_and_adds_nothing_to_the_history(open_ledger: Open) -> None:
    ledger = open_ledger()
    ledger.observed(ledger.decided(decision(ledger.begin()), {}), observation(1))
    ledger.ended(1, [observation(1)])
    for number in (2, 3):
        assert ledger.begin() == number
        asked = ledger.asked(number, {"zf.note": "x" * 9000})
        ledger.gated(asked, gate_check(number, skips=number == 2))
    again = open_ledger()
    assert again.observations() == (observation(1),)
    assert again.history().in_flight == ()
    assert again.history().state.newest_model == (1, 1, 64)
    again.observed(again.decided(decision(3), {}), observation(3))  # the one that was not skipped goes on
    gap = Gap(2, skipped=True, time_s=2.0)
    assert open_ledger().gaps() == (gap,)
    assert open_ledger().history().state == policy.fold(JOB, [observation(1), observation(3)], [gap])
    assert open_ledger().begin() == 4


def test_the_fold_passes_over_skipped_recurrences_in_their_place(
    open_ledger: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []

    def pass_over(job: Job, state: policy.State, gap: Gap) -> policy.State:
        heard.append(gap.recurrence)
        return replace(state, samples_per_epoch=state.observations)  # what had been folded before

    for where in (policy, engine):  # ledgers that fold step by step, and those that fold all at once
        monkeypatch.setattr(where, "pass_over", pass_over)
    ledger = open_ledger()
    for number in (1, 2):
        ledger.begin()
        if number == 1:
            ledger.observed(ledger.decided(decision(1), {}), observation(1))
            ledger.ended(1, [observation(1)])
        else:
            ledger.gated(ledger.asked(2, {}), gate_check(2, skips=True))
    assert ledger.history().state.samples_per_epoch == 1
    heard.clear()
    assert open_ledger().history().state.samples_per_epoch == 1
    assert heard == [2]


def test_recurrences_are_under_way_from_their_beginning_to_their_end(open_ledger: Open) -> None:
    ledger = open_ledger()
    assert ledger.history().under_way == ()
    for _ in range(3):
        ledger.begin()
    assert open_ledger().history().under_way == (1, 2, 3)
    ledger.observed(ledger.decided(decision(2), {}), observation(2))
    assert open_ledger().history().under_way == (1, 2, 3), "it may be tried again"
    ledger.ended(2, [observation(2)])
    ledger.gated(ledger.asked(1, {}), gate_check(1, skips=True))
    assert open_ledger().history().under_way == (3,)


def test_what_a_gate_found_can_be_written_twice(open_ledger: Open) -> None:
    ledger = open_ledger()
    number = ledger.begin()
    asked = ledger.asked(number, {})
    assert open_ledger().asked(number, {}) == asked
    for _ in range(2):
        ledger.gated(asked, gate_check(number, skips=True))
    assert open_ledger().begin() == 2


def test_epochs_and_ends_can_be_reported(open_ledger: Open) -> None:
    ledger = open_ledger()
    attempt = ledger.decided(decision(ledger.begin()), {"zf.note": "x" * 9000})
    ledger.epoch(attempt, EpochReport(1, energy_j=10.0, time_s=1.0, setting=150.0, metric=0.5))
    ledger.observed(attempt, observation(1))
    ledger.ended(1, [observation(1)])
    assert ledger.observations() == (observation(1),)
