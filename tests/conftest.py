"""What every test starts from: no telemetry, no state outside the test's folder, one Prefect server per session."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.ledger.servers import (  # noqa: F401  fixtures: servers are started once for all who want them
    _server_with_authentication,
    postgres_uri,
    server_on_postgres,
    server_on_sqlite,
    server_with_authentication,
)
from tests.prefect_server import end_server, locked, standing_server

os.environ.update(
    {
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "OMP_NUM_THREADS": "1",  # tests run in as many processes as there are cores, and their tensors are tiny
    }
)
for _name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "CUDA_VISIBLE_DEVICES"):
    os.environ.pop(_name, None)

# How fast an example runs says nothing here: machines that test are busy. Hypothesis's own `ci` would run the same
# examples for ever; `--hypothesis-seed` repeats those of a run, and a failure prints how to repeat it alone.
settings.register_profile("ci", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("ci")

#: Fixtures that take seconds to make.
HEAVY = frozenset({"_migrated_database", "postgres_uri", "prefect_api"})
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


_SESSION = pytest.StashKey[Path]()
_CONTROLLER = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a state directory of its own."""
    monkeypatch.setenv("ZEUS_FLOWS_STATE_DIR", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="session")
def _migrated_database(request: pytest.FixtureRequest) -> Path:
    """An empty MLflow database: its migrations take seconds, a copy takes none."""
    from mlflow import MlflowClient

    path = request.config.stash[_SESSION] / "empty.db"
    with locked(path.with_suffix(".lock")):
        if not path.exists():
            MlflowClient(tracking_uri=f"sqlite:///{path.with_suffix('.new')}").search_experiments(max_results=1)
            shutil.copy(path.with_suffix(".new"), path)
    return path


@pytest.fixture
def sqlite_uri(_migrated_database: Path, tmp_path: Path) -> str:
    """Where a test's MLflow runs go."""
    path = tmp_path / "mlflow.db"
    shutil.copy(_migrated_database, path)
    return f"sqlite:///{path}"


def pytest_configure(config: pytest.Config) -> None:
    """Choose a folder for what all processes of a session share, or take the one that the controlling one chose."""
    told: dict[str, Any] = getattr(config, "workerinput", {})
    config.stash[_CONTROLLER] = told.get("controller") or os.getpid()
    config.stash[_SESSION] = Path(told.get("session") or tempfile.mkdtemp(prefix="zeus-flows-tests-"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell one of xdist's processes where that folder is."""
    node.workerinput.update(session=str(node.config.stash[_SESSION]), controller=node.config.stash[_CONTROLLER])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs MLflow's tables, a server or another process: `make unit` does without."""
    for item in items:
        if not HEAVY.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave all that was imported out of garbage collections, of which trainers ask for full ones."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the server with the session, which is the controlling process's to do."""
    if not hasattr(config, "workerinput"):
        end_server(config.stash[_SESSION])
        shutil.rmtree(config.stash[_SESSION], ignore_errors=True)


@pytest.fixture(scope="session")
def prefect_api(request: pytest.FixtureRequest) -> str:
    """The address of the session's Prefect server, for processes that a test starts."""
    return standing_server(request.config.stash[_SESSION], session=request.config.stash[_CONTROLLER])


@pytest.fixture(scope="session")
def prefect_server(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Let flows of this process report to the session's Prefect server; yield its address."""
    from prefect.context import _temporary_global_settings_context, get_settings_context
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    ours = {PREFECT_API_URL: prefect_api, PREFECT_HOME: tmp_path_factory.mktemp("prefect")}
    with temporary_settings(ours), _temporary_global_settings_context(get_settings_context()):
        yield prefect_api
