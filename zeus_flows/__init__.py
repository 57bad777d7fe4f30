"""zeus_flows: energy-optimal recurring GPU training as Prefect flows over MLflow."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeus_flows.core.gate import Question
    from zeus_flows.training.dataloader import ZeusDataLoader
    from zeus_flows.training.session import Session, current_session

__all__ = ["Question", "Session", "ZeusDataLoader", "current_session"]

_HOMES = {
    "Question": "core.gate",
    "Session": "training.session",
    "ZeusDataLoader": "training.dataloader",
    "current_session": "training.session",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: torch takes seconds, and `--help` must not wait for it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"zeus_flows.{_HOMES[name]}"), name)
