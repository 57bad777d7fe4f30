"""Where a tracking URI points, told without its secrets. Imports no MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from zeus_flows.settings import workspace


def may_exist(tracking_uri: str) -> bool:
    """Return whether there can be runs: asking MLflow would make a missing sqlite file.

    >>> may_exist("sqlite:////no/such/folder/mlflow.db"), may_exist("https://mlflow.example.org")
    (False, True)
    """
    return not tracking_uri.startswith("sqlite:///") or Path(tracking_uri.removeprefix("sqlite:///")).exists()


def location(tracking_uri: str) -> str:
    """Return where a tracking URI points: the same from every folder, without user, password or options.

    A server's workspace is part of it: what waits for one must never be delivered to another.

    >>> location("postgresql://me:secret@db:5432/mlflow?password=secret")
    'postgresql://db:5432/mlflow'
    >>> location("postgresql://me@/mlflow?host=/run/postgresql&sslmode=disable")
    'postgresql:///mlflow?host=/run/postgresql'
    """
    parts = urlsplit(tracking_uri)
    if parts.scheme.startswith("sqlite"):
        path = tracking_uri.partition("///")[2].partition("?")[0]
        return f"{parts.scheme}:///{Path(path).absolute()}"
    socket = [f"{name}={value}" for name, value in parse_qsl(parts.query) if name in ("host", "port")]
    if not parts.netloc:
        return parts.path
    inside = f"#{workspace(tracking_uri)}" if workspace(tracking_uri) else ""
    where = (parts.scheme, "://", parts.netloc.rpartition("@")[2], parts.path, *("?" + s for s in socket), inside)
    return "".join(where)


def ledger_key(tracking_uri: str, job: str) -> str:
    """Return what names a store and a job, without secrets."""
    return key_of(location(tracking_uri), job)


def key_of(place: str, job: str) -> str:
    """Return what names a job in a store whose location is known.

    >>> key_of("https://mlflow.example.org", "nightly")
    '["https://mlflow.example.org", "nightly"]'
    """
    return json.dumps([place, job])
