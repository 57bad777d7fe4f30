"""`zeus-flows drift`: windows, evidence and what changed, from what MLflow has."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from tests.builders import decision, observation
from tests.training_functions import write_job
from zeus_flows.cli.capriccio import drift_command
from zeus_flows.core.records import EnergySource
from zeus_flows.job_file import load_job
from zeus_flows.ledger.open_ledger import open_direct


def write_history(path: Path, uri: str, *epochs: int) -> None:
    """Write recurrences that took so many epochs at batch size 64."""
    job = load_job(path).core()
    ledger = open_direct(job, tracking_uri=uri, energy_source=EnergySource.SIMULATED)
    for count in epochs:
        number = ledger.begin()
        attempt = ledger.decided(decision(number), {})
        seen = observation(
            number, epochs=count, energy_j=1000.0 * count, time_s=8.0 * count, fingerprint=job.fingerprint
        )
        ledger.observed(attempt, seen)
        ledger.ended(number, [seen])


def test_it_shows_the_windows_and_the_evidence_that_ended_them(tmp_path: Path, sqlite_uri: str) -> None:
    path = write_job(tmp_path / "job.yaml", default_batch_size=64)
    write_history(path, sqlite_uri, 5, 5, 5, 5, 5, 5, 15, 15, 15)

    result = CliRunner().invoke(drift_command, [str(path), "--tracking-uri", sqlite_uri], catch_exceptions=False)

    assert result.exit_code == 0
    assert "Drift windows of nightly" in result.output
    assert "drift was noticed once" in result.output
    assert "took 15 epochs where about 5.0 were expected" in result.output
    assert "Best known now: batch size 64" in result.output


def test_it_shows_why_windows_ended_whose_runs_no_longer_count(tmp_path: Path, sqlite_uri: str) -> None:
    path = write_job(tmp_path / "job.yaml", default_batch_size=64)
    write_history(path, sqlite_uri, 5, 5, 5, 5, 5, 5, 15)
    job = load_job(path).core()
    open_direct(job, tracking_uri=sqlite_uri, energy_source=EnergySource.SIMULATED).reset()

    result = CliRunner().invoke(drift_command, [str(path), "--tracking-uri", sqlite_uri], catch_exceptions=False)

    said = " ".join(result.output.split())
    assert "window 1 ended after recurrence 7 (drift): batch size 64 took 15 epochs where about 5.0" in said
    assert "window 2 ended before its first recurrence (reset): reset by hand" in said
    assert "Nothing that was observed counts" in said


def test_it_prints_json_and_draws_figure_10(tmp_path: Path, sqlite_uri: str) -> None:
    path = write_job(tmp_path / "job.yaml", default_batch_size=64)
    write_history(path, sqlite_uri, 5, 5, 5, 15)

    arguments = [str(path), "--tracking-uri", sqlite_uri, "--json", "--figure", str(tmp_path / "figures")]
    result = CliRunner().invoke(drift_command, arguments, catch_exceptions=False)

    document = json.loads(result.stdout)
    first, second = document["windows"]
    assert (first["opened_by"], first["ended_by"], first["first"], first["last"]) == ("first", "drift", 1, 4)
    assert second["is_open"]
    assert (document["observations"], document["best_batch_size"]) == (4, 64)
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {"figure-10-nightly.svg", "figure-10-nightly.png"}


def test_a_job_that_never_ran_has_nothing_to_show_and_nothing_is_written(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job.yaml")

    uri = f"sqlite:///{tmp_path / 'none.db'}"
    result = CliRunner().invoke(drift_command, [str(path), "--tracking-uri", uri], catch_exceptions=False)

    assert "nightly has no recurrences yet." in result.output
    assert not (tmp_path / "none.db").exists()
