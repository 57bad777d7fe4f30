"""What a job asks of its GPUs: the device, the power limit, the load of a simulated one."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from zeus_flows.core.job import Selector
from zeus_flows.yaml_file import Section

SimulatedGpu = Literal["v100", "p100", "a40", "rtx6000"]
SIMULATED_GPUS: tuple[SimulatedGpu, ...] = get_args(SimulatedGpu)
DEVICES = ("auto", "nvml", "zeusd", *(f"simulated-{gpu}" for gpu in SIMULATED_GPUS))


class PowerLimitSection(Section):
    """How the power limit, or the clock, is chosen and profiled; `limits` is of power limits alone."""

    choose_by: Selector = Selector.COST
    slowdown: float = Field(default=1.1, ge=1.0, allow_inf_nan=True)  # .inf: however slow
    limits: Literal["all"] | Annotated[list[Annotated[float, Field(gt=0)]], Field(max_length=1_000)] = "all"
    profile_all_limits: bool = False
    profile_seconds: float = Field(default=5.0, gt=0)
    warmup_seconds: float = Field(default=1.0, ge=0)


class Simulation(Section):
    """The simulated GPU's load, for a job that was never measured; `zeus_flows.gpu.simulated.Workload` has the laws.

    An epoch takes `seconds_per_epoch * (1 + half_batch / b)` at full clock and batch size b; each evaluation
    `evaluation_seconds` more, a tenth of `seconds_per_epoch` unless stated.
    """

    seconds_per_epoch: float = Field(default=60.0, gt=0)
    half_batch: float = Field(default=250.0, ge=0)
    utilisation: float = Field(default=0.75, gt=0, le=1)
    least_utilisation: float = Field(default=0.1, gt=0, le=1)
    saturated_power_w: float | None = Field(default=None, gt=0)
    evaluation_seconds: float | None = Field(default=None, ge=0)
