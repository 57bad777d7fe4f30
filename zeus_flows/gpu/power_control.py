"""The power limits and clocks of one job's GPUs: which there are, whether they may be changed, and the change."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from zeus_flows.errors import PowerPermissionError
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.guard import PowerGuard
from zeus_flows.gpu.journal import is_ours

log = logging.getLogger(__name__)

#: The paper profiles every 25 W.
STEP_W = 25.0


class PowerControl:
    """Holds all GPUs of a job at one power limit, until somebody else sets another.

    Whoever reads the limit notices that. It is said once, and from then on the limit is left to the other: two that
    set one limit in turns would both measure nonsense.

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
        foreign_w: The limit that somebody else set meanwhile; None while nobody did.
    """

    def __init__(self, devices: Sequence[Device], guard: PowerGuard, why_not: str = "") -> None:
        ranges = [device.power_limit_range_w() for device in devices]
        self.limits_w = candidate_limits(max(low for low, _ in ranges), min(high for _, high in ranges))
        self.can_set = not why_not
        self.why_not = why_not
        self.has_limits = all(device.has_power_limits for device in devices)
        self.last_limit_w = max(high for _, high in ranges)
        self.foreign_w: float | None = None
        self._expected_w: tuple[float, ...] | None = None
        self._was_set = False
        self._devices = tuple(devices)
        self._guard = guard

    @property
    def changed(self) -> bool:
        """Whether limits or clocks are to be put back."""
        return self._guard.changed

    def limit_w(self) -> float:
        """Return the power limit in force, per GPU (the least, where they differ); notice where it is not as expected.

        A driver may take 20 ms to tell: ask at the edges of spans, not at steps.
        """
        limits_w = tuple(device.power_limit_w() for device in self._devices)
        if self._was_set and not self._guard.changed:  # a signal has put it back
            self._expected_w, self._was_set = None, False
        for device, limit_w, expected_w in zip(self._devices, limits_w, self._expected_w or limits_w, strict=True):
            if self.foreign_w is None and not is_ours(limit_w, (expected_w,)):
                self._give_way(device, limit_w, expected_w)
        self._expected_w = limits_w
        self.last_limit_w = min(limits_w)
        return self.last_limit_w

    def set_limit_w(self, watts: float) -> None:
        """Set the power limit of every GPU; where one refuses, all are put back.

        Raises:
            PowerPermissionError: `can_set` is false; the text says why.
            LimitOutOfRange: a GPU does not accept it.
            DeviceError: the driver refused.
        """
        self._may()
        self._expected_w = None
        self._guard.set_power_limit_w(watts)
        self._expected_w, self._was_set = (watts,) * len(self._devices), True
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

    def _give_way(self, device: Device, limit_w: float, expected_w: float) -> None:
        self.foreign_w, self.can_set = limit_w, False
        self.why_not = f"somebody else set the power limit to {limit_w:g} W"
        log.warning(
            "the power limit of %s is %g W, not %g W: somebody else changed it while a job trains. It is left so; this "
            "attempt's energy counts as spent, and says nothing about our limits",
            device.uuid,
            limit_w,
            expected_w,
        )

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
