"""The guide on models as a reader follows it: its example recurs as flows, and a command shows who is champion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from mlflow import MlflowClient

from tests.docs_blocks import blocks
from zeus_flows.cli import main
from zeus_flows.errors import ConfigError
from zeus_flows.orchestration.recurrence_flow import recurrence
from zeus_flows.training import keeping

PAGE = "docs/guides/models.md"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's two files, in the folder that a reader is in."""
    (example,) = [b.text for b in blocks("python") if b.page == PAGE]
    file = next(b.text for b in blocks("yaml") if b.page == PAGE)
    (tmp_path / "ranker.py").write_text(example, encoding="utf-8")
    path = tmp_path / "job.yaml"
    path.write_text(f"{file}device: simulated-v100\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return path


def shown(job: Path, uri: str, *flags: str) -> str:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["models", str(job), "--tracking-uri", uri, *flags])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_guides_example_ends_with_a_champion_that_can_be_loaded(
    job: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ranker has no champion" in shown(job, sqlite_uri)
    for _ in range(2):
        assert recurrence(str(job), tracking_uri=sqlite_uri).converged
    document = json.loads(shown(job, sqlite_uri, "--json"))
    assert document["champion"] in (1, 2)
    assert [row["recurrence"] for row in document["versions"]] == [1, 2]
    assert all(set(row["scores"]) == {"accuracy", "recall"} for row in document["versions"])
    assert all(row["energy_j"] > 0 and row["cost_j"] > 0 for row in document["versions"])
    table = shown(job, sqlite_uri)
    assert f"Version {document['champion']} of ranker is champion: accuracy" in table
    assert "Simulated energy" in table
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite_uri)
    kept = keeping.open_model("models:/ranker@champion")
    assert (kept.about, set(kept.weights())) == ({"width": 32}, {"0.weight", "0.bias", "2.weight", "2.bias"})
    assert not [file for file in kept.folder.rglob("*") if file.suffix in (".pkl", ".pt", ".pickle")]


def test_another_job_with_the_same_model_is_refused_before_it_trains(job: Path, sqlite_uri: str) -> None:
    MlflowClient(tracking_uri=sqlite_uri).create_registered_model("ranker", {"zf.job": "weekly"})
    with pytest.raises(ConfigError, match="is the job weekly's"):
        recurrence(str(job), tracking_uri=sqlite_uri)
    assert MlflowClient(tracking_uri=sqlite_uri).search_runs(["1"], "tags.`zf.kind` = 'attempt'") == []
