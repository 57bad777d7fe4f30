"""The command line as an attacker meets it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import ZEUS_FLOWS, run_forked

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _no_secret_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test begin with nothing to mask but what it says."""
    monkeypatch.setattr("zeus_flows.masking._known", frozenset())


@pytest.fixture
def zeus_flows(prefect_api: str, sqlite_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """`zeus-flows` in a process of its own, with the session's Prefect server and an MLflow database of its own."""
    common = {"PREFECT_API_URL": prefect_api, "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect"))}

    def run(*words: str, cwd: Path, timeout: float = 300.0, **env: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | common | {"MLFLOW_TRACKING_URI": sqlite_uri} | env
        return run_forked(ZEUS_FLOWS, *words, cwd=cwd, env=environment, timeout=timeout)

    return run
