"""Child processes that have everything imported already: importing MLflow takes seconds, forking does not."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def fork_server() -> ForkServerContext:
    """Return what starts them; a pytest process has one server for all, so all must ask for the same imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ledger.brief", "tests.ledger.crowd", "tests.ledger.test_outbox"])
    return context
