"""Where a run can be looked at, and what to type to look."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from zeus_flows.ledger.mlflow.views import SavedView
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


def view_url(tracking_uri: str, experiment_id: str, views: Sequence[SavedView]) -> str:
    """Return the address of the first of the views that are installed; of the runs where none is.

    MLflow leads elsewhere, and does not say so, where an address names a view that is not there.

    >>> from zeus_flows.ledger.mlflow.views import all_views
    >>> view_url("sqlite:///mlflow.db", "1", all_views(joules=True))
    'http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey=zf-recurrences'
    >>> view_url("https://mlflow.example", "1", ())
    'https://mlflow.example/#/experiments/1/runs'
    """
    base, within = experiment_url(tracking_uri, experiment_id), _workspace(tracking_uri)
    if not views:
        return f"{base}/runs" + (f"?{within}" if within else "")
    return base.partition("#")[0] + views[0].address(experiment_id) + (f"&{within}" if within else "")


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
