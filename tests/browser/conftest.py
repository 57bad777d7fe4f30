"""A job that recurred, the servers that show it, and a browser: each made once for all tests that look."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tests.ledger.servers import mlflow_server
from tests.training_functions import write_job

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

ROOT = Path(__file__).resolve().parents[2]
#: Where pictures of every page go, for people to look at.
PICTURES = ROOT / "build" / "screenshots"
RECURRENCES = 12
RUN = "from zeus_flows.cli import main; main()"
#: As tests find it, and on a machine of any kind: no sandbox for root, no calls home.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def chromium() -> str:
    """Return the browser's path, or skip: tests download none."""
    pytest.importorskip("playwright", reason="playwright is not installed: pip install -e '.[dev]'")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    return found


@dataclass(frozen=True)
class Shown:
    """A job that recurred, and where it is shown.

    Attributes:
        path: Its job file.
        uri: Its database.
        mlflow: MLflow's server.
        prefect: Prefect's pages.
        printed: What the command printed.
        attempts: The runs of its attempts, newest first.
    """

    path: Path
    uri: str
    mlflow: str
    prefect: str
    printed: str
    attempts: tuple[Run, ...]


@pytest.fixture(scope="session")
def job(_migrated_database: Path, prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """A cheap job of a few recurrences, run as people run it, on servers that show it."""
    chromium()
    folder = tmp_path_factory.mktemp("shown")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    shutil.copy(_migrated_database, folder / "mlflow.db")
    path = write_job(folder / "job.yaml", "noisy", max_epochs=12)
    environ = {**os.environ, "PREFECT_API_URL": prefect_api, "ZEUS_FLOWS_STATE_DIR": str(folder / "state")}
    environ |= {"PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    command = [sys.executable, "-c", RUN, "run", str(path), "--recurrences", str(RECURRENCES)]
    done = subprocess.run(
        [*command, "--tracking-uri", uri], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with mlflow_server(uri, folder) as mlflow:
        attempts = MlflowClient(tracking_uri=uri).search_runs(["1"], "tags.`zf.kind` = 'attempt'")
        yield Shown(path, uri, mlflow, prefect_api.removesuffix("/api"), done.stdout, tuple(attempts))


@pytest.fixture(scope="session")
def browser() -> Iterator[BrowserContext]:
    """A browser with a folder of its own."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        context = play.chromium.launch_persistent_context(
            folder, executable_path=path, args=FLAGS, viewport={"width": 1600, "height": 1000}
        )
        context.set_default_timeout(30_000)
        yield context
        context.close()


@pytest.fixture
def page(browser: BrowserContext, request: pytest.FixtureRequest) -> Iterator[Page]:
    """An empty page, of which a picture is kept when the test is done with it."""
    page = browser.new_page()
    yield page
    name = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")
    page.screenshot(path=PICTURES / f"{name[:80]}.png")
    page.close()
