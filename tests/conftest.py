"""What every test starts from: no telemetry, no state outside the test's folder, one Prefect server per session."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.ledger.servers import (  # noqa: F401  fixtures: servers are started once for all who want them
    _server_with_authentication,
    postgres_uri,
    server_on_postgres,
    server_on_sqlite,
    server_with_authentication,
)

os.environ.update(
    {
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    }
)
for _name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "CUDA_VISIBLE_DEVICES"):
    os.environ.pop(_name, None)

# How fast an example runs says nothing here: machines that test are busy.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a state directory of its own."""
    monkeypatch.setenv("ZEUS_FLOWS_STATE_DIR", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="session")
def _migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database: its migrations take seconds, a copy takes none."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments(max_results=1)
    return path


@pytest.fixture
def sqlite_uri(_migrated_database: Path, tmp_path: Path) -> str:
    """Where a test's MLflow runs go."""
    path = tmp_path / "mlflow.db"
    shutil.copy(_migrated_database, path)
    return f"sqlite:///{path}"


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Run flows against a temporary Prefect server; starting one takes seconds, so it serves the whole session."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield
