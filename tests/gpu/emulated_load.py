"""A load that the emulated driver knows, for `zeus-flows doctor --measure --load tests.gpu.emulated_load:make`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import pynvml

#: Seconds of a step at full clock.
STEP_S = 0.02


def make(uuid: str) -> Callable[[], None]:
    """Put a load on the GPU; return what waits for one step of it, on the real clock or on the virtual one."""
    pynvml.nvmlInit()
    library, gpu = pynvml.nvmlLib, pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    library.nvmlEmuEpochSeconds.restype = ctypes.c_double
    library.nvmlEmuSetLoad(gpu, *(ctypes.c_double(number) for number in (STEP_S, 238.0, 0.92, 0.52)))
    return lambda: time.sleep(library.nvmlEmuEpochSeconds(gpu))
