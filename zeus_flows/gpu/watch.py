"""Looks at the GPUs now and then, off the training loop: are they still there, and what slows them down?"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

from zeus_flows.errors import DeviceError, DeviceLost
from zeus_flows.gpu.device import Device

log = logging.getLogger(__name__)

#: What the job's own power limit or its pauses explain.
_EXPECTED = {"idle", "power cap", "clocks set by an application"}


class Watch:
    """A thread that notices a lost GPU within one period, even while no counter is read.

    Args:
        devices: The GPUs.
        period_s: How often to look.

    Attributes:
        lost: What the GPU that left the bus answered; None while all are there.
    """

    def __init__(self, devices: Sequence[Device], period_s: float = 2.0) -> None:
        self.lost: DeviceLost | None = None
        self._devices = tuple(devices)
        self._period_s = period_s
        self._looks = 0
        self._reasons: Counter[str] = Counter()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeus-flows-gpu-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and say what slowed the GPUs down. Safe to call twice."""
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join(timeout=2.0)
        for reason, times in sorted(self._reasons.items()):
            level = logging.DEBUG if reason in _EXPECTED else logging.WARNING
            log.log(level, "GPU clocks were lowered: %s, in %d of %d looks", reason, times, self._looks)

    def _run(self) -> None:
        while self.lost is None and not self._done.wait(self._period_s):
            for device in self._devices:
                self._look(device)

    def _look(self, device: Device) -> None:
        try:
            self._reasons.update(device.throttle_reasons())
            self._looks += 1
        except DeviceLost as error:
            self.lost = error
        except DeviceError as error:
            log.debug("looking at a GPU failed: %s", error)
