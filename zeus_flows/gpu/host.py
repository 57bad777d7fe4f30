"""What the machine draws beside its GPUs, by RAPL: the energy counters of its processors and their memory.

Linux shows them under `/sys/class/powercap`, mostly to root alone. What RAPL does not see (fans, disks, the power
supply's losses) is not in it; `host_power_w` in the job file may state the whole instead.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


#: Counters go round within minutes to hours: a thread reads them so often.
READ_EVERY_S = 30.0


class HostMeter:
    """The energy counters of a machine's packages, added up. Thread-safe.

    Args:
        zones: The folders of the counters.

    Raises:
        OSError: a counter cannot be read.
    """

    def __init__(self, zones: tuple[Path, ...]) -> None:
        self._zones = zones
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._last = [self._read(zone) for zone in zones]
        self._total_uj = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._keep_reading, name="zeus-flows-host-energy", daemon=True).start()

    def energy_j(self) -> float:
        """Return the energy since this was made."""
        with self._lock:
            for i, zone in enumerate(self._zones):
                now = self._read(zone)
                step = now - self._last[i]
                self._total_uj += step if step >= 0 else step + self._ranges[i]
                self._last[i] = now
            return self._total_uj / 1e6

    def _keep_reading(self) -> None:
        while True:
            time.sleep(READ_EVERY_S)
            self.energy_j()

    @staticmethod
    def _read(zone: Path) -> int:
        return int((zone / "energy_uj").read_text())


def open_host_meter(root: Path = POWERCAP) -> HostMeter | None:
    """Return the machine's meter; None where it has none, or this process may not read it."""
    try:
        packages = [zone for zone in sorted(root.glob("intel-rapl:*")) if _is(zone, "package")]
        memory = [zone for zone in sorted(root.glob("intel-rapl:*:*")) if _is(zone, "dram")]
        zones = tuple(zone for zone in packages if zone.name.count(":") == 1) + tuple(memory)
        return HostMeter(zones) if zones else None
    except (OSError, ValueError):
        return None


def _is(zone: Path, kind: str) -> bool:
    return (zone / "name").read_text().strip().startswith(kind)
