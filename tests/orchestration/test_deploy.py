"""`zeus-flows deploy` against a real Prefect server: the plan, what is made, and what is left alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.orchestration.deployed_runs import ours, read_deployment, read_run, remove, run_here, start, zeus_flows
from tests.training_functions import write_job
from zeus_flows.orchestration.pools import process_template

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.xdist_group("prefect")]

ROOT = Path(__file__).parents[2]
NIGHTLY = ("--cron", "0 2 * * *", "--paused")


@pytest.fixture
def jobs(tmp_path: Path, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with two jobs, to which the user has gone; names and pool of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite_uri)
    folder = tmp_path / "jobs"
    folder.mkdir()
    for name in ("ranker", "tagger"):
        write_job(folder / f"{name}.yaml", name=f"{name}-{tmp_path.name}")
    yield folder
    remove(tmp_path)


@pytest.fixture
def pool() -> str:
    return f"pool-{uuid4().hex[:8]}"


def test_a_folder_of_jobs_is_deployed_once_and_left_alone_the_second_time(jobs: Path, pool: str) -> None:
    first = zeus_flows("deploy", jobs, *NIGHTLY, "--pool", pool)
    assert first.exit_code == 0, first.output
    name = f"recurrence/ranker-{jobs.parent.name}"
    assert f"create     work pool {pool}" in first.output
    assert f"create     {name}\n" in first.output
    assert "2 created, 0 updated, 0 unchanged" in first.output
    assert f"next: prefect worker start --pool {pool} --limit 1\n" in first.output
    made = read_deployment(name)
    assert made.entrypoint == "zeus_flows.orchestration.deployed.recurrence"
    assert made.parameters["job_file"] == "jobs/ranker.yaml"
    assert made.parameters["folder"] == str(jobs.parent)
    assert made.tags == ["zeus-flows", f"job:ranker-{jobs.parent.name}"]

    second = zeus_flows("deploy", jobs, *NIGHTLY, "--pool", pool)
    assert "0 created, 0 updated, 2 unchanged" in second.output
    assert read_deployment(name).updated == made.updated


def test_the_plan_says_what_would_change_and_a_dry_run_changes_nothing(jobs: Path, pool: str) -> None:
    assert zeus_flows("deploy", jobs, *NIGHTLY, "--pool", pool).exit_code == 0
    write_job(jobs / "ranker.yaml", name=f"ranker-{jobs.parent.name}", max_epochs=21)
    before = read_deployment(f"recurrence/ranker-{jobs.parent.name}")
    planned = zeus_flows("deploy", jobs, "--cron", "0 3 * * *", "--timezone", "Europe/Berlin", "--dry-run")
    assert f"digest: {before.parameters['digest'][:12]} -> " in planned.output
    assert planned.output.count("schedule: 0 2 * * * UTC -> 0 3 * * * Europe/Berlin\n") == 2
    assert planned.output.endswith("nothing was changed: this was a dry run\n")
    assert read_deployment(f"recurrence/ranker-{jobs.parent.name}").updated == before.updated

    done = json.loads(zeus_flows("deploy", jobs, "--json").output)
    assert [(d["change"], sorted(d["differences"])) for d in done["deployments"]] == [
        ("update", ["digest"]),
        ("unchanged", []),
    ]


def test_what_is_not_said_stays_as_it_is(jobs: Path, pool: str) -> None:
    assert zeus_flows("deploy", jobs, *NIGHTLY, "--pool", pool).exit_code == 0
    assert "2 unchanged" in zeus_flows("deploy", jobs).output
    assert "paused: True -> False" in zeus_flows("deploy", jobs, "--not-paused").output


def test_a_janitor_may_have_a_pool_of_its_own_and_stays_there(jobs: Path, pool: str) -> None:
    said = zeus_flows("deploy", jobs, *NIGHTLY, "--pool", pool, "--janitor-pool", f"{pool}-janitor")
    assert f"create     work pool {pool}-janitor" in said.output
    assert f"next: prefect worker start --pool {pool}-janitor" in said.output
    assert read_deployment(f"janitor/{pool}").work_pool_name == f"{pool}-janitor"
    again = json.loads(zeus_flows("deploy", jobs, "--json").output)
    assert again["janitors"] == [{"pool": pool, "runs_in": f"{pool}-janitor", "change": "unchanged"}]
    assert "update" in zeus_flows("deploy", jobs, "--janitor-pool", pool).output
    assert read_deployment(f"janitor/{pool}").work_pool_name == pool


def test_what_somebody_changed_by_hand_is_put_right(jobs: Path, pool: str) -> None:
    assert zeus_flows("deploy", jobs, *NIGHTLY, "--pool", pool).exit_code == 0
    found = read_deployment(f"recurrence/tagger-{jobs.parent.name}")
    with get_client(sync_client=True) as client:
        body = {"parameters": {**found.parameters, "job_file": "/etc/passwd"}, "enforce_parameter_schema": False}
        client.request("PATCH", f"/deployments/{found.id}", json=body)  # type: ignore[arg-type]
    done = zeus_flows("deploy", jobs)
    assert "job_file: /etc/passwd -> jobs/tagger.yaml" in done.output
    assert read_deployment(f"recurrence/tagger-{jobs.parent.name}").enforce_parameter_schema


def test_all_bad_files_are_named_before_anything_is_changed(jobs: Path, pool: str) -> None:
    write_job(jobs / "second.yaml", name=f"ranker-{jobs.parent.name}")
    write_job(jobs / "typo.yaml", batch_size=[1])
    (jobs / "broken.yml").write_text("name: [")
    done = zeus_flows("deploy", jobs, "--pool", pool)
    assert done.exit_code == 2
    for named in ("broken.yml:1: not valid YAML", "typo.yaml", "ranker.yaml, ", "nothing was deployed"):
        assert named in done.output
    with get_client(sync_client=True) as client:
        assert ours(jobs.parent) == []
        assert pool not in {found.name for found in client.read_work_pools()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cron", "0 2 * *"), "--cron: Invalid cron"),
        (("--cron", "0 2 * * *", "--timezone", "Mars"), "--timezone"),
        (("--tracking-uri", "https://me:hunter2@mlflow.example"), "--tracking-uri holds a secret"),
    ],
)
def test_flags_are_checked_before_anything_is_changed(jobs: Path, pool: str, words: tuple[str, ...], said: str) -> None:
    done = zeus_flows("deploy", jobs, "--paused", "--pool", pool, *words)
    assert done.exit_code == 2
    assert said in done.output
    assert "hunter2" not in done.output
    assert ours(jobs.parent) == []


def test_no_password_of_the_environment_is_pinned(jobs: Path, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter2@mlflow.example")
    done = zeus_flows("deploy", jobs, "--paused", "--pool", pool)
    assert "tracking_uri: https://mlflow.example\n" in done.output
    assert "2 created" in done.output
    assert "hunter2" not in done.output + str([deployment.model_dump() for deployment in ours(jobs.parent)])


def test_without_a_server_it_says_what_to_type(jobs: Path) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        none = zeus_flows("deploy", jobs)
    assert none.exit_code == 2
    assert "prefect server start" in none.output
    assert "prefect config set PREFECT_API_URL=" in none.output
    with temporary_settings({PREFECT_API_URL: "http://me:hunter2@127.0.0.1:9/api"}):
        away = zeus_flows("deploy", jobs)
    assert away.exit_code == 2
    assert "Prefect at http://127.0.0.1:9/api does not answer" in away.output


def test_a_run_is_named_after_job_and_number_and_works_in_the_folder_of_its_deployment(
    jobs: Path, pool: str, sqlite_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert zeus_flows("deploy", jobs / "ranker.yaml", "--pool", pool).exit_code == 0
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    job = f"ranker-{jobs.parent.name}"
    run = start(f"recurrence/{job}")
    assert run_here(run).is_completed()
    done = read_run(run.id)
    assert done.name == f"{job} #1"
    assert set(done.tags) == {"zeus-flows", f"job:{job}"}
    assert done.parameters["job_file"] == "jobs/ranker.yaml"
    client = MlflowClient(tracking_uri=sqlite_uri)
    experiment = client.get_experiment_by_name(job)
    assert experiment is not None
    (attempt,) = client.search_runs([experiment.experiment_id], "tags.`zf.kind` = 'attempt'")
    assert attempt.data.tags["zf.prefect.flow_run_name"] == f"{job} #1"


def test_a_job_file_that_changed_on_disk_is_refused_until_it_is_deployed_again(jobs: Path, pool: str) -> None:
    assert zeus_flows("deploy", jobs, "--pool", pool).exit_code == 0
    name = f"ranker-{jobs.parent.name}"
    write_job(jobs / "ranker.yaml", name=name, max_epochs=30)
    refused = run_here(start(f"recurrence/{name}"))
    assert refused.is_failed()
    assert "has changed since it was deployed" in str(refused.message)
    assert f"type `zeus-flows deploy jobs/ranker.yaml` in {jobs.parent}" in str(refused.message)
    assert zeus_flows("deploy", "jobs/ranker.yaml").exit_code == 0
    assert run_here(start(f"recurrence/{name}")).is_completed()


def test_a_drift_experiment_is_deployed_as_such(jobs: Path, pool: str) -> None:
    done = zeus_flows("deploy", ROOT / "deployments/experiments/flights.yaml", "--pool", pool)
    assert "create     capriccio/capriccio-flights" in done.output
    made = read_deployment("capriccio/capriccio-flights")
    assert made.entrypoint == "zeus_flows.orchestration.deployed.capriccio"
    assert made.parameters["experiment_file"] == str(ROOT / "deployments/experiments/flights.yaml")


def test_the_pools_template_is_in_the_repository_and_in_the_package(jobs: Path, pool: str) -> None:
    assert json.loads((ROOT / "deployments/pools/process.json").read_text()) == process_template()
    assert zeus_flows("deploy", jobs, "--pool", pool).exit_code == 0
    with get_client(sync_client=True) as client:
        assert client.read_work_pool(pool).base_job_template == process_template()


def test_what_workers_run_is_not_served_as_well(jobs: Path, pool: str) -> None:
    assert zeus_flows("deploy", jobs, "--pool", pool).exit_code == 0
    refused = zeus_flows("serve", jobs)
    assert refused.exit_code == 2
    assert f"is deployed to the work pool {pool}, whose workers run it" in refused.output


def test_the_next_runs_have_names_before_they_begin(jobs: Path, pool: str) -> None:
    job = f"ranker-{jobs.parent.name}"
    assert zeus_flows("deploy", jobs / "ranker.yaml", "--cron", "0 2 * * *", "--pool", pool).exit_code == 0
    with get_client(sync_client=True) as client:
        of_job = DeploymentFilter(id=DeploymentFilterId(any_=[read_deployment(f"recurrence/{job}").id]))
        names = {run.name for run in client.read_flow_runs(deployment_filter=of_job)}
    assert len(names) >= 3
    assert all(re.fullmatch(rf"{job} \d{{4}}-\d\d-\d\d 02:00", name) for name in names)
