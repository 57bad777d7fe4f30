"""A history that a benchmark makes is the one that production writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from histories import LAG, SOURCE, job_file, record_history, write_one
from mlflow import MlflowClient

from zeus_flows.ledger.mlflow import snapshot
from zeus_flows.ledger.open_ledger import open_direct

#: Names that differ from one history to the other, though what they say is the same.
OWN = ("mlflow.user", "mlflow.source", "zf.lease", "zf.drift_window", "zf.snapshot", "zf.page.", "zf.a.")
#: For people's eyes alone, and read by nothing that is measured: of made attempts all have the first one's.
FOR_PEOPLE = ("mlflow.note.content", "zf.saved_j", "zf.saved_s")


def told(uri: str, name: str) -> dict[str, dict[str, Any]]:
    """Return all that a job's runs say, but for ids and times."""
    client, found = MlflowClient(tracking_uri=uri), dict[str, dict[str, Any]]()
    for experiment in (name, f"{name}.ledger"):
        known = client.get_experiment_by_name(experiment)
        assert known is not None
        for run in client.search_runs([known.experiment_id]):
            said = {
                k: v for k, v in {**run.data.tags, **run.data.params}.items() if not k.startswith((*OWN, *FOR_PEOPLE))
            }
            claims = {k: {**json.loads(v), "token": ""} for k, v in said.items() if k.startswith("zf.r.")}
            series = {
                key: [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, key)]
                for key in run.data.metrics
                if key not in FOR_PEOPLE
            }
            links = sum(k.startswith("zf.a.") for k in run.data.params)
            found[run.info.run_name] = {
                "said": {**said, **claims},
                "metrics": {k: v for k, v in run.data.metrics.items() if k not in FOR_PEOPLE},
                "series": series,
                "status": run.info.status,
                "links": links,
            }
    return found


def test_made_records_are_the_ones_that_production_writes(tmp_path: Path, sqlite_uri: str) -> None:
    job = job_file(tmp_path, "nightly").core(SOURCE)
    made = f"sqlite:///{tmp_path}/made.db"
    shutil.copy(sqlite_uri.removeprefix("sqlite:///"), tmp_path / "made.db")
    for _ in range(11):
        write_one(sqlite_uri, job, tmp_path / "state")
    record_history(made, job, 11, tmp_path / "state")
    assert told(made, job.name) == told(sqlite_uri, job.name)
    ledger = open_direct(job, tracking_uri=made, energy_source=SOURCE)
    assert ledger.verify() == (True, 11)
    assert snapshot.covers(ledger.layout.look().tags) == 11 - LAG
    assert write_one(made, job, tmp_path / "state") == 12
