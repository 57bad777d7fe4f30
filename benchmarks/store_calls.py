"""What reaches an MLflow tracking store, call by call, as a server would see it. Benchmarks and tests count with it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

from mlflow.store.tracking.abstract_store import AbstractStore
from mlflow.store.tracking.rest_store import RestStore
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

#: Calls that change what is stored.
WRITES: Final = frozenset(
    (
        "create_experiment",
        "create_run",
        "delete_run",
        "log_batch",
        "log_inputs",
        "log_metric",
        "log_param",
        "set_experiment_tag",
        "set_tag",
        "update_run_info",
    )
)
#: What a store is asked that is no request.
_LOCAL: Final = frozenset(("shut_down_async_logging", "flush_async_logging"))


@dataclass(frozen=True)
class StoreCall:
    """A call from outside of a store, and its answer."""

    name: str
    by_name: dict[str, Any]
    answer: Any = None

    @property
    def writes(self) -> bool:
        """Whether it changes what is stored."""
        return self.name in WRITES

    @property
    def run_id(self) -> str:
        """The run that it is about; empty where it is about none, or several."""
        return str(self.by_name.get("run_id", ""))


@contextmanager
def recorded(*stores: type[AbstractStore]) -> Iterator[list[StoreCall]]:
    """Record the calls that reach stores, whichever thread makes them; what a store asks of itself is none.

    Args:
        stores: The kinds of stores; databases and servers by default.
    """
    calls: list[StoreCall] = []
    inside = threading.local()
    kinds = stores or (SqlAlchemyStore, RestStore)
    methods = {
        (kind, name): getattr(kind, name)
        for kind in kinds
        for name in dir(kind)
        if not name.startswith("_") and name not in _LOCAL and inspect.isfunction(getattr(kind, name))
    }

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        @wraps(method)
        def call(store: Any, *args: Any, **named: Any) -> Any:
            if getattr(inside, "store", False):
                return method(store, *args, **named)
            inside.store = True
            try:
                answer = method(store, *args, **named)
            finally:
                inside.store = False
            by_name = signature.bind(store, *args, **named).arguments
            calls.append(StoreCall(name, {k: v for k, v in by_name.items() if k != "self"}, answer))
            return answer

        return call

    own = {(kind, name): vars(kind)[name] for kind, name in methods if name in vars(kind)}
    for (kind, name), method in methods.items():
        setattr(kind, name, recording(name, method))
    try:
        yield calls
    finally:
        for kind, name in methods:
            delattr(kind, name)
        for (kind, name), method in own.items():
            setattr(kind, name, method)
