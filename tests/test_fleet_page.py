"""A fleet as people and programs read it: 80 columns, JSON, one HTML file."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from zeus_flows.cli.commands import main
from zeus_flows.core.job_summary import JobSummary, NewestAttempt, SavedSoFar, totals
from zeus_flows.core.records import EnergySource, Outcome
from zeus_flows.reporting.fleet import Fleet, fleet_document, fleet_page, fleet_sentences, fleet_tables

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SAVED = SavedSoFar("j", (87e3, 10e3, 164e3), (134e3, 68e3, 200e3), 18.0, -103e3, 20, 1)
TOLD = NewestAttempt(20, 1, NOW.timestamp() - 600, "full", "", 512, 150.0, Outcome.CONVERGED)
JOB = JobSummary(
    "nightly-ranker", "1", EnergySource.MEASURED, 20, 1, 512, SAVED, TOLD, TOLD, usual_s=500.0, champion_s=0.0
)
BLOCKED = replace(TOLD, untunable="no permission", mode="observe", mode_why="its roll-out, up to recurrence 100")
JOBS = (
    JOB,
    replace(JOB, name="x" * 64, newest=replace(BLOCKED, late=True, degraded=True), under_way=(20,)),
    replace(JOB, name="simulated", energy_source=EnergySource.SIMULATED),
    replace(JOB, name="by-time", energy_source=EnergySource.NONE, saved=replace(SAVED, unit="s", energy_j=None)),
    replace(JOB, name="new", newest=None, ended=None, saved=None, best_batch_size=None),
    JobSummary("damaged", "9", trouble="its ledger is incomplete"),
    replace(
        JOB, name="[red]<script>alert(1)</script>\x1b[31m", ended=replace(TOLD, outcome=Outcome.FAILED, text="<b>")
    ),
)
FLEET = Fleet(JOBS, {"nightly-ranker": NOW + timedelta(hours=14), "by-time": NOW + timedelta(days=3)}, NOW, "here")


def shown(fleet: Fleet, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in fleet_tables(fleet):
        console.print(table)
    for sentence in fleet_sentences(fleet):
        console.print(sentence, highlight=False, markup=False)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def test_a_fleet_fits_a_terminal_of_eighty_columns_whatever_jobs_are_called() -> None:
    text = shown(FLEET)
    assert max(len(line) for line in text.splitlines()) <= 80
    lines = [line.split() for line in text.splitlines()]
    assert ["nightly-ranker", "full", "512@150W", "18", "±", "16", "%", "-103", "kJ", "02:00", "ok"] in lines
    assert any(words[1:3] == ["observe", "≤100"] and words[-1] == "late" for words in lines)
    assert "\x1b" not in text
    assert "[red]" in text


def test_measured_and_simulated_savings_are_in_tables_and_sentences_of_their_own() -> None:
    text = shown(FLEET, width=200)
    assert text.index("Measured energy") < text.index("nightly-ranker") < text.index("SIMULATED")
    assert "(simulated)" in text
    together = totals(JOBS)
    assert together[EnergySource.MEASURED].energy_j[0] == pytest.approx(3 * 134e3)
    assert together[EnergySource.SIMULATED].energy_j[0] == pytest.approx(134e3)
    assert set(together) == {EnergySource.MEASURED, EnergySource.SIMULATED}
    assert "No power limit can be tuned in 1 job (no permission)" in text
    assert "damaged: its ledger is incomplete." in text


def test_the_html_page_needs_nothing_else_and_runs_nothing() -> None:
    page = fleet_page(FLEET)
    assert "<script" not in page
    assert not re.search(r"\b(src|href)\s*=", page)
    assert "http" not in page
    for job in ("nightly-ranker", "by-time", "damaged"):
        assert job in page
    assert "To look at" in page
    assert "&lt;script&gt;" in page


def test_the_json_document_says_what_the_tables_say() -> None:
    document = json.loads(json.dumps(fleet_document(FLEET)))
    found = {job["name"]: job for job in document["jobs"]}
    assert found["nightly-ranker"]["saved"]["energy_j"] == [134e3, 68e3, 200e3]
    assert found["nightly-ranker"]["next_run"] == "2026-03-02T02:00:00+00:00"
    assert found["x" * 64]["concerns"] == ["late", "degraded"]
    assert document["untunable"] == {"no permission": ["x" * 64]}
    assert set(document["totals"]) == {"measured", "simulated"}


def test_looking_creates_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ((), ("--json",), ("--html", "fleet.html"), ("--tracking-uri", "sqlite:///other.db")):
        done = CliRunner().invoke(main, ["fleet", *words])
        assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.html"]
