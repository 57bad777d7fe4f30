"""A schedule neither wedges nor floods: missed runs lead to one, and what has died holds no slot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.events import emit_event
from prefect.states import Pending, Running

from tests.orchestration.deployed_runs import read_deployment, read_run, remove, run_here, start, zeus_flows
from tests.processes import PREFECT, Forked
from tests.training_functions import write_job
from zeus_flows.ledger.lease import this_process
from zeus_flows.orchestration import slots, superseding
from zeus_flows.orchestration.deployed import janitor
from zeus_flows.orchestration.slots import HEARTBEAT, HOLDER

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.xdist_group("prefect")]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def name(tmp_path: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A job, deployed to run every hour."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite_uri)
    job = f"hourly-{uuid4().hex[:8]}"
    write_job(tmp_path / "job.yaml", name=job)
    made = zeus_flows("deploy", "job.yaml", "--cron", "0 * * * *", "--pool", f"pool-{job}")
    assert made.exit_code == 0, made.output
    yield f"recurrence/{job}"
    remove(tmp_path)


def missed(name: str, runs: int) -> list[FlowRun]:
    """Let Prefect schedule the runs that would have been due in the last hours; return them, the oldest first."""
    now = datetime.now(UTC)
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(name)
        span = {
            "start_time": str(now - timedelta(hours=runs)),
            "end_time": str(now),
            "min_runs": runs,
            "max_runs": runs,
        }
        client.request("POST", f"/deployments/{deployment.id}/schedule", json=span)  # type: ignore[arg-type]
        due = superseding._due(client, deployment.id)
    found = sorted((run for run in due if run.auto_scheduled), key=lambda run: str(run.expected_start_time))
    assert len(found) == runs
    return found


def states(runs: list[FlowRun]) -> list[str]:
    return [str(read_run(run.id).state_name) for run in runs]


def test_thirty_missed_runs_lead_to_one(name: str) -> None:
    late = missed(name, 30)
    first = run_here(late[0])
    assert (first.name, first.is_cancelled()) == ("Superseded", True)
    assert "a newer run of this deployment was due at" in str(first.message)
    assert states(late[:-1]) == ["Superseded"] * 29
    assert run_here(late[-1]).is_completed()
    assert read_run(late[-1].id).name == f"{name.partition('/')[2]} #1"


def test_a_run_that_somebody_asked_for_is_never_superseded(name: str) -> None:
    backfill = [start(name) for _ in range(2)]
    (scheduled,) = missed(name, 1)
    assert [run_here(run).is_completed() for run in (*backfill, scheduled)] == [True] * 3


def test_the_newest_run_goes_on_and_ends_those_before_it(name: str) -> None:
    older, newest = missed(name, 2)
    assert run_here(newest).is_completed()
    assert states([older]) == ["Superseded"]


def test_the_janitor_closes_what_has_died_and_leaves_the_living_alone(name: str) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    gone, alive, silent = start(name), start(name), start(name)
    waiting = missed(name, 3)
    with get_client(sync_client=True) as client:
        for run, holder in (
            (gone, replace(this_process(), pid=dead.pid, started=1)),
            (alive, this_process()),
            (silent, replace(this_process(), host="elsewhere")),
        ):
            client.set_flow_run_state(run.id, Running(), force=True)
            client.update_flow_run_labels(run.id, {HOLDER: holder.dump()})

    janitor()

    assert states([gone, alive, silent]) == ["Crashed", "Running", "Running"]
    assert f"process {dead.pid} on" in str(read_run(gone.id).state)
    assert states(waiting[:2]) == ["Superseded", "Superseded"]
    assert read_run(waiting[2].id).state_name != "Superseded"


def test_a_run_elsewhere_is_dead_when_its_heartbeats_have_stopped_and_one_that_never_began_after_a_while(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beating, quiet, starting = start(name), start(name), start(name)
    with get_client(sync_client=True) as client:
        for run in (beating, quiet):
            client.set_flow_run_state(run.id, Running(), force=True)
            client.update_flow_run_labels(run.id, {HOLDER: replace(this_process(), host="elsewhere").dump()})
        client.set_flow_run_state(starting.id, Pending())
        emit_event(HEARTBEAT, resource={"prefect.resource.id": f"prefect.flow-run.{beating.id}"})
        wait_for(lambda: slots._last_heard(client, beating.id)[1] is not None)
    janitor()
    assert states([beating, quiet, starting]) == ["Running", "Running", "Pending"]
    monkeypatch.setattr(slots, "DEAD_AFTER_S", -1.0)  # as if that time had passed
    monkeypatch.setattr(slots, "_PENDING_TOO_LONG_S", -61.0)
    janitor()
    assert states([beating, quiet, starting]) == ["Crashed", "Running", "Crashed"]  # `quiet` never sent one


@pytest.mark.slow
def test_a_killed_run_frees_its_slot_and_the_next_one_begins(
    name: str, prefect_api: str, tmp_path: Path, sqlite_uri: str
) -> None:
    write_job(tmp_path / "job.yaml", "endless", name=name.partition("/")[2], max_epochs=10_000)
    assert zeus_flows("deploy", "job.yaml").exit_code == 0
    env = os.environ | {
        "PREFECT_API_URL": prefect_api,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PYTHONPATH": str(ROOT),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }
    words = ("worker", "start", "--pool", str(read_deployment(name).work_pool_name))
    killed = start(name)
    worker = Forked(PREFECT, *words, cwd=tmp_path, env=env, leads=True)
    try:
        wait_for(lambda: HOLDER in read_run(killed.id).labels)
        os.killpg(worker.pid, signal.SIGKILL)
        holder = json_of(read_run(killed.id))
        with suppress(ProcessLookupError):
            os.kill(holder["pid"], signal.SIGKILL)
        write_job(tmp_path / "job.yaml", name=name.partition("/")[2])
        assert zeus_flows("deploy", "job.yaml").exit_code == 0
        following = start(name)
        worker = Forked(PREFECT, *words, cwd=tmp_path, env=env, leads=True)
        wait_for(lambda: read_run(following.id).state_name == "Completed")
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
    with get_client(sync_client=True) as client:
        pools_janitor = client.read_deployment_by_name(f"janitor/{words[-1]}")
        by_automation = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[pools_janitor.id]))
        )
    assert "Completed" in {run.state_name for run in by_automation}
    assert read_run(killed.id).state_name == "Crashed"
    assert "declared dead by zeus_flows" in str(read_run(killed.id).state)


def json_of(run: FlowRun) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(run.labels[HOLDER]))
    return found


def wait_for(done: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.5)
