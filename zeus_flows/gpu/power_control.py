"""The power limits and clocks of one job's GPUs: which there are, whether they may be changed, and the change."""

from __future__ import annotations

from collections.abc import Sequence

from zeus_flows.errors import PowerPermissionError
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.guard import PowerGuard

#: The paper profiles every 25 W.
STEP_W = 25.0


class PowerControl:
    """Holds all GPUs of a job at one power limit.

    Args:
        devices: The GPUs.
        guard: Changes them and puts them back; has been acquired, unless `why_not` says otherwise.
        why_not: What to tell the user where limits cannot be set.

    Attributes:
        limits_w: Candidate power limits per GPU, greatest first; empty where limits cannot be told.
        can_set: Whether `set_limit_w` will work.
        why_not: What to tell the user where it will not.
        has_limits: Whether the GPUs know power limits at all; if not, those they name are nominal.
        last_limit_w: The power limit, per GPU, as it was last read or set.
    """

    def __init__(self, devices: Sequence[Device], guard: PowerGuard, why_not: str = "") -> None:
        ranges = [device.power_limit_range_w() for device in devices]
        self.limits_w = candidate_limits(max(low for low, _ in ranges), min(high for _, high in ranges))
        self.can_set = not why_not
        self.why_not = why_not
        self.has_limits = all(device.has_power_limits for device in devices)
        self.last_limit_w = max(high for _, high in ranges)
        self._devices = tuple(devices)
        self._guard = guard

    def limit_w(self) -> float:
        """Return the power limit in force, per GPU (the least, where they differ)."""
        self.last_limit_w = min(device.power_limit_w() for device in self._devices)
        return self.last_limit_w

    def set_limit_w(self, watts: float) -> None:
        """Set the power limit of every GPU; where one refuses, all are put back.

        Raises:
            PowerPermissionError: `can_set` is false; the text says why.
            LimitOutOfRange: a GPU does not accept it.
            DeviceError: the driver refused.
        """
        self._may()
        self._guard.set_power_limit_w(watts)
        self.last_limit_w = watts

    def lock_clocks_mhz(self, low: int, high: int) -> None:
        """Lock the graphics clocks of every GPU; raises as `set_limit_w` does."""
        self._may()
        self._guard.lock_clocks_mhz(low, high)

    def reset_clocks(self) -> None:
        """Undo `lock_clocks_mhz`."""
        self._may()
        self._guard.reset_clocks()

    def restore(self) -> None:
        """Put the previous power limits and clocks back now; the GPUs stay ours."""
        self._guard.restore()

    def release(self) -> None:
        """Put the previous power limits and clocks back and let go of the GPUs. Safe to call twice."""
        self._guard.release()

    def _may(self) -> None:
        if not self.can_set:
            raise PowerPermissionError(self.why_not)


def candidate_limits(low_w: float, high_w: float, step_w: float = STEP_W) -> tuple[float, ...]:
    """Return the power limits to profile: from the greatest down to the least in even steps.

    >>> candidate_limits(100.0, 250.0)
    (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0)
    """
    steps = int((high_w - low_w) / step_w + 1e-9)
    return tuple(high_w - i * step_w for i in range(steps + 1))
