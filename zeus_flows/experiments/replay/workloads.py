"""The six workloads of the paper's Table 1: how to find them in traces, and models of them that need none.

A model is a handful of parameters: epochs to the target grow with the batch size once it is above a critical one
and again when it is very small; time and power follow the simulated GPU's laws. It stands for a workload of that
kind. Figures meant to be compared with the paper's come from its traces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from zeus_flows.core.power_profile import Gpu, PowerProfile, SettingMeasurement
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.replay.traces import SAMPLES_PER_EPOCH, Trace, TraceJob
from zeus_flows.gpu.simulated import CHIPS, Workload

REPETITIONS = 10
LIMIT_STEP_W = 25.0
SLOWNESS = {"v100": 1.0, "p100": 1.8, "a40": 0.8, "rtx6000": 1.1}  # seconds per epoch, relative to a V100


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters of a workload.

    Attributes:
        epochs: Epochs to the target at the best batch size.
        critical: Batch size at which larger ones have doubled them.
        smallest: Batch size at which smaller ones have doubled them.
        never_below: Smaller batch sizes never reach the target.
        spread: Run-to-run standard deviation of log epochs.
        batch_sizes: The arms.
        load: Time and power of an epoch.
    """

    epochs: float
    critical: float
    smallest: float
    never_below: int
    spread: float
    batch_sizes: tuple[int, ...]
    load: Workload

    def repetitions(self, batch_size: int) -> tuple[int | None, ...]:
        """Return the epochs that each of some repetitions takes: evenly spaced quantiles."""
        if batch_size < self.never_below:
            return (None,) * REPETITIONS
        middle = self.epochs * (1 + batch_size / self.critical) * (1 + self.smallest / batch_size)
        normal = NormalDist(math.log(middle), self.spread)
        return tuple(max(1, round(math.exp(normal.inv_cdf((i + 0.5) / REPETITIONS)))) for i in range(REPETITIONS))


JOBS = {
    "librispeech": TraceJob("librispeech", "deepspeech2", "adamw", 40.0, 16, 192),
    "squad": TraceJob("squad", "bert_base_uncased", "adamw", 84.0, 6, 32),
    "sentiment140": TraceJob("sentiment140", "bert_base_uncased", "adamw", 0.84, 10, 128),
    "imagenet": TraceJob("imagenet", "resnet50", "adadelta", 0.65, 100, 256),
    "cifar100": TraceJob("cifar100", "shufflenetv2", "adadelta", 0.6, 100, 1024),
    "movielens": TraceJob("movielens-1m", "ncf", "adam", 0.41, 100, 1024),
}

MODELS = {
    "librispeech": Model(
        *(6.3, 400.0, 0.0, 0, 0.06, (8, 12, 16, 24, 32, 48, 64, 96, 128, 192)),
        load=Workload(5200.0, 13.0, utilisation=0.8, least_utilisation=0.6),
    ),
    "squad": Model(
        *(4.2, 2000.0, 0.0, 0, 0.09, (8, 12, 16, 24, 32, 48, 56)),
        load=Workload(1700.0, 0.5, utilisation=0.95, least_utilisation=0.9),
    ),
    "sentiment140": Model(
        *(3.0, 1e6, 0.0, 0, 0.02, (8, 16, 32, 64, 128)),
        load=Workload(3800.0, 6.0, utilisation=0.95, least_utilisation=0.85),
    ),
    "imagenet": Model(
        *(17.0, 1e5, 90.0, 100, 0.08, (64, 128, 192, 256, 360)),
        load=Workload(3500.0, 4.0, utilisation=0.92, least_utilisation=0.9),
    ),
    "cifar100": Model(
        *(15.0, 270.0, 12.0, 0, 0.1, (8, 16, 32, 64, 128, 256, 512, 1024, 2048)),
        load=Workload(7.2, 220.0, utilisation=0.75, least_utilisation=0.1),
    ),
    "movielens": Model(
        *(4.2, 1e6, 60.0, 33, 0.15, (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)),
        load=Workload(6.5, 2300.0, utilisation=0.12, least_utilisation=0.1),
    ),
}


def model_trace(workload: str, gpu: str, *, default_batch_size: int | None = None) -> Trace:
    """Return a trace made from the built-in model of a workload.

    Raises:
        ConfigError: there is no such workload or GPU.
    """
    if workload not in MODELS:
        raise ConfigError(f"there is no built-in workload {workload!r}; there are {', '.join(MODELS)}")
    if gpu not in CHIPS:
        raise ConfigError(f"there is no built-in model of GPU {gpu!r}; there are {', '.join(CHIPS)}")
    model, spec, chip = MODELS[workload], JOBS[workload], CHIPS[gpu]
    least, greatest = chip.limits_w
    steps = math.floor((greatest - least) / LIMIT_STEP_W)
    limits = sorted({greatest, *(least + i * LIMIT_STEP_W for i in range(steps + 1))}, reverse=True)
    device = Gpu(gpu, 1, greatest)
    profiles = {}
    for b in model.batch_sizes:
        load = model.load.at(b, chip)
        epochs = [(limit, *chip.epoch(load, limit)) for limit in limits]
        measured = (
            SettingMeasurement(limit, watts, SAMPLES_PER_EPOCH / (seconds * SLOWNESS[gpu]))
            for limit, seconds, watts in epochs
        )
        profiles[b] = PowerProfile(b, device, tuple(measured))
    default = spec.default_batch_size if default_batch_size is None else default_batch_size
    return Trace(
        workload=workload,
        gpu=device,
        epochs={b: model.repetitions(b) for b in model.batch_sizes},
        profiles=profiles,
        default_batch_size=max((b for b in model.batch_sizes if b <= default), default=model.batch_sizes[0]),
        max_epochs=spec.max_epochs,
    )
