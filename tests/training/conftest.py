from __future__ import annotations

from tests.gpu.conftest import emulate, emulator_library

__all__ = ["emulate", "emulator_library"]
