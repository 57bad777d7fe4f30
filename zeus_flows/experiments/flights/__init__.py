"""The embedded job: late arrivals among the real flights of 2013."""

from __future__ import annotations

from typing import Any

__all__ = ["evaluate", "train"]


def __getattr__(name: str) -> Any:
    """Import what a job file names when it is asked for: torch takes seconds.

    Raises:
        ConfigError: the data of the embedded job are not installed. It is said here, before anything runs.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zeus_flows.experiments.flights.data import require_data

    require_data()
    from zeus_flows.experiments.flights import training

    return getattr(training, name)
