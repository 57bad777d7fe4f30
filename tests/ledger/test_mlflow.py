"""The ledger in MLflow runs: errors, drift windows, order, and a cost that does not grow."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from tests.builders import GPU, JOB, decision, observation, profile
from tests.ledger.test_codec import OBSERVATIONS
from tests.processes import fork_server
from zeus_flows import killpoints
from zeus_flows.core import policy
from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import PowerProfile, SettingMeasurement
from zeus_flows.core.records import EnergySource, Outcome
from zeus_flows.errors import AlreadyDecided, AlreadyObserved, StoreDenied, StoreError, StoreUnavailable, UnknownAttempt
from zeus_flows.ledger.lease import this_process
from zeus_flows.ledger.mlflow import names, pages, snapshot
from zeus_flows.ledger.mlflow.address import location
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.client_errors import named_error
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.mlflow.record_text import load_observation
from zeus_flows.ledger.open_ledger import open_direct

Open = Callable[..., MlflowLedger]


@pytest.fixture
def open_ledger(sqlite_uri: str) -> Open:
    def opened(job: Job = JOB, energy_source: EnergySource = EnergySource.SIMULATED) -> MlflowLedger:
        return open_direct(job, tracking_uri=sqlite_uri, energy_source=energy_source)

    return opened


def record(ledger: MlflowLedger, job: Job = JOB) -> int:
    number = ledger.begin()
    observed = observation(number, fingerprint=job.fingerprint, energy_j=5000.0 + number % 7)
    ledger.observed(ledger.decided(decision(number), {}), observed)
    ledger.ended(number, [observed])
    return number


def test_a_limit_that_somebody_else_set_is_on_the_run_and_in_its_record(open_ledger: Open, sqlite_uri: str) -> None:
    ledger = open_ledger()
    number = ledger.begin()
    run_id = ledger.decided(decision(number), {})
    ledger.observed(run_id, observation(number, foreign_limit_w=180.0))
    data = MlflowClient(tracking_uri=sqlite_uri).get_run(run_id).data
    assert data.tags["zf.foreign_limit_w"] == "180"
    assert load_observation(data.params["zf.observation"]).foreign_limit_w == 180.0


def test_a_batch_that_is_trained_in_parts_is_told_by_its_run_and_what_fitted_is_remembered(
    open_ledger: Open, sqlite_uri: str
) -> None:
    job = replace(JOB, accumulate=True)
    ledger = open_ledger(job)
    number = ledger.begin()
    ran_out = observation(number, outcome=Outcome.OUT_OF_MEMORY, epochs=0, profile=None)
    ledger.observed(ledger.decided(decision(number), {}), ran_out)
    parts = replace(decision(number, 2), micro_batch_size=32)
    run_id = ledger.decided(parts, {})
    fitted = observation(number, 2, micro_batch_size=32, profile=replace(profile(64), micro_batch_size=32))
    ledger.observed(run_id, fitted)
    ledger.ended(number, [ran_out, fitted])
    run = MlflowClient(tracking_uri=sqlite_uri).get_run(run_id)
    assert run.data.params["zf.micro_batch_size"] == "32"
    assert run.info.run_name == "#1.2 · 2x32 · 150 W"
    state = open_ledger(job).state()
    assert state.too_large(GPU, 2) == 64
    assert state.profile(64, GPU, 32) == fitted.profile


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_PARAMETER_VALUE", StoreError),
        ("RESOURCE_DOES_NOT_EXIST", UnknownAttempt),
        ("PERMISSION_DENIED", StoreDenied),
        ("INTERNAL_ERROR", StoreUnavailable),
        ("TEMPORARILY_UNAVAILABLE", StoreUnavailable),
    ],
)
def test_mlflow_s_errors_say_whether_to_try_again(code: str, kind: type[StoreError]) -> None:
    assert type(named_error(MlflowException("no", error_code=_number(code)))) is kind


def _number(code: str) -> int:
    from mlflow.protos.databricks_pb2 import ErrorCode

    return int(ErrorCode.Value(code))


def test_a_call_that_hangs_is_given_up_in_time(sqlite_uri: str) -> None:
    hanging = Store(sqlite_uri)
    began = time.monotonic()
    with hanging.within(0.3), pytest.raises(StoreUnavailable, match="too long"):
        hanging._call(lambda: time.sleep(5))
    assert time.monotonic() - began < 2


def test_a_database_that_is_away_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlflow.store.db.utils.MAX_RETRY_COUNT", 5)  # three seconds of retries instead of a hundred
    away = Store("postgresql://me:planted@127.0.0.1:1/mlflow", patience_s=10.0)
    began = time.monotonic()
    with away.within(0.3), pytest.raises(StoreUnavailable) as error:
        away.experiment("nightly")
    assert time.monotonic() - began < 2
    assert "planted" not in str(error.value)
    for thread in threading.enumerate():  # MLflow opens one store at a time: the next test would wait for this one
        if thread.name == "zeus-flows-mlflow":
            thread.join()


def test_the_default_store_of_two_folders_is_not_one_place(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    here = location("sqlite:///mlflow.db")
    monkeypatch.chdir(str(tmp_path))
    assert location("sqlite:///mlflow.db") != here


def test_another_decision_for_an_attempt_is_refused_by_name(open_ledger: Open) -> None:
    ledger = open_ledger()
    number = ledger.begin()
    attempt = ledger.decided(decision(number), {})
    assert open_ledger().decided(decision(number), {}) == attempt
    with pytest.raises(AlreadyDecided):
        open_ledger().decided(decision(number, batch_size=32), {})


def test_a_number_is_found_again_by_its_token_on_whatever_page(open_ledger: Open) -> None:
    ledger = open_ledger()
    number = ledger.begin("token.1")
    ledger.store.set_once(ledger.layout.page(0), names.claim(pages.SIZE), "full")
    assert ledger.begin("token.12") == pages.SIZE + 1
    assert ledger.begin("token.1", asked_before=True) == number
    assert ledger.begin("token.2", asked_before=True) == pages.SIZE + 2


def test_a_token_that_another_process_asks_with_meanwhile_gets_the_same_number(open_ledger: Open) -> None:
    ledger, other = open_ledger(), open_ledger()
    ledger.begin()
    theirs: list[int] = []

    def hook(point: str) -> None:
        if point == "before-claim" and not theirs:
            theirs.append(0)
            theirs[0] = other.begin("token.1", holder=this_process(flow_run_id="other"), asked_before=True)

    killpoints.listen(hook)
    try:
        number = ledger.begin("token.1", asked_before=True)
    finally:
        killpoints.listen(lambda _: None)
    assert [number] == theirs == [2]
    assert set(open_ledger().open_claims()) == {1, 2}, "the number that was taken too many is closed"
    assert open_ledger().begin("token.1", asked_before=True) == 2
    assert open_ledger().begin() == 4


def ask(uri: str, folder: Path, all_ready: Barrier) -> None:
    """Ask with one token, at the same time as others do (in a process of its own)."""
    ledger = open_direct(JOB, tracking_uri=uri, energy_source=EnergySource.SIMULATED)
    ledger.last_recurrence()
    for round_ in range(3):
        all_ready.wait(300)
        with (folder / f"{os.getpid()}").open("a") as notes:
            notes.write(f"{ledger.begin(f'token.{round_}', asked_before=True)}\n")


def test_processes_that_ask_with_one_token_get_one_number(open_ledger: Open, sqlite_uri: str, tmp_path: Path) -> None:
    open_ledger().begin()
    folder = tmp_path / "notes"
    folder.mkdir()
    processes = fork_server()
    all_ready = processes.Barrier(5)
    crew = [processes.Process(target=ask, args=(sqlite_uri, folder, all_ready)) for _ in range(5)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(300)
    assert [process.exitcode for process in crew] == [0] * 5
    answers = [tuple(map(int, path.read_text().split())) for path in folder.iterdir()]
    assert len(answers) == 5
    assert len(set(answers)) == 1
    assert len(set(answers[0])) == 3
    assert set(open_ledger().open_claims()) == {1, *answers[0]}


def test_a_lost_answer_while_the_root_is_made_does_not_cost_the_root(
    open_ledger: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger()
    create = MlflowClient.create_experiment

    def lose_the_answer(self: MlflowClient, name: str, *rest: Any) -> str:
        made = create(self, name, *rest)
        if name.endswith(".ledger"):
            raise MlflowException("the answer was lost")
        return made

    monkeypatch.setattr(MlflowClient, "create_experiment", lose_the_answer)
    assert record(ledger) == 1
    assert open_ledger().observations() == ledger.observations()
    assert len(open_ledger().observations()) == 1


def test_a_run_that_was_deleted_for_good_stops_nobody(open_ledger: Open, sqlite_uri: str) -> None:
    ledger = open_ledger()
    ledger.store.set_once(ledger.layout.page(0), names.attempt_run(ledger.begin(), 1), "f" * 32)
    ledger.store.set_once(ledger.layout.page(0), names.attempt_run(1, 2), "'; drop table runs")
    ledger.close(1)
    record(ledger)
    assert [o.recurrence for o in open_ledger().observations()] == [2]
    assert open_ledger().verify() == (True, 1)


def test_an_observation_of_schema_1_that_is_delivered_again_is_the_same(open_ledger: Open) -> None:
    ledger = open_ledger()
    attempt = ledger.decided(decision(ledger.begin()), {})
    old = OBSERVATIONS["complete profile"]
    ledger.store.set_once(attempt, "zf.observation", old)
    ledger.observed(attempt, load_observation(old))
    assert open_ledger().observations() == (load_observation(old),)
    with pytest.raises(AlreadyObserved):
        ledger.observed(attempt, replace(load_observation(old), epochs=6))


def test_whoever_wrote_an_observation_reads_it_as_everybody_else_does(open_ledger: Open) -> None:
    ledger = open_ledger()
    rows = (SettingMeasurement(250.0, 200.123456789, 100.0),)
    seen = observation(1, profile=PowerProfile(64, GPU, rows))
    ledger.observed(ledger.decided(decision(ledger.begin()), {}), seen)
    assert ledger.observations() == open_ledger().observations()
    assert ledger.history().state == open_ledger().history().state


# -- windows ---------------------------------------------------------------------------------------------------------


def test_reading_opens_no_drift_window(open_ledger: Open) -> None:
    record(open_ledger())
    other = open_ledger(replace(JOB, fingerprint="f1"))
    assert other.observations() == ()
    assert other.verify() == (True, 0)
    assert other.open_attempts() == ()
    assert open_ledger().layout.look().number == 1


def test_a_reset_is_seen_by_a_ledger_that_is_open(open_ledger: Open) -> None:
    ledger = open_ledger()
    record(ledger)
    assert ledger.history().state.observations == 1
    assert open_ledger().reset() == 2
    assert ledger.history().state.observations == 0
    record(ledger)
    assert [o.recurrence for o in ledger.observations()] == [2]
    assert ledger.verify() == (True, 1)


def test_two_that_open_windows_at_once_each_get_their_own(open_ledger: Open) -> None:
    record(open_ledger())
    first, second = (open_ledger(replace(JOB, fingerprint=f)) for f in ("f1", "f2"))
    first.layout.look()
    second.layout.look()  # both have seen the first window as the newest
    assert first.window().tags["zf.fingerprint"] == "f1"
    assert second.window().tags["zf.fingerprint"] == "f2"
    numbers = [open_ledger().layout.look().number, first.window().number, second.window().number]
    assert numbers == [3, 2, 3]


def test_a_new_fingerprint_s_first_recurrences_count_whoever_opens_the_window(open_ledger: Open) -> None:
    job = replace(JOB, fingerprint="f1")
    for _ in range(3):
        record(open_ledger())
    slow, quick = open_ledger(job), open_ledger(job)
    number = slow.begin()
    record(quick, job)
    slow.observed(slow.decided(decision(number), {}), observation(number, fingerprint="f1"))
    assert [o.recurrence for o in open_ledger(job).observations()] == [number, number + 1]
    assert open_ledger(job).history().state.observations == 2


# -- order and cost --------------------------------------------------------------------------------------------------


def test_the_state_is_the_fold_of_everything_whatever_order_reports_came_in(open_ledger: Open) -> None:
    ledgers = [open_ledger() for _ in range(3)]
    expected = []
    for round_ in range(8):
        begun = [(ledger, ledger.begin()) for ledger in ledgers]
        for turn, (ledger, number) in enumerate(reversed(begun) if round_ % 2 else begun):
            for attempt in (1, 2) if turn == 1 else (1,):
                expected.append(observation(number, attempt, energy_j=4000.0 + number + attempt))
                ledger.observed(ledger.decided(decision(number, attempt), {}), expected[-1])
            ledger.ended(number, expected[-1:])
        ledgers[round_ % 3].history()
    fresh = open_ledger()
    assert "zf.snapshot" in fresh.layout.look().tags
    assert fresh.history().state == policy.fold(JOB, expected)
    assert fresh.verify() == (True, len(expected))


def test_an_attempt_that_is_open_stays_out_of_the_snapshot(open_ledger: Open) -> None:
    ledger = open_ledger()
    open_one = ledger.begin()
    attempt = ledger.decided(decision(open_one), {})
    ledger.ended(open_one, ())  # its process broke off and was never heard of again
    for _ in range(2 * snapshot.EVERY):
        record(ledger)
    ledger.history()
    ledger.observed(attempt, observation(open_one))
    assert open_ledger().verify() == (True, 2 * snapshot.EVERY + 1)


def test_runs_start_in_order_although_the_clock_goes_back(
    open_ledger: Open, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(open_ledger())
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 86_400)
    for _ in range(2):
        record(open_ledger())
    client = MlflowClient(tracking_uri=sqlite_uri)
    runs = client.search_runs([open_ledger().experiment_id], "tags.`zf.kind` = 'attempt'")
    started = {int(run.data.tags["zf.recurrence"]): run.info.start_time for run in runs}
    assert started[1] < started[2] < started[3]


def test_a_decision_makes_no_more_calls_after_three_hundred_recurrences_than_after_thirty(
    open_ledger: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls_of_a_decision() -> int:
        counted: Counter[str] = Counter()
        call = Store._call

        def counting(self: Store, function: Callable[[], object]) -> object:
            counted["calls"] += 1
            return call(self, function)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "_call", counting)
            ledger = open_ledger()
            number = ledger.begin()
            ledger.history()
            attempt = ledger.decided(decision(number), {})
        observed = observation(number)
        ledger.observed(attempt, observed)
        ledger.ended(number, [observed])
        return counted["calls"]

    def write_upto(recurrence: int) -> None:
        """Record recurrences the cheap way: each as what the first one brought."""
        ledger = open_ledger()
        like = ledger.layout.read_pages(0).attempts[1, 1]
        written: dict[int, dict[str, str]] = {}
        for n in range(ledger.last_recurrence() + 1, recurrence + 1):
            params_of = {names.claim(n): "x", names.attempt_run(n, 1): like, names.end(n): "ended"}
            written.setdefault(pages.number_of(n), {}).update(params_of)
        for number, params in written.items():
            items = list(params.items())
            for start in range(0, len(items), 90):
                ledger.store.log(ledger.layout.page(number), params=dict(items[start : start + 90]))
        ledger.history()

    record(open_ledger())
    write_upto(29)
    early = calls_of_a_decision()
    write_upto(299)
    assert calls_of_a_decision() <= early <= 14
