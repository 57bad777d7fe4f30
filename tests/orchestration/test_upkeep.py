"""janitor, reset, verify and import, as a user types them, on a real store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from mlflow import MlflowClient

from tests.builders import decision, observation
from tests.training_functions import write_job
from zeus_flows.cli import main
from zeus_flows.core.attempt import EpochReport
from zeus_flows.core.json import to_text
from zeus_flows.core.records import EnergySource
from zeus_flows.job_file import load_job
from zeus_flows.ledger import durable
from zeus_flows.ledger.janitor import Buried, Swept
from zeus_flows.ledger.lease import this_process
from zeus_flows.ledger.mlflow import snapshot
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct
from zeus_flows.ledger.outbox import Outbox
from zeus_flows.settings import read_settings


@pytest.fixture
def job(tmp_path: Path, sqlite_uri: str) -> Path:
    return write_job(tmp_path / "job.yaml", tracking_uri=sqlite_uri)


def ledger_of(job: Path) -> MlflowLedger:
    job_file = load_job(job)
    assert job_file.tracking_uri is not None
    return open_direct(job_file.core(), tracking_uri=job_file.tracking_uri, energy_source=EnergySource.SIMULATED)


def record(ledger: MlflowLedger, fingerprint: str) -> None:
    number = ledger.begin()
    observed = observation(number, fingerprint=fingerprint)
    ledger.observed(ledger.decided(decision(number), {}), observed)
    ledger.ended(number, [observed])


def zeus_flows(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_verify_says_that_the_state_is_the_fold_of_all_runs(job: Path) -> None:
    ledger = ledger_of(job)
    for _ in range(12):
        record(ledger, load_job(job).fingerprint)
    ledger.history()
    done = zeus_flows("ledger", "verify", str(job))
    assert (done.exit_code, done.output) == (0, "nightly: the state is the fold of all 12 observations\n")


def test_verify_notices_a_snapshot_that_lies(job: Path) -> None:
    ledger = ledger_of(job)
    for _ in range(12):
        record(ledger, load_job(job).fingerprint)
    ledger.history()
    window = ledger.window()
    known = snapshot.load(load_job(job).core(), window.tags)
    assert known is not None
    forged = snapshot.dump(replace(known, state=replace(known.state, observations=11)))
    client = MlflowClient(tracking_uri=load_job(job).tracking_uri)
    for name, value in forged.items():
        client.set_tag(window.run_id, name, value)
    done = zeus_flows("ledger", "verify", str(job))
    assert done.exit_code == 5
    assert f"type `zeus-flows ledger repair {job}`" in done.output
    done = zeus_flows("ledger", "repair", str(job))
    assert (done.exit_code, done.output) == (
        0,
        "nothing that holds the ledger together was missing\n"
        "nightly: the history is folded anew; 12 observations count\n",
    )
    assert zeus_flows("ledger", "verify", str(job)).exit_code == 0


def test_repair_brings_back_what_was_deleted_and_rebuilds_what_is_gone(job: Path, sqlite_uri: str) -> None:
    ledger = ledger_of(job)
    for _ in range(3):
        record(ledger, load_job(job).fingerprint)
    client = MlflowClient(tracking_uri=sqlite_uri)
    page, window = ledger.layout.page(0), ledger.window().run_id
    client.delete_run(window)
    client.delete_run(page)
    client._tracking_client.store._hard_delete_run(page)
    refused = zeus_flows("ledger", "verify", str(job))
    assert refused.exit_code == 5
    assert "type `zeus-flows ledger repair`" in refused.output
    done = zeus_flows("ledger", "repair", str(job))
    assert done.exit_code == 0, done.output
    assert f"drift window 1 · simulated energy had been deleted and is back (run {window})" in done.output
    assert "page 0 was gone for good and is rebuilt from the runs of 3 recurrences" in done.output
    assert "the history is folded anew; 3 observations count" in done.output
    assert zeus_flows("ledger", "verify", str(job)).exit_code == 0
    assert ledger_of(job).begin() == 4


def test_repair_of_a_job_that_is_not_there_says_so(job: Path) -> None:
    done = zeus_flows("ledger", "repair", str(job))
    assert done.exit_code == 5
    assert "there is no experiment of the job nightly in sqlite" in done.output


def test_reset_opens_a_window_in_which_nothing_counts_yet(job: Path) -> None:
    ledger = ledger_of(job)
    record(ledger, load_job(job).fingerprint)
    assert "drift window 2 begins" in zeus_flows("reset", str(job), "--yes").output
    fresh = ledger_of(job)
    assert fresh.observations() == ()
    record(fresh, load_job(job).fingerprint)
    assert [o.recurrence for o in ledger_of(job).observations()] == [2]


def test_janitor_leaves_the_living_alone(job: Path) -> None:
    ledger = ledger_of(job)
    ledger.decided(decision(ledger.begin()), {})
    assert "nothing is dead" in zeus_flows("janitor", str(job)).output
    assert len(ledger_of(job).history().in_flight) == 1


def test_janitor_says_what_still_waits_to_be_delivered(job: Path, sqlite_uri: str) -> None:
    ledger = ledger_of(job)
    attempt = ledger.decided(decision(ledger.begin()), {})
    outbox = Outbox(read_settings().state_dir)
    report = to_text(EpochReport(1, energy_j=1.0, time_s=1.0))
    outbox.put(ledger.key, attempt, "epoch", report, owner=this_process().dump(), wall_s=1.0)
    assert "what 1 attempts brought still waits here" in zeus_flows("janitor", str(job)).output
    assert (
        "waits here"
        not in zeus_flows(
            "janitor", str(write_job(job.parent / "other.yaml", name="other", tracking_uri=sqlite_uri))
        ).output
    )


def test_janitor_says_what_it_had_no_time_for(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> Swept:
        return Swept(
            buried=(Buried(1, 1, "process 7 on host has ended", ""),), unseen=(2, 3), why="MLflow took too long"
        )

    monkeypatch.setattr(durable, "sweep", slow)
    done = zeus_flows("janitor", str(job))
    assert done.exit_code == 5
    assert "recurrence 1 was closed: process 7 on host has ended" in done.output
    assert "2 recurrences could not be looked at (2, 3): MLflow took too long" in done.output
    assert f"type `zeus-flows janitor {job}` again" in done.output
    monkeypatch.setattr(durable, "sweep", lambda *_, **__: Swept(why="MLflow took too long"))
    assert "no recurrence could be looked at: MLflow took too long" in zeus_flows("janitor", str(job)).output


def foreign_run(uri: str, batch_size: object, accuracy: float, **metrics: float) -> str:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("old-runs")
    experiment_id = experiment.experiment_id if experiment else client.create_experiment("old-runs")
    run_id = client.create_run(experiment_id).info.run_id
    client.log_param(run_id, "bs", batch_size)
    for name, value in ({"epochs": 7, "joules": 900.0, "seconds": 12.0, "accuracy": accuracy} | metrics).items():
        client.log_metric(run_id, name, value)
    client.set_terminated(run_id)
    return str(run_id)


COLUMNS = ("--batch-size", "params.bs", "--energy", "metrics.joules", "--time", "metrics.seconds", "--samples", "1000")


def test_import_turns_existing_runs_into_observations_once(job: Path, sqlite_uri: str) -> None:
    foreign_run(sqlite_uri, 32, accuracy=1.0)
    foreign_run(sqlite_uri, 64, accuracy=0.2)
    foreign_run(sqlite_uri, 77, accuracy=1.0)
    done = zeus_flows("import", str(job), "--experiment", "old-runs", *COLUMNS)
    assert done.exit_code == 0, done.output
    assert "2 runs imported from old-runs, 0 known before" in done.output
    assert "batch size 77 is not one of the job's" in done.output
    read = ledger_of(job).observations()
    assert [(o.batch_size, o.outcome, o.epochs, o.energy_j) for o in read] == [
        (32, "converged", 7, 900.0),
        (64, "exhausted", 7, 900.0),
    ]
    again = zeus_flows("import", str(job), "--experiment", "old-runs", *COLUMNS)
    assert "0 runs imported from old-runs, 2 known before" in again.output


def test_import_goes_on_past_bad_runs_and_lists_them(job: Path, sqlite_uri: str) -> None:
    nan, inf = float("nan"), float("inf")
    bad = {
        foreign_run(sqlite_uri, 64.9, accuracy=1.0): "params.bs is 64.9, not a whole number",
        foreign_run(sqlite_uri, "large", accuracy=1.0): "params.bs is 'large', not a number",
        foreign_run(sqlite_uri, "nan", accuracy=1.0): "params.bs is nan; it must be positive and finite",
        foreign_run(sqlite_uri, "inf", accuracy=1.0): "params.bs is inf; it must be positive and finite",
        foreign_run(sqlite_uri, 32, accuracy=1.0, joules=-5.0): "metrics.joules is -5; it must be positive and finite",
        foreign_run(sqlite_uri, 32, accuracy=1.0, joules=inf): "metrics.joules is 1.79769e+308; it must be",
        foreign_run(sqlite_uri, 32, accuracy=1.0, joules=nan): "metrics.joules is nan; it must be",
        foreign_run(sqlite_uri, 32, accuracy=1.0, seconds=0.0): "metrics.seconds is 0; it must be positive",
        foreign_run(sqlite_uri, 32, accuracy=1.0, epochs=-1): "metrics.epochs is -1; it must be positive",
        foreign_run(sqlite_uri, 32, accuracy=1.0, epochs=inf): "metrics.epochs is 1.79769e+308; it must be",
        foreign_run(sqlite_uri, 32, accuracy=nan): "metrics.accuracy is nan",
    }
    foreign_run(sqlite_uri, 32, accuracy=1.0)
    done = zeus_flows("import", str(job), "--experiment", "old-runs", *COLUMNS)
    assert done.exit_code == 0, done.output
    assert "1 runs imported from old-runs, 0 known before" in done.output
    for run_id, why in bad.items():
        assert f"left out {run_id}: {why}" in done.output
    assert [o.batch_size for o in ledger_of(job).observations()] == [32]


def test_import_says_what_a_run_lacks_where_none_can_be_used(job: Path, sqlite_uri: str) -> None:
    foreign_run(sqlite_uri, 32, accuracy=1.0)
    done = zeus_flows("import", str(job), "--experiment", "old-runs", "--samples", "1000")
    assert done.exit_code == 2
    assert "it has no params.batch_size" in done.output


def test_import_from_nowhere_is_told(job: Path) -> None:
    done = zeus_flows("import", str(job), "--experiment", "no-such", *COLUMNS)
    assert (done.exit_code, "there is no experiment" in done.output) == (2, True)


def test_a_jobs_own_runs_can_be_replayed(job: Path, tmp_path: Path) -> None:
    ledger = ledger_of(job)
    for _ in range(3):
        record(ledger, load_job(job).fingerprint)
    assert zeus_flows("ledger", "traces", str(job), str(tmp_path / "traces")).exit_code == 0
    words = ("--traces", str(tmp_path / "traces"), "--gpu", "simulated-v100", "--policy", "thompson", "--seeds", "1")
    done = zeus_flows("replay", *words, "--recurrences", "4", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.output)["rows"]
    assert (row["workload"], row["recurrences"], row["unconverged"]) == ("nightly", 4, 0)


def test_reset_without_a_terminal_and_without_yes_exits_2_and_resets_nothing(job: Path) -> None:
    ledger = ledger_of(job)
    record(ledger, load_job(job).fingerprint)
    done = zeus_flows("reset", str(job))
    assert done.exit_code == 2
    assert "--yes" in done.output
    assert ledger_of(job).layout.look().number == 1


def test_status_and_explain_tell_of_a_job_and_make_no_database_where_there_is_none(job: Path, tmp_path: Path) -> None:
    record(ledger_of(job), load_job(job).fingerprint)
    told = zeus_flows("status", str(job))
    assert told.exit_code == 0, told.output
    assert "recurrence 1" in told.output
    assert json.loads(zeus_flows("status", str(job), "--json").output)["jobs"][0]["name"] == load_job(job).name
    explained = zeus_flows("explain", str(job), "--json")
    assert explained.exit_code == 0, explained.output
    assert json.loads(explained.output)["recurrence"] == 1
    nowhere = ("--tracking-uri", f"sqlite:///{tmp_path}/none.db")
    assert "has never run" in zeus_flows("status", str(job), *nowhere).output
    assert "there are no jobs" in zeus_flows("status", *nowhere).output
    assert zeus_flows("explain", str(job), *nowhere).exit_code == 2
    assert not (tmp_path / "none.db").exists()
