"""Native to Prefect, on a real server: ready automations, a block for shared settings, an entry point that is found."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml
from prefect import flow
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.events.schemas.events import Event
from prefect.plugins import load_prefect_collections
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Scheduled
from prefect.types._datetime import now
from pydantic import SecretStr

from tests.training_functions import write_job
from zeus_flows.cli.report_commands import _tariff
from zeus_flows.core.job import Job
from zeus_flows.job_file import load_job
from zeus_flows.orchestration import events
from zeus_flows.orchestration.blocks import ZeusFlowsSettings, shared_prices, shared_settings
from zeus_flows.orchestration.events import Happening, resource_of, tell_models
from zeus_flows.orchestration.next_runs import next_runs
from zeus_flows.training.promotion import Promoted

ROOT = Path(__file__).parents[2]
PLANTED = "planted-Secret-67890"
FILES = sorted((ROOT / "deployments/automations").glob("*.yaml"))

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.xdist_group("prefect")]


@pytest.fixture
def api(prefect_api: str) -> Iterator[httpx.Client]:
    """The server's API; automations that a test makes there go with it."""
    with httpx.Client(base_url=prefect_api, timeout=20) as client:
        yield client
        for automation in client.post("/automations/filter", json={}).json():
            client.delete(f"/automations/{automation['id']}").raise_for_status()


def installed(api: httpx.Client, file: Path, block_id: str) -> dict[str, Any]:
    """Install an automation as the guide says; return it as the server has it."""
    text = file.read_text(encoding="utf-8").replace("NOTIFICATION_BLOCK_ID", block_id)
    answer = api.post("/automations/", json=yaml.safe_load(text))
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = api.get(f"/automations/{answer.json()['id']}").json()
    return found


def test_every_ready_automation_is_taken_by_a_server_and_expects_events_that_we_send(api: httpx.Client) -> None:
    assert [file.stem for file in FILES] == ["alert", "news", "pause-failing"]
    expected = set[str]()
    for file in FILES:
        automation = installed(api, file, str(uuid4()))
        expected |= set(automation["trigger"]["expect"])
        assert automation["trigger"]["match"] == {"prefect.resource.id": "zeus-flows.job.*"}
    ours = {str(happening) for happening in Happening}
    assert expected == ours - {Happening.DECIDED, Happening.STOPPED_EARLY}, "those two are no news"


@pytest.mark.slow
def test_a_job_that_fails_three_times_is_paused(api: httpx.Client) -> None:
    @flow(name=f"recurrence-{uuid4().hex[:8]}")
    def recurs() -> None:
        pass

    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(recurs), name="nightly")
    installed(api, next(file for file in FILES if file.stem == "pause-failing"), "")
    for recurrence in range(1, 4):
        assert api.get(f"/deployments/{deployment}").json()["paused"] is False
        failed = Event(
            event=str(Happening.FAILED),
            resource=resource_of("nightly"),
            related=[
                {"prefect.resource.id": f"prefect.deployment.{deployment}", "prefect.resource.role": "deployment"}
            ],
            payload={"job": "nightly", "recurrence": recurrence, "text": "not reached"},
        )
        api.post("/events", json=[failed.model_dump(mode="json")]).raise_for_status()
    give_up = time.monotonic() + 120
    while not api.get(f"/deployments/{deployment}").json()["paused"]:
        assert time.monotonic() < give_up, "three failures did not pause the deployment"
        time.sleep(1)
    api.delete(f"/deployments/{deployment}").raise_for_status()


def test_a_fleet_shares_settings_by_a_block_and_a_workers_own_environment_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ZEUS_FLOWS_STATE_DIR")
    assert shared_settings().tracking_uri is None
    stated = {"tracking_uri": "postgresql://me:planted-Secret-12345@db/mlflow", "state_dir": str(tmp_path)}
    prices = {"per_kwh": 0.28, "currency": "EUR", "carbon_g_per_kwh": 380.0}
    assert shared_prices() == {}
    block = ZeusFlowsSettings.model_validate({**stated, **prices, "zeusd_token": SecretStr(PLANTED)})
    assert "planted" not in repr(block)
    saved = block.save("shared")
    try:
        found = shared_settings()
        assert (found.tracking_uri, found.state_dir) == (stated["tracking_uri"], tmp_path)
        assert found.zeusd_token == PLANTED
        assert shared_prices() == prices
        tariff = _tariff(load_job(write_job(tmp_path / "job.yaml")), tmp_path / "job.yaml", None)
        assert (tariff.flat.per_kwh, tariff.currency, tariff.flat.carbon_g_per_kwh) == tuple(prices.values())
        own = load_job(write_job(tmp_path / "job.yaml", prices={"carbon_g_per_kwh": 20}))
        tariff = _tariff(own, tmp_path / "job.yaml", None)
        assert (tariff.flat.per_kwh, tariff.flat.carbon_g_per_kwh) == (None, 20.0)
        with temporary_settings(restore_defaults={PREFECT_API_URL}):
            assert shared_prices() == {}
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
        assert shared_settings().tracking_uri == "sqlite:///mine.db"
    finally:
        Block.delete("zeus-flows-settings/shared")
    assert saved is not None
    assert shared_settings().zeusd_token is None


def test_a_fleet_is_told_when_its_jobs_run_next() -> None:
    @flow(name=f"recurrence-{uuid4().hex[:8]}")
    def recurs() -> None:
        pass

    job, soon = f"nightly-{uuid4().hex[:8]}", now("UTC") + timedelta(hours=3)
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(recurs), name=job, tags=["zeus-flows", f"job:{job}"])
        for at in (soon + timedelta(days=1), soon):
            client.create_flow_run_from_deployment(
                deployment, state=Scheduled(scheduled_time=at), tags=["zeus-flows", f"job:{job}"]
            )
        found = next_runs()
        client.delete_deployment(deployment)
    assert found is not None
    assert abs((found[job] - soon).total_seconds()) < 1
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert next_runs() is None, "a server that does not answer leaves it unknown"


def test_prefect_finds_the_package_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, module),) = project["entry-points"]["prefect.collections"].items()
    metadata = tmp_path / "zeus_flows_as_built-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: zeus-flows-as-built\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[prefect.collections]\n{name} = {module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = load_prefect_collections(reload=True)[name]
    assert getattr(found, "ZeusFlowsSettings", None) is ZeusFlowsSettings, found


def test_promotions_and_refusals_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[tuple[str, str]]()
    monkeypatch.setattr(events, "emit_event", lambda *, event, resource, payload: told.append((event, payload["text"])))
    job = Job("nightly", (8, 16), 8, 1)
    tell_models(job, Promoted(lines=("nothing",)), 3)
    tell_models(job, Promoted(refused=("version 2 is refused: worse",)), 4)
    assert told == [("zeus-flows.not-promoted", "version 2 is refused: worse")]
