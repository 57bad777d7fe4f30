"""From what a job file says about its device to the GPUs it trains on."""

from __future__ import annotations

import re
from pathlib import Path

from zeus_flows.errors import ConfigError, NoDevice
from zeus_flows.gpu.group import Gpus
from zeus_flows.gpu.simulated import CHIPS, SimulatedDevice, SimulatedWork, VirtualClock, Workload

#: What a job file may say, besides `auto`, `nvml` and `zeusd`.
SIMULATED = tuple(f"simulated-{kind}" for kind in sorted(CHIPS))

_SIMULATED = re.compile(r"simulated-(?P<kind>[a-z0-9]+?)(?:x(?P<count>[1-9]\d?))?")

NO_GPU = (
    "no NVIDIA GPU can be used on this machine. To run on a simulated one type `--simulate v100`, "
    "or write `device: simulated-v100` in the job file; `zeus-flows doctor` says what was looked for."
)


def open_gpus(
    device: str,
    *,
    workload: Workload | None,
    batch_size: int,
    samples_per_epoch: int | None,
    state_dir: Path,
    visible: str | None,
    shared: bool = False,
) -> Gpus:
    """Return the GPUs of one job; use them in a `with` statement, which restores their power limits.

    Args:
        device: `auto`, `nvml`, `zeusd`, or a simulated one such as `simulated-v100`, `simulated-v100x4` for four.
        workload: What a simulated GPU runs; None: the defaults. Ignored on real GPUs.
        batch_size: The batch size over all GPUs; only simulated GPUs want it.
        samples_per_epoch: Size of the training set; may be None where `Gpus.samples_per_epoch` is set later.
        state_dir: Where the journal of power limits and the locks are.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        shared: The GPU is shared (MIG, MPS, time slicing): set no limits and trust no joules.

    Raises:
        NoDevice: there is no such GPU here; the text says what to type.
        ConfigError: `device` is not one that exists.
    """
    if device in ("auto", "nvml", "zeusd"):
        raise NoDevice(NO_GPU)
    match = _SIMULATED.fullmatch(device)
    if match is None or match["kind"] not in CHIPS:
        raise ConfigError(f"there is no device {device!r}; there are auto, nvml, zeusd, {', '.join(SIMULATED)}")
    clock = VirtualClock()
    devices = tuple(SimulatedDevice(match["kind"], clock, index=i) for i in range(int(match["count"] or 1)))
    work = SimulatedWork(
        devices, clock, workload or Workload(), batch_size=batch_size, samples_per_epoch=samples_per_epoch
    )
    return Gpus(devices, clock, work=work)
