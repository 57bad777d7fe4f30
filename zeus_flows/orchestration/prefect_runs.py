"""What is asked of Prefect about flow runs, what it is told of them, and what it need not print."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL
from prefect.states import Crashed

from zeus_flows.errors import PrefectUnavailable
from zeus_flows.masking import without_secrets

log = logging.getLogger(__name__)

#: How Prefect's client says that nobody is there.
_NO_ANSWER: Final = ("Failed to reach API", "Timed out while attempting to connect")


def flow_run_ended(flow_run_id: str) -> bool:
    """Return whether Prefect says that a flow run is over; False where it does not answer or does not know it."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run_id)).state
    except (ObjectNotFound, ValueError, httpx.HTTPError):
        return False
    return state is not None and state.is_final()


def bury_flow_run(flow_run_id: str, why: str) -> None:
    """Tell Prefect that a flow run crashed, so that it holds no slot; nothing where it is over or not known."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run_id)).state
            if state is None or not state.is_final():
                message = f"declared dead by zeus_flows: {why}"
                client.set_flow_run_state(UUID(flow_run_id), Crashed(message=message), force=True)
    except (ObjectNotFound, ValueError, httpx.HTTPError) as error:
        log.warning("Prefect could not be told that flow run %s is dead: %s", flow_run_id, type(error).__name__)


def rename_flow_run(name: str) -> bool:
    """Give this flow run another name; return whether Prefect took it."""
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(str(runtime.flow_run.id)), name=name)
    except (ObjectNotFound, ValueError, httpx.HTTPError) as error:
        log.warning("this flow run could not be called %s: %s", name, type(error).__name__)
        return False
    return True


@contextmanager
def named_outages() -> Iterator[None]:
    """Raise what Prefect's client raises where its API does not answer as one sentence.

    Raises:
        PrefectUnavailable: it did not; the text says where it was looked for.
    """
    try:
        yield
    except (httpx.TransportError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(_NO_ANSWER):
            raise
        url = PREFECT_API_URL.value()
        if url is None:
            raise PrefectUnavailable("Prefect's own server did not start in time; try again, or start one") from None
        raise PrefectUnavailable(
            f"Prefect does not answer at {without_secrets(url)}: start it, or unset PREFECT_API_URL to do without"
        ) from None


def print_no_errors() -> None:
    """Keep Prefect from printing errors of runs: a command that runs a flow ends with the error itself.

    Prefect's server is told of them all the same.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.addFilter(_is_no_error_of_a_run)


def _is_no_error_of_a_run(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or not record.name.startswith(("prefect.flow_runs", "prefect.task_runs"))


def page_of(url: object) -> str:
    """Return a flow run's page; empty where there is none: of an ephemeral server Prefect says `None/runs/...`.

    >>> page_of("http://127.0.0.1:4200/runs/flow-run/1"), page_of("None/runs/flow-run/1"), page_of(None)
    ('http://127.0.0.1:4200/runs/flow-run/1', '', '')
    """
    return without_secrets(str(url)) if str(url).startswith(("http://", "https://")) else ""
