"""Where a run can be looked at, and what to type to look."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from urllib.parse import quote

from zeus_flows.ledger.mlflow import names
from zeus_flows.ledger.mlflow.names import RunKind
from zeus_flows.ledger.mlflow.query import having
from zeus_flows.masking import without_secrets
from zeus_flows.settings import workspace

#: Where `mlflow ui` listens unless told otherwise.
LOCAL_UI = "http://127.0.0.1:5000"


def run_url(tracking_uri: str, experiment_id: str) -> str:
    """Return a template for the address of a run's page, with `{run_id}` to be filled in.

    >>> run_url("sqlite:///mlflow.db", "1")
    'http://127.0.0.1:5000/#/experiments/1/runs/{run_id}'
    """
    within = f"?{_workspace(tracking_uri)}" if _workspace(tracking_uri) else ""
    return f"{experiment_url(tracking_uri, experiment_id)}/runs/{{run_id}}{within}"


def experiment_url(tracking_uri: str, experiment_id: str) -> str:
    """Return the address of an experiment's page, which needs no option of the tracking URI.

    >>> experiment_url("https://bob:pw@mlflow.example/base?token=t", "1")
    'https://mlflow.example/base/#/experiments/1'
    """
    base = without_secrets(tracking_uri).partition("?")[0].rstrip("/") if _is_server(tracking_uri) else LOCAL_UI
    return f"{base}/#/experiments/{experiment_id}"


def series_url(tracking_uri: str, experiment_id: str) -> str:
    """Return the address of the charts over recurrences: the drift windows' runs, drawn as lines."""
    only_windows = quote(having({names.KIND: RunKind.DRIFT_WINDOW}))
    within = f"&{_workspace(tracking_uri)}" if _workspace(tracking_uri) else ""
    page = f"{experiment_url(tracking_uri, experiment_id)}/runs"
    return f"{page}?searchFilter={only_windows}&compareRunsMode=CHART{within}"


def ui_command(tracking_uri: str) -> str | None:
    """Return the command that opens the MLflow UI; None where a server shows it already."""
    if _is_server(tracking_uri):
        return None
    return f"{_mlflow()} ui --backend-store-uri {without_secrets(tracking_uri)}"


def _mlflow() -> str:
    """Return what to type for `mlflow`: its path beside this Python where the shell would not find it."""
    beside = Path(sys.executable).with_name("mlflow")
    if shutil.which("mlflow") or not beside.exists():
        return "mlflow"
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


def _workspace(tracking_uri: str) -> str:
    """Return what an address says of a server's workspace, as MLflow writes it; empty where there is none."""
    return f"workspace={quote(workspace(tracking_uri))}" if workspace(tracking_uri) else ""


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))
