"""Something for a GPU to do while it is measured: steps that keep it busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zeus_flows.errors import ConfigError
from zeus_flows.training.trainer import load_function

#: Does one step, and returns when the GPU has done it; meanwhile the next one may be queued.
Step = Callable[[], object]

#: A step is made to take this long at the limit that there is.
_STEP_S = 0.05
_SIZE = 4096
_IDLE_S = 0.05


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """A load.

    Attributes:
        name: What it is, for people.
        step: Does one step.
        idle: Whether it leaves the GPU alone: then little can be told.
    """

    name: str
    step: Step
    idle: bool = False


def open_load(spec: str | None, uuid: str) -> GpuLoad:
    """Return a load for a GPU: the one that `module:function` names, else torch's.

    Args:
        spec: A function that is called with the GPU's UUID and returns a `Step`; None: matrix products on CUDA.
        uuid: The GPU.

    Raises:
        ConfigError: there is no such function.
    """
    if spec is not None:
        if ":" not in spec:
            raise ConfigError(f"--load: {spec!r} is no `module:function`")
        make: Any = load_function(spec, key="--load")
        return GpuLoad(spec, make(uuid))
    try:
        import torch
    except ModuleNotFoundError:
        return _nothing("torch is not installed")
    if not torch.cuda.is_available():
        return _nothing("torch finds no CUDA device: install a build of torch for the driver's CUDA")
    try:
        return _matrix_products(torch, uuid)
    except RuntimeError as error:  # out of memory, a driver that is too old
        return _nothing(f"torch cannot use the GPU: {str(error).splitlines()[0]}")


def _nothing(why: str) -> GpuLoad:
    return GpuLoad(f"none: {why}", lambda: time.sleep(_IDLE_S), idle=True)


def _matrix_products(torch: Any, uuid: str) -> GpuLoad:
    """Return matrix products in half precision. One step is queued while another runs: the GPU never waits for us."""
    uuids = [str(getattr(torch.cuda.get_device_properties(i), "uuid", "")) for i in range(torch.cuda.device_count())]
    index = next((i for i, other in enumerate(uuids) if other and uuid.endswith(other)), 0)
    with torch.cuda.device(index):
        a, b, out = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.float16) for _ in range(3))

        def queue(products: int) -> Any:
            with torch.cuda.device(index):
                for _ in range(products):
                    torch.matmul(a, b, out=out)
                done = torch.cuda.Event()
                done.record()
            return done

        queue(10).synchronize()
        began = time.perf_counter()
        queue(20).synchronize()
        products = max(1, round(20 * _STEP_S / (time.perf_counter() - began)))
        queued = [queue(products)]

        def step() -> None:
            queued.append(queue(products))
            queued.pop(0).synchronize()

    return GpuLoad(f"{products} products of {_SIZE} x {_SIZE} matrices a step, half precision, CUDA {index}", step)
