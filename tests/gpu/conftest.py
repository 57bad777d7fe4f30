from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gpu.nvml_emulator import Emulator, build, emulated


@pytest.fixture(scope="session")
def emulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = build(tmp_path_factory.mktemp("emulator"))
    if library is None:
        pytest.skip("there is no C compiler to build the emulated NVML with")
    return library


@pytest.fixture
def emulate(emulator_library: Path, tmp_path: Path) -> Iterator[Callable[..., Emulator]]:
    """Return a function that makes emulated GPUs; switches are those of `emulator/nvml.c`."""
    with ExitStack() as stack:
        yield lambda **switches: stack.enter_context(emulated(emulator_library, tmp_path / "gpus", **switches))
