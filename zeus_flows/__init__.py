"""zeus_flows: energy-optimal recurring GPU training as Prefect flows over MLflow.

These are the public names; docs/reference/api.md describes them. Everything else may change in any release.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeus_flows.errors import (
    ConfigError,
    DeviceError,
    DeviceLost,
    MeasurementError,
    NoDevice,
    PowerPermissionError,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    TargetNeverReached,
    TrainingError,
    WrongPlatform,
    ZeusFlowsError,
)

if TYPE_CHECKING:
    from zeus_flows.core.gate import Question
    from zeus_flows.core.records import Outcome
    from zeus_flows.training.dataloader import ZeusDataLoader
    from zeus_flows.training.forms.huggingface import ZeusTrainerCallback
    from zeus_flows.training.forms.lightning import ZeusLightningCallback
    from zeus_flows.training.keeping import KeptModel, open_model
    from zeus_flows.training.session import Session, current_session

    __version__: str

__all__ = [
    "ConfigError",
    "DeviceError",
    "DeviceLost",
    "KeptModel",
    "MeasurementError",
    "NoDevice",
    "Outcome",
    "PowerPermissionError",
    "Question",
    "Session",
    "StoreDenied",
    "StoreError",
    "StoreUnavailable",
    "TargetNeverReached",
    "TrainingError",
    "WrongPlatform",
    "ZeusDataLoader",
    "ZeusFlowsError",
    "ZeusLightningCallback",
    "ZeusTrainerCallback",
    "__version__",
    "current_session",
    "open_model",
]

_HOMES = {
    "KeptModel": "training.keeping",
    "Outcome": "core.records",
    "Question": "core.gate",
    "Session": "training.session",
    "ZeusDataLoader": "training.dataloader",
    "ZeusLightningCallback": "training.forms.lightning",
    "ZeusTrainerCallback": "training.forms.huggingface",
    "current_session": "training.session",
    "open_model": "training.keeping",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: torch takes seconds, and `--help` must not wait for it."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"zeus_flows.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names, whether they have been imported yet or not."""
    return sorted(__all__)


def _version() -> str:
    """Return the installed version; `0+unknown` where the package is used without being installed."""
    from importlib import metadata

    try:
        return metadata.version("zeus-flows")
    except metadata.PackageNotFoundError:
        return "0+unknown"
