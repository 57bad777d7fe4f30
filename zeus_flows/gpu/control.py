"""The knob of one job's GPUs: which settings there are, whether they may be changed, and the change. All GPUs have one.

A setting is a number per GPU, in the knob's unit; the greatest is what the GPUs do when nothing holds them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zeus_flows.core.power_profile import Knob
from zeus_flows.errors import DeviceError, DeviceLost
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.power_control import PowerControl

#: Stands for the clock of GPUs that tell none.
NOMINAL_MHZ = 1000.0


class Control(Protocol):
    """One knob. Reads and changes raise as those of `Device` do."""

    @property
    def knob(self) -> Knob:
        """Which one."""

    @property
    def settings(self) -> tuple[float, ...]:
        """Settings to choose from, greatest first; empty where they cannot be told."""

    @property
    def has_settings(self) -> bool:
        """Whether the GPUs know the knob at all; if not, what `read` returns is nominal."""

    @property
    def can_set(self) -> bool:
        """Whether `set` will work."""

    @property
    def why_not(self) -> str:
        """What to tell the user where it will not."""

    @property
    def last(self) -> float:
        """The setting as it was last read or set."""

    @property
    def foreign_w(self) -> float | None:
        """The power limit that somebody else set meanwhile; None while nobody did."""

    def read(self) -> float:
        """Return the setting in force. A driver may take 20 ms: ask at the edges of spans, not at steps."""

    def set(self, setting: float) -> None:
        """Set every GPU; where one refuses, all are put back."""


class LimitControl:
    """Power limits, in watts."""

    knob = Knob.POWER_LIMIT

    def __init__(self, power: PowerControl) -> None:
        self._power = power
        self.settings = power.limits_w
        self.has_settings = power.has_limits

    @property
    def can_set(self) -> bool:
        """Whether limits may be set."""
        return self._power.can_set

    @property
    def why_not(self) -> str:
        """What to tell the user where they may not."""
        return self._power.why_not

    @property
    def last(self) -> float:
        """The limit as it was last read or set."""
        return self._power.last_limit_w

    @property
    def foreign_w(self) -> float | None:
        """The limit that somebody else set meanwhile."""
        return self._power.foreign_w

    def read(self) -> float:
        """Return the limit in force."""
        return self._power.limit_w()

    def set(self, setting: float) -> None:
        """Set the limit."""
        self._power.set_limit_w(setting)


class ClockControl:
    """Graphics clocks, in MHz; at the greatest one they are not locked. Power limits and memory clocks are left alone.

    No driver tells whether clocks are locked, so nobody else's lock is noticed; that somebody else has set the power
    limit is.

    Args:
        power: Changes the GPUs, and puts them back.
        devices: The GPUs.
        locked_before_mhz: What somebody has locked them to: the greatest setting then; None: nobody has.
    """

    knob = Knob.CLOCKS

    def __init__(self, power: PowerControl, devices: Sequence[Device], locked_before_mhz: int | None = None) -> None:
        self._power, self._unknown = power, ""
        common: set[int] = set()
        try:
            common = set.intersection(*(set(device.graphics_clocks_mhz()) for device in devices))
            if not common:
                self._unknown = "the GPUs have no clock in common"
        except DeviceLost:
            raise
        except DeviceError as error:
            self._unknown = str(error)
        if common and locked_before_mhz is not None:
            common = {locked_before_mhz, *(mhz for mhz in common if mhz < locked_before_mhz)}
        self.settings = tuple(float(mhz) for mhz in sorted(common, reverse=True))
        self.has_settings = bool(common)
        self._locked = False
        self.last = self._before = self.settings[0] if self.settings else NOMINAL_MHZ

    @property
    def can_set(self) -> bool:
        """Whether clocks may be locked."""
        return self.has_settings and self._power.can_set

    @property
    def why_not(self) -> str:
        """What to tell the user where they may not."""
        return self._unknown or self._power.why_not

    @property
    def foreign_w(self) -> float | None:
        """The power limit that somebody else set meanwhile."""
        return self._power.foreign_w

    def read(self) -> float:
        """Return the clock that was set last, and notice where somebody else has set the power limit."""
        self._power.limit_w()
        if self._locked and not self._power.changed:  # a signal has put it back
            self.last, self._locked = self._before, False
        return self.last

    def set(self, setting: float) -> None:
        """Lock the graphics clocks; the greatest setting resets them."""
        if setting >= self._before:
            self._power.reset_clocks()
        else:
            self._power.lock_clocks_mhz(round(setting), round(setting))
            self._locked = True
        self.last = setting


def control_of(
    knob: Knob, power: PowerControl, devices: Sequence[Device], *, locked_before_mhz: int | None = None
) -> Control:
    """Return the control of a knob."""
    return LimitControl(power) if knob is Knob.POWER_LIMIT else ClockControl(power, devices, locked_before_mhz)
