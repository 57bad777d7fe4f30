"""What `zeus-flows doctor` asks of MLflow and Prefect. Each question is bounded in time."""

from __future__ import annotations

from pathlib import Path

import httpx

from zeus_flows.gpu.doctor import Check, Status
from zeus_flows.masking import without_secrets
from zeus_flows.settings import read_settings

_TIMEOUT_S = 5.0


def mlflow_answers() -> Check:
    """Look at where runs would go, without a job file or a flag."""
    uri = read_settings().tracking()
    shown = without_secrets(uri)
    if uri.startswith(("http://", "https://")):
        return _ask("MLflow", f"{uri.rstrip('/')}/health", shown, "start it, or correct MLFLOW_TRACKING_URI")
    if uri.startswith("sqlite:///"):
        exists = Path(uri.removeprefix("sqlite:///")).exists()
        return Check("MLflow", Status.OK, shown if exists else f"{shown} (not there yet)", _RUNS_GO_THERE)
    return _database(uri, shown)


def prefect_answers() -> Check:
    """Look at the Prefect API that flow runs would report to."""
    url = read_settings().prefect_api_url
    if url is None:
        means = "flow runs use an ephemeral server in the process; schedules need a server"
        return Check("Prefect", Status.OK, "no PREFECT_API_URL", means, "prefect server start")
    shown = without_secrets(url)
    return _ask("Prefect", f"{url.rstrip('/')}/health", shown, "start it, or correct PREFECT_API_URL")


_RUNS_GO_THERE = "runs and the bandit's history go there"


def _ask(name: str, url: str, shown: str, todo: str) -> Check:
    try:
        answer = httpx.get(url, timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Check(name, Status.WARN, f"{shown} does not answer ({type(error).__name__})", _WITHOUT[name], todo)
    if answer.status_code >= 500:
        return Check(name, Status.WARN, f"{shown} answers {answer.status_code}", _WITHOUT[name], todo)
    return Check(name, Status.OK, f"{shown} answers", _RUNS_GO_THERE if name == "MLflow" else "flow runs go there")


_WITHOUT = {
    "MLflow": "a recurrence would run at the default batch size and deliver its records later",
    "Prefect": "no scheduled recurrence can start",
}


def _database(uri: str, shown: str) -> Check:
    from sqlalchemy import create_engine, text
    from sqlalchemy.exc import SQLAlchemyError

    arguments = {"connect_timeout": int(_TIMEOUT_S)} if uri.startswith("postgresql") else {}
    try:
        with create_engine(uri, connect_args=arguments).connect() as connection:
            connection.execute(text("select 1"))
    except (SQLAlchemyError, ImportError) as error:
        found = f"{shown} does not answer ({type(error).__name__})"
        return Check("MLflow", Status.WARN, found, _WITHOUT["MLflow"], "start it, or correct MLFLOW_TRACKING_URI")
    return Check("MLflow", Status.OK, f"{shown} answers", _RUNS_GO_THERE)
