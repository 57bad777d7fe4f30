"""What every GPU, real or simulated, can be asked. Watts, joules, seconds and MHz at this level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from zeus_flows.core.records import EnergySource

#: Monotonic seconds: the machine's for a real GPU, a virtual clock for a simulated one.
Clock = Callable[[], float]


class Device(Protocol):
    """One GPU.

    Reads and writes raise the errors of `zeus_flows.errors`: `NotSupported` where the GPU cannot,
    `PowerPermissionError` where this process may not, `LimitOutOfRange`, and `DeviceLost` once it is gone.
    A device is not thread-safe unless it says so.
    """

    @property
    def index(self) -> int:
        """Its number in the order of the driver."""

    @property
    def uuid(self) -> str:
        """Identifies the GPU across processes and reboots."""

    @property
    def model(self) -> str:
        """The model's name, such as `Tesla V100-PCIE-32GB`; simulated ones say so."""

    @property
    def energy_source(self) -> EnergySource:
        """Whether its joules are measured or simulated."""

    @property
    def has_power_limits(self) -> bool:
        """Whether it knows power limits at all; if not, the limits it names are nominal and not to be shown."""

    def power_limit_range_w(self) -> tuple[float, float]:
        """Return the least and the greatest power limit it accepts."""

    def power_limit_w(self) -> float:
        """Return the power limit in force."""

    def set_power_limit_w(self, watts: float) -> None:
        """Set the power limit. It outlives the process on a real GPU: go through the power guard."""

    def energy_j(self) -> float:
        """Return the total-energy counter. Only differences mean something."""

    def power_w(self) -> float:
        """Return the power drawn now."""

    def utilisation_percent(self) -> tuple[float, float]:
        """Return the share of the last moments in which its multiprocessors and its memory were busy."""

    def graphics_clocks_mhz(self) -> tuple[int, ...]:
        """Return the graphics clocks that it can be locked to, greatest first."""

    def clocks_mhz(self) -> tuple[int, int]:
        """Return its graphics and memory clocks now."""

    def lock_clocks_mhz(self, low: int, high: int) -> None:
        """Lock the graphics clocks to a range. It outlives the process on a real GPU: go through the power guard."""

    def reset_clocks(self) -> None:
        """Undo `lock_clocks_mhz`."""

    def throttle_reasons(self) -> tuple[str, ...]:
        """Return why the clocks are below what was asked for; empty when they are not."""

    def synchronize(self) -> None:
        """Wait until the work queued so far is done."""
