"""A caller who may start and change runs of a deployment, and tries to bring something of their own to a worker."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.workers.process import ProcessJobConfiguration

from tests.orchestration.deployed_runs import read_deployment, read_run, remove, run_here, start, zeus_flows
from tests.processes import PREFECT, run_forked
from tests.training_functions import write_job

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.xdist_group("prefect")]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def name(tmp_path: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A job that only observes, deployed; beside it a file that the caller would rather run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite_uri)
    job = f"careful-{uuid4().hex[:8]}"
    write_job(tmp_path / "job.yaml", name=job, mode="observe")
    command = [sys.executable, "-c", f"open({str(tmp_path / 'pwned')!r}, 'w')", "{batch_size}"]
    train = {"command": command, "metric": {"pattern": "x=(.)"}}
    write_job(tmp_path / "theirs.yaml", name="theirs", train=train)
    made = zeus_flows("deploy", "job.yaml", "--pool", f"pool-{job}")
    assert made.exit_code == 0, made.output
    yield f"recurrence/{job}"
    remove(tmp_path)


THEIRS: dict[str, Any] = {
    "job_file": "theirs.yaml",
    "folder": "/etc",
    "digest": "0" * 64,
    "tracking_uri": "http://127.0.0.1:9/stranger",
    "simulate": "a40",
    "function": "os:system",
    "command": ["touch", "pwned"],
    "train": {"function": "os:system"},
    "job_variables": {"command": "touch pwned"},
}


def test_no_parameter_but_the_free_ones_can_be_stated(name: str, tmp_path: Path) -> None:
    pinned = read_deployment(name).parameters
    assert set(pinned) < set(THEIRS)
    for parameter, value in THEIRS.items():
        with pytest.raises(PrefectHTTPStatusError, match="409"):
            start(name, parameters={parameter: value})
        ended = run_here(start(name, parameters={parameter: value}, enforce_parameter_schema=False))
        assert ended.is_failed(), parameter
        if parameter in pinned:
            assert f"{parameter}: pinned by the deployment" in str(ended.message)
    assert not (tmp_path / "pwned").exists()
    assert MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"]).get_experiment_by_name("theirs") is None


def test_the_parameters_of_a_run_that_waits_cannot_be_changed_either(name: str, tmp_path: Path) -> None:
    waiting = start(name)
    with get_client(sync_client=True) as client:
        client.update_flow_run(waiting.id, parameters={**waiting.parameters, "job_file": "theirs.yaml", "digest": None})
    ended = run_here(read_run(waiting.id))
    assert "digest, job_file: pinned by the deployment" in str(ended.message)
    assert not (tmp_path / "pwned").exists()


def test_what_looks_like_a_template_is_no_way_in(name: str, tmp_path: Path) -> None:
    for value in ({"__prefect_kind": "jinja", "template": "theirs.yaml"}, {"__prefect_kind": "json", "value": '"x"'}):
        with pytest.raises(PrefectHTTPStatusError, match="409"):
            start(name, parameters={"job_file": value})
        assert run_here(start(name, parameters={"job_file": value}, enforce_parameter_schema=False)).is_failed()


def test_a_caller_may_change_less_and_never_more(name: str) -> None:
    uri = os.environ["MLFLOW_TRACKING_URI"]
    for stated, mode in (("full", "observe"), ("off", "off")):
        assert run_here(start(name, parameters={"mode": stated, "seed": 7})).is_completed()
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(name.partition("/")[2])
        assert experiment is not None
        newest = client.search_runs(
            [experiment.experiment_id], "tags.`zf.kind` = 'attempt'", order_by=["start_time DESC"]
        )[0]
        assert newest.data.tags["zf.mode"] == mode


JOB_VARIABLES: dict[str, Any] = {
    "command": "touch pwned",
    "env": {"PYTHONPATH": "/tmp/theirs", "MLFLOW_TRACKING_URI": "http://stranger"},  # noqa: S108
    "env.PYTHONPATH": "/tmp/theirs",  # noqa: S108
    "working_dir": "/etc",
    "name": "theirs",
    "labels": {"a": "b"},
    "stream_output": False,
    "anything": 1,
}


def test_no_job_variable_can_be_stated(name: str) -> None:
    waiting = start(name)
    for variable, value in JOB_VARIABLES.items():
        with pytest.raises(PrefectHTTPStatusError, match="422"):
            start(name, job_variables={variable: value})
        with get_client(sync_client=True) as client, pytest.raises(PrefectHTTPStatusError, match="422"):
            client.update_flow_run(waiting.id, job_variables={variable: value})


def directly(name: str, **fields: Any) -> FlowRun:
    """Make a run by the address at which the server checks nothing."""
    deployment = read_deployment(name)
    body = {
        "flow_id": str(deployment.flow_id),
        "work_pool_name": deployment.work_pool_name,
        "state": {"type": "SCHEDULED"},
        "parameters": dict(deployment.parameters),
        "deployment_id": str(deployment.id),
    } | fields
    with get_client(sync_client=True) as client:
        made = client.request("POST", "/flow_runs/", json=body)
        return FlowRun.model_validate(made.json())


def test_job_variables_that_the_server_did_not_check_change_nothing(name: str) -> None:
    run = directly(name, job_variables=JOB_VARIABLES)
    assert run.job_variables == JOB_VARIABLES

    async def resolved() -> ProcessJobConfiguration:
        async with get_client() as client:
            pool = await client.read_work_pool(str(read_deployment(name).work_pool_name))
            return await ProcessJobConfiguration.resolve_for_flow_run(
                await client.read_flow_run(run.id), client=client, work_pool=pool, worker_name="worker"
            )

    found = asyncio.run(resolved())
    assert not found._command_configured
    assert found.working_dir is None
    assert "stranger" not in json.dumps(found.env)
    assert found.env.get("PYTHONPATH") == os.environ.get("PYTHONPATH")


@pytest.mark.slow
def test_a_worker_runs_nothing_of_a_callers(name: str, prefect_api: str, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "sitecustomize.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\n")
    theirs = {"command": f"touch {tmp_path / 'pwned'}", "env": {"PYTHONPATH": str(evil)}, "working_dir": str(evil)}
    runs = [
        directly(name, job_variables=theirs),
        directly(name, deployment_id=None, job_variables=theirs),
    ]
    env = os.environ | {
        "PREFECT_API_URL": prefect_api,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PYTHONPATH": str(ROOT),
    }
    pool = str(read_deployment(name).work_pool_name)
    worked = run_forked(PREFECT, "worker", "start", "--pool", pool, "--run-once", cwd=tmp_path, env=env, timeout=240)
    ended = [read_run(run.id).state for run in runs]
    assert not (tmp_path / "pwned").exists(), worked.stdout + worked.stderr
    assert [state is not None and state.is_completed() for state in ended] == [True, False], ended
