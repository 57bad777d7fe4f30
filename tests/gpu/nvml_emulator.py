"""Builds and drives the emulated NVML of `emulator/nvml.c`, in this process or for others."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pynvml

from zeus_flows.gpu import guard
from zeus_flows.gpu.simulated import Load

SOURCE = Path(__file__).parent / "emulator" / "nvml.c"
LIBRARY = "libnvidia-ml.so.1"


def build(folder: Path) -> Path | None:
    """Return the library, made in `folder`; None where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    library = folder / LIBRARY
    options = ["-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler, *options, "-o", str(library), str(SOURCE), "-lm", "-lpthread"], check=True)
    return library


class Emulator:
    """The emulated GPUs of one state file, from this process's side."""

    def __init__(self, library: Path, state: Path) -> None:
        self.library = library
        self.state = state
        self.handle = ctypes.CDLL(str(library))
        for name in ("Now", "EpochSeconds", "Joules"):
            getattr(self.handle, f"nvmlEmu{name}").restype = ctypes.c_double
        self.handle.nvmlEmuCalls.restype = ctypes.c_ulonglong

    def environment(self, **switches: str) -> dict[str, str]:
        """Return what another process needs to see the same GPUs."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.library.parent),
            "NVMLEMU_STATE": str(self.state),
            **switches,
        }

    def load(self, load: Load | None, gpu: int = 0) -> None:
        load = load or Load(0.0, 0.0, 0.0, 0.0)
        numbers = (load.seconds_per_epoch, load.full_power_w, load.active, load.clock_bound)
        self.handle.nvmlEmuSetLoad(gpu, *(ctypes.c_double(number) for number in numbers))

    def now(self) -> float:
        return float(self.handle.nvmlEmuNow())

    def advance(self, seconds: float) -> None:
        self.handle.nvmlEmuAdvance(ctypes.c_double(seconds))

    def epoch_seconds(self, gpu: int = 0) -> float:
        return float(self.handle.nvmlEmuEpochSeconds(gpu))

    def joules(self, gpu: int = 0) -> float:
        return float(self.handle.nvmlEmuJoules(gpu))

    def reset_counter(self, gpu: int = 0) -> None:
        self.handle.nvmlEmuResetCounter(gpu)

    def calls(self, function: str = "*") -> int:
        return int(self.handle.nvmlEmuCalls(function.encode()))

    def locked_mhz(self, gpu: int = 0) -> int:
        """Return the clock that a GPU is locked to, which NVML does not tell; 0 where it is not."""
        return int(self.handle.nvmlEmuLockedMhz(gpu))

    def limit_w(self, gpu: int = 0) -> float:
        return float(pynvml.nvmlDeviceGetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(gpu))) / 1e3


_SET = """
import sys, pynvml
pynvml.nvmlInit()
pynvml.nvmlDeviceSetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(int(sys.argv[1])), int(sys.argv[2]))
"""


def set_limit_elsewhere(emulator: Emulator, watts: float, gpu: int = 0) -> None:
    """Let another process set a power limit, as `nvidia-smi -pl` does."""
    words = [sys.executable, "-c", _SET, str(gpu), str(round(watts * 1e3))]
    subprocess.run(words, env=emulator.environment(NVMLEMU_PERMISSION="allow"), check=True)


@contextmanager
def emulated(library: Path, state: Path, **switches: str) -> Iterator[Emulator]:
    """Let pynvml of this process talk to emulated GPUs."""
    emulator, guards = Emulator(library, state), list[Callable[[], None]]()
    switches = {"NVMLEMU_PERMISSION": "allow", **switches, "NVMLEMU_STATE": str(state)}
    with (
        mock.patch.dict(os.environ, switches),
        mock.patch.object(pynvml, "nvmlLib", emulator.handle),
        mock.patch.object(pynvml, "_nvmlGetFunctionPointer_cache", {}),
        mock.patch.object(guard, "atexit", _Noting(guards)),
    ):
        pynvml.nvmlInit()
        try:
            yield emulator
        finally:
            while emulator.handle.nvmlShutdown() == 0:  # whoever left it open
                pass
            for release in guards:  # at the end of this process there are no such GPUs to put back
                atexit.unregister(release)


class _Noting:
    """Registers as `atexit` does, and notes what."""

    def __init__(self, noted: list[Callable[[], None]]) -> None:
        self._noted = noted

    def register(self, function: Callable[[], None]) -> None:
        self._noted.append(function)
        atexit.register(function)

    def unregister(self, function: Callable[[], None]) -> None:
        atexit.unregister(function)
