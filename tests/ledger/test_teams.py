"""Several teams on one MLflow server: by permissions, and by workspaces."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from tests.builders import JOB, decision, observation
from tests.ledger.servers import PASSWORD, TEAMS, USER, mlflow_server
from zeus_flows.core.records import EnergySource
from zeus_flows.errors import StoreDenied
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.fleet_jobs import read_fleet
from zeus_flows.ledger.mlflow.ledger import MlflowLedger
from zeus_flows.reporting.links import run_url

pytestmark = pytest.mark.slow


def recur(uri: str, name: str) -> int:
    """Run a recurrence of a job to its end."""
    ledger = MlflowLedger(replace(JOB, name=name), Store(uri), EnergySource.SIMULATED)
    number = ledger.begin()
    run_id, done = ledger.decided(decision(number), {}), observation(number)
    ledger.observed(run_id, done)
    ledger.ended(number, [done])
    return number


def jobs(uri: str) -> list[str]:
    return [job.name for job in read_fleet(Store(uri)) if not job.trouble]


def test_a_team_sees_its_own_jobs_and_an_administrator_all(
    server_with_authentication: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = server_with_authentication
    for team in TEAMS:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", team)
        assert recur(uri, f"{team}-ranker") == 1
    for team in TEAMS:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", team)
        assert jobs(uri) == [f"{team}-ranker"]
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    assert {"blue-ranker", "red-ranker"} <= set(jobs(uri))


def test_a_name_that_is_another_teams_is_refused_and_says_what_to_do(
    server_with_authentication: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = server_with_authentication
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "red")
    recur(uri, "theirs")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "blue")
    with pytest.raises(StoreDenied) as refused:
        recur(uri, "theirs")
    assert "the experiment theirs is another team's: name the job otherwise" in str(refused.value)
    assert PASSWORD not in str(refused.value)

    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "red")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own, of starlette
        from mlflow.server.auth.client import AuthServiceClient
    owner = AuthServiceClient(uri)
    for name in ("theirs", "theirs.ledger"):
        experiment = MlflowClient(uri).get_experiment_by_name(name)
        assert experiment is not None
        owner.grant_user_permission("blue", "experiment", experiment.experiment_id, "EDIT")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "blue")
    assert recur(uri, "theirs") == 2


@pytest.fixture
def server_with_workspaces(_migrated_database: Path, tmp_path: Path) -> Iterator[str]:
    shutil.copy(_migrated_database, tmp_path / "mlflow.db")
    with mlflow_server(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path, "--enable-workspaces") as address:
        yield address


def test_teams_with_workspaces_of_their_own_may_call_their_jobs_alike(
    server_with_workspaces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = server_with_workspaces
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for team in TEAMS:
        mlflow.create_workspace(team)
    keys = set[str]()
    for team, recurrences in zip(TEAMS, (2, 1), strict=True):
        monkeypatch.setenv("MLFLOW_WORKSPACE", team)
        keys.add(MlflowLedger(JOB, Store(uri), EnergySource.SIMULATED).key)
        for number in range(1, recurrences + 1):
            assert recur(uri, JOB.name) == number
    assert len(keys) == 2, "what waits on a machine for one team is never delivered to another"
    for team, recurrences in zip(TEAMS, (2, 1), strict=True):
        monkeypatch.setenv("MLFLOW_WORKSPACE", team)
        (job,) = read_fleet(Store(uri))
        assert (job.name, job.recurrences) == (JOB.name, recurrences)
        assert run_url(uri, "1").endswith(f"/runs/{{run_id}}?workspace={team}")
