"""Named points of a recurrence, so that a test can kill a process at each of them.

In production `reached` does nothing.
"""

from __future__ import annotations

from collections.abc import Callable


def _nothing(_point: str) -> None:
    pass


_hook: Callable[[str], None] = _nothing


def reached(point: str) -> None:
    """Tell whoever listens that the recurrence has come to a point."""
    _hook(point)


def listen(hook: Callable[[str], None]) -> None:
    """Call `hook` at every point from now on."""
    global _hook
    _hook = hook
