"""janitor, reset, verify and import, as a user types them, on a real store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from mlflow import MlflowClient

from tests.builders import decision, observation
from tests.training_functions import write_job
from zeus_flows.cli import main
from zeus_flows.core.records import EnergySource
from zeus_flows.job_file import load_job
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.ledger.open_ledger import open_direct


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
    forged = {name: value.replace('"observations":12', '"observations":11') for name, value in window.tags.items()}
    body = "".join(forged[f"zf.snapshot.{i}"] for i in range(10) if f"zf.snapshot.{i}" in forged)
    head = json.loads(forged["zf.snapshot"]) | {"digest": hashlib.sha256(body.encode()).hexdigest()}
    client = MlflowClient(tracking_uri=load_job(job).tracking_uri)
    for name, value in (forged | {"zf.snapshot": json.dumps(head)}).items():
        if name.startswith("zf.snapshot"):
            client.set_tag(window.run_id, name, value)
    done = zeus_flows("ledger", "verify", str(job))
    assert done.exit_code == 5
    assert "the next recurrence folds anew" in done.output


def test_reset_opens_a_window_in_which_nothing_counts_yet(job: Path) -> None:
    ledger = ledger_of(job)
    record(ledger, load_job(job).fingerprint)
    assert "drift window 2 begins" in zeus_flows("reset", str(job)).output
    fresh = ledger_of(job)
    assert fresh.observations() == ()
    record(fresh, load_job(job).fingerprint)
    assert [o.recurrence for o in ledger_of(job).observations()] == [2]


def test_janitor_leaves_the_living_alone(job: Path) -> None:
    ledger = ledger_of(job)
    ledger.decided(decision(ledger.begin()), {})
    assert "nothing is dead" in zeus_flows("janitor", str(job)).output
    assert len(ledger_of(job).history().in_flight) == 1


def foreign_run(uri: str, batch_size: int, accuracy: float, **metrics: float) -> None:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("old-runs")
    experiment_id = experiment.experiment_id if experiment else client.create_experiment("old-runs")
    run_id = client.create_run(experiment_id).info.run_id
    client.log_param(run_id, "bs", batch_size)
    for name, value in ({"epochs": 7, "joules": 900.0, "seconds": 12.0, "accuracy": accuracy} | metrics).items():
        client.log_metric(run_id, name, value)
    client.set_terminated(run_id)


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
