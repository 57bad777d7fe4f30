from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.conftest import emulate, emulator_library
from zeus_flows import killpoints as points
from zeus_flows.experiments.capriccio.curves import open_curves

__all__ = ["emulate", "emulator_library", "own_cache"]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give a test learning curves of its own, on disk and in memory; nobody listens at points after it."""
    monkeypatch.setenv("ZEUS_FLOWS_CACHE_DIR", str(tmp_path / "cache"))
    open_curves.cache_clear()
    yield
    open_curves.cache_clear()
    points.listen(lambda _point: None)
