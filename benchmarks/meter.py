"""The energy meter beside the published package `zeus`: calls, Python time and error of a span, in one run.

    pip install zeus==0.16.0 --no-deps
    python benchmarks/meter.py [--spans 5] [--json]

Both sides measure the same spans on the emulated NVML of `tests/gpu/nvml_emulator`, which knows the exact integral of
energy. Neither waits for CUDA, which is not here. Python time is what remains without the driver's own. Goals: no more
NVML calls per span than theirs and none per step; at most half their Python time; a mean error at 5 s spans of at
most 1 % with a counter and with sampled power, and no worse than theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_ulonglong, c_void_p
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from tests.gpu.nvml_emulator import Emulator
    from zeus_flows.gpu.group import Gpus

SPAN_S = 5.0
TOTAL = byref(c_ulonglong())
HANDLES = [c_void_p(i + 1) for i in range(4)]  # as the emulated library numbers its GPUs


@dataclass
class Row:
    """One comparison: the goal is that `ours` is at most `limit`."""

    what: str
    ours: float
    theirs: float
    limit: float
    unit: str

    @property
    def good(self) -> bool:
        """Whether the goal is met."""
        return self.ours <= self.limit * (1 + 1e-9)


@contextmanager
def gpus_of(emulator: Emulator, folder: str, *, count: int = 1, virtual: bool = False) -> Iterator[Gpus]:
    """Open emulated GPUs as a job does; on the emulator's virtual clock where asked."""
    from zeus_flows.gpu.guard import PowerGuard
    from zeus_flows.gpu.journal import journal_folder
    from zeus_flows.gpu.nvml import Nvml
    from zeus_flows.gpu.open_gpus import group_of_real

    devices = Nvml().devices()[:count]
    guard = PowerGuard(devices, journal_folder(Path(folder)))
    why_not = guard.acquire()
    timing: dict[str, Any] = {"clock": emulator.now, "sleep": emulator.advance, "watch_s": None} if virtual else {}
    with group_of_real(devices, guard=guard, why_not=why_not, shared=False, synchronize=None, **timing) as gpus:
        yield gpus


def their_monitor(count: int) -> Any:
    from zeus.monitor import ZeusMonitor

    return ZeusMonitor(gpu_indices=list(range(count)), cpu_indices=[])


def per_call(*functions: Callable[[], object], times: int = 300) -> list[float]:
    """Return the seconds of one call of each: the least of many short rounds, turn by turn."""
    best = [float("inf")] * len(functions)
    for _ in range(25):
        for i, function in enumerate(functions):
            begin = time.perf_counter()
            for _ in range(times):
                function()
            best[i] = min(best[i], (time.perf_counter() - begin) / times)
    return best


def per_span(*sides: tuple[Callable[[], Any], Callable[[Any], object]], times: int = 2000) -> list[float]:
    """Return the median seconds that both edges of a span take, for each side, turn by turn; spans are not empty."""
    spent: list[list[float]] = [[] for _ in sides]
    for _ in range(times):
        for i, (begin, end) in enumerate(sides):
            a = time.perf_counter()
            mark = begin()
            b = time.perf_counter()
            time.sleep(1e-4)
            c = time.perf_counter()
            end(mark)
            spent[i].append(time.perf_counter() - c + b - a)
    return [statistics.median(each) for each in spent]


def spans(emulator: Emulator, folder: str, count: int) -> Iterator[Row]:
    """Compare calls and Python time of a span."""
    monitor = their_monitor(count)
    with gpus_of(emulator, folder, count=count) as gpus:
        sides: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (gpus.mark, gpus.since),
            (
                lambda: monitor.begin_window("span", sync_execution=False),
                lambda _: monitor.end_window("span", sync_execution=False),
            ),
        ]
        calls = []
        for begin, end in sides:
            end(begin())
            before = emulator.calls()
            for _ in range(200):
                mark = begin()
                time.sleep(1e-4)
                end(mark)
            calls.append(round((emulator.calls() - before) / 200, 1))
        yield Row(f"NVML calls per span, {count} GPU", calls[0], calls[1], calls[1], "calls")
        before = emulator.calls()
        (step_s,) = per_call(lambda: gpus.ran(64), times=1000)
        yield Row(f"NVML calls per step, {count} GPU", round((emulator.calls() - before) / 25e3, 2), 0.0, 0.0, "calls")
        yield Row(f"time of a step, {count} GPU", step_s * 1e6, 0.0, 100.0, "us")  # 1 % of 10 ms
        driver = partial(read_counters, emulator, count)
        mine, other, driver_s = per_span(*sides, (driver, lambda _: driver()))
        mine, other = mine - driver_s, other - driver_s
        yield Row(f"Python time of a span, {count} GPU", mine * 1e6, other * 1e6, other * 1e6 / 2, "us")


def read_counters(emulator: Emulator, count: int) -> None:
    """Do what the driver does at an edge of a span, and nothing else: not Python's time."""
    for handle in HANDLES[:count]:
        emulator.handle.nvmlDeviceGetTotalEnergyConsumption(handle, TOTAL)


def profile(emulator: Emulator, folder: str) -> Iterator[Row]:
    """Compare the NVML calls of profiling every limit once, outside the training itself."""
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

    with gpus_of(emulator, folder) as gpus:
        before = emulator.calls()
        for limit_w in gpus.power.limits_w:
            gpus.power.set_limit_w(limit_w)
            mark = gpus.mark()
            time.sleep(0.01)
            gpus.since(mark)
        mine = emulator.calls() - before
    monitor = their_monitor(1)
    monitor.end_window, monitor.begin_window = _without_sync(monitor.end_window), _without_sync(monitor.begin_window)
    optimizer = GlobalPowerLimitOptimizer(monitor, wait_steps=0, warmup_steps=1, profile_steps=1)
    before = emulator.calls()
    for _ in range(3 * len(optimizer.power_limits)):
        optimizer.on_step_begin()
        time.sleep(0.01)
    theirs = emulator.calls() - before
    yield Row("NVML calls of a profile of 7 limits", mine, theirs, theirs, "calls")


def _without_sync(window: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same without waiting for CUDA, which is not here."""
    return lambda key, **options: window(key, sync_execution=False, **options)


def counter_error(emulator: Emulator, folder: str, period_ms: int) -> Row:
    """Compare the error of 5 s spans on a counter that ticks, with the same spans for both."""
    rng = random.Random(0)
    monitor = their_monitor(1)
    mine, theirs = [], []
    with gpus_of(emulator, folder, virtual=True) as gpus:
        for _ in range(300):
            emulator.advance(rng.random())
            put_load(emulator, rng)
            exact = emulator.joules()
            mark = gpus.mark()
            monitor.begin_window("span", sync_execution=False)
            emulator.advance(SPAN_S / 2)
            put_load(emulator, rng)
            emulator.advance(SPAN_S / 2)
            span = gpus.since(mark)
            measurement = monitor.end_window("span", sync_execution=False)
            exact = emulator.joules() - exact
            mine.append(abs(span.energy_j / exact - 1) if span.complete else 1.0)
            theirs.append(abs(measurement.gpu_energy[0] / exact - 1))
    ours, other = statistics.mean(mine) * 100, statistics.mean(theirs) * 100
    return Row(f"mean error, counter every {period_ms} ms", ours, other, min(1.0, max(other, 1e-9)), "%")


def sampling_error(emulator: Emulator, folder: str, what: str, count: int, *, constant: bool) -> Row:
    """Compare the error of 5 s spans of sampled power, in real time, with the same spans for both."""
    rng = random.Random(1)
    put_load(emulator, rng)
    monitor = their_monitor(1)
    mine, theirs = [], []
    with gpus_of(emulator, folder) as gpus:
        assert gpus.sensor == "sampled power"
        for _ in range(count):
            exact = emulator.joules()
            mark = gpus.mark()
            monitor.begin_window("span", sync_execution=False)
            end = time.monotonic() + SPAN_S
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, rng.uniform(0.1, 0.6)))
                if not constant:
                    put_load(emulator, rng)
            span = gpus.since(mark)
            measurement = monitor.end_window("span", sync_execution=False)
            exact = emulator.joules() - exact
            mine.append(abs(span.energy_j / exact - 1) if span.complete else 1.0)
            theirs.append(abs(measurement.gpu_energy[0] / exact - 1))
    monitor.power_monitor.stop()
    ours, other = statistics.mean(mine) * 100, statistics.mean(theirs) * 100
    return Row(f"mean error, {what}", ours, other, min(1.0, other), "%")


def put_load(emulator: Emulator, rng: random.Random) -> None:
    from zeus_flows.gpu.simulated import Load

    emulator.load(Load(3600.0, rng.uniform(120.0, 240.0), active=rng.uniform(0.5, 1.0), clock_bound=0.3))


def measure(part: str, count: int) -> list[Row]:
    """Run one part in this process, which loads the emulated library."""
    import ctypes

    import pynvml

    from tests.gpu.nvml_emulator import LIBRARY, Emulator

    library = Path(os.environ["LD_LIBRARY_PATH"].split(":")[0]) / LIBRARY
    ctypes.CDLL(str(library))
    emulator = Emulator(library, Path(os.environ["NVMLEMU_STATE"]))
    pynvml.nvmlInit()
    with tempfile.TemporaryDirectory() as folder:
        match part:
            case "spans":
                return [*spans(emulator, folder, 1), *spans(emulator, folder, 4), *profile(emulator, folder)]
            case "counter-20" | "counter-100":
                return [counter_error(emulator, folder, int(part.partition("-")[2]))]
            case "sampling":
                return [sampling_error(emulator, folder, "sampled varying power", count, constant=False)]
            case _:
                return [sampling_error(emulator, folder, "sampled steady power", 1, constant=True)]


#: Part of the benchmark -> the switches of the emulated library it runs with.
PARTS = {
    "spans": {"NVMLEMU_GPUS": "v100,v100,v100,v100"},
    "counter-20": {"NVMLEMU_CLOCK": "virtual", "NVMLEMU_UPDATE_MS": "20"},
    "counter-100": {"NVMLEMU_CLOCK": "virtual", "NVMLEMU_UPDATE_MS": "100"},
    "sampling": {"NVMLEMU_GPUS": "p100", "NVMLEMU_UPDATE_MS": "20", "NVMLEMU_NOISE_MW": "500"},
    "steady": {"NVMLEMU_GPUS": "p100", "NVMLEMU_UPDATE_MS": "20"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--spans", type=int, default=5, help="spans of 5 s of sampled power")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps([asdict(row) for row in measure(options.part, options.spans)]))
        return 0

    from tests.gpu.nvml_emulator import build

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        if library is None:
            sys.exit("there is no C compiler to build the emulated NVML with")
        for part, switches in PARTS.items():
            emulated = {"LD_LIBRARY_PATH": folder, "NVMLEMU_STATE": f"{folder}/{part}", "NVMLEMU_PERMISSION": "allow"}
            output = subprocess.run(
                [sys.executable, __file__, "--part", part, "--spans", str(options.spans)],
                env={**os.environ, **emulated, **switches},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            ).stdout
            rows += [Row(**row) for row in json.loads(output.splitlines()[-1])]
    if options.json:
        print(json.dumps([{**asdict(row), "good": row.good} for row in rows], indent=2))
    else:
        print(f"{'':42}{'ours':>10}{'zeus 0.16':>11}{'ratio':>8}{'goal':>10}")
        for row in rows:
            ratio = f"{row.ours / row.theirs:.2f}" if row.theirs else "-"
            goal = f"<= {row.limit:.4g}"
            mark = "ok" if row.good else "MISSED"
            print(f"{row.what:42}{row.ours:10.3g}{row.theirs:11.3g}{ratio:>8}{goal:>12} {row.unit:6}{mark}")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
