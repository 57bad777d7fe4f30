"""A cold start: Prefect's server starts once, and only where none is configured, while the rest is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE, temporary_settings

from zeus_flows.cli import running
from zeus_flows.orchestration import ephemeral_server
from zeus_flows.orchestration.ephemeral_server import start_server


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts of a server that would have been, by the thread that made them."""
    found: list[str] = []
    monkeypatch.setattr(SubprocessASGIServer, "start", lambda _: found.append(threading.current_thread().name))
    monkeypatch.setattr(ephemeral_server, "end_server_with_us", lambda: None)
    return found


def test_a_server_that_is_configured_is_used_and_none_is_started(started: list[str]) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4200/api", PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}):
        start_server()()
    assert started == []


def test_none_is_started_where_prefect_may_not(started: list[str]) -> None:
    with temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}, restore_defaults={PREFECT_API_URL}):
        start_server()()
    assert started == []


def test_a_server_is_started_beside_the_caller(started: list[str]) -> None:
    with temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}, restore_defaults={PREFECT_API_URL}):
        start_server()()
    assert started == ["zeus-flows-prefect-start"]


def test_a_server_that_does_not_start_is_left_for_the_flow_to_tell(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: SubprocessASGIServer) -> None:
        raise RuntimeError("no port")

    monkeypatch.setattr(SubprocessASGIServer, "start", broken)
    with temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: True}, restore_defaults={PREFECT_API_URL}):
        start_server()()
    assert started == []


def test_what_is_heavy_is_loaded_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def starting() -> Callable[[], None]:
        done.append("start")
        return lambda: done.append("wait")

    monkeypatch.setattr(ephemeral_server, "start_server", starting)
    monkeypatch.setattr(running, "import_module", done.append)
    running._warm_up("sqlite:///mlflow.db")
    assert (done[0], done[-1]) == ("start", "wait")
    assert "zeus_flows.orchestration.recurrence_flow" in done
    assert "mlflow.store.tracking.sqlalchemy_store" in done
