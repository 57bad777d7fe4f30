"""Power limits through the Zeus daemon (zeusd), for processes that may not set them.

The daemon runs as root on the machine of the GPUs and speaks HTTP over a unix socket, or TCP with a token. Readings
stay with NVML, which needs no permission for them.
"""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from zeus_flows.errors import DeviceError, LimitOutOfRange, NoDevice, NotSupported, PowerPermissionError
from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.nvml import NvmlDevice

_TIMEOUT_S = 5.0
#: Two readings of one energy counter, a moment apart, differ by less than this.
_SAME_COUNTER_J = 1000.0


class Zeusd:
    """A client of the daemon.

    Raises:
        NoDevice: nothing answers at the address.
    """

    def __init__(self, address: ZeusdAddress) -> None:
        self.address = address
        answer = self._ask("GET", "/discover")
        self.gpus = {int(gpu["id"]): str(gpu["name"]) for gpu in answer["gpus"]}
        told = {str(gpu.get("pci_address", "")).lower(): int(gpu["id"]) for gpu in answer["gpus"]}
        self.by_address = {address: gpu for address, gpu in told.items() if address}
        self.can_control = "gpu-control" in answer["enabled_api_groups"]

    def set_power_limit_mw(self, gpu: int, milliwatts: int) -> None:
        """Set a GPU's power limit, and wait until it is set."""
        self._ask("POST", "/gpu/set_power_limit", gpu_ids=gpu, power_limit_mw=milliwatts, block="true")

    def lock_clocks_mhz(self, gpu: int, low: int, high: int) -> None:
        """Lock a GPU's graphics clocks, and wait until they are locked."""
        self._ask(
            "POST", "/gpu/set_gpu_locked_clocks", gpu_ids=gpu, min_clock_mhz=low, max_clock_mhz=high, block="true"
        )

    def reset_clocks(self, gpu: int) -> None:
        """Undo `lock_clocks_mhz`."""
        self._ask("POST", "/gpu/reset_gpu_locked_clocks", gpu_ids=gpu, block="true")

    def energy_mj(self) -> dict[int, int]:
        """Return the energy counter of every GPU."""
        ids = ",".join(str(gpu) for gpu in self.gpus)
        answer = self._ask("GET", "/gpu/get_cumulative_energy", gpu_ids=ids)
        return {int(gpu): int(value["energy_mj"]) for gpu, value in answer.items()}

    def number_of(self, device: NvmlDevice) -> int:
        """Return the daemon's number of a GPU: in a container NVML may number GPUs differently.

        They are told apart by their addresses. Older daemons tell none; then model and energy counter have to do, and
        where those fit several, the number that NVML gives, if it sees as many GPUs as the daemon does.

        Raises:
            NoDevice: the daemon does not have that GPU, or it cannot be told which one it is.
        """
        address = device.pci_address()
        if address and self.by_address:
            found = [self.by_address[address]] if address in self.by_address else []
        else:
            found = self._alike(device)
        if len(found) == 1:
            return found[0]
        if device.index in found and device.count() == len(self.gpus):
            return device.index
        why = f"cannot tell which of {len(found)} GPUs is" if found else "does not know"
        raise NoDevice(f"zeusd at {self.address} {why} {device.model} ({device.uuid})")

    def _alike(self, device: NvmlDevice) -> list[int]:
        """Return the GPUs of a device's model whose energy counters stand where its own does."""
        named = [gpu for gpu, name in self.gpus.items() if name == device.model]
        try:
            here_j, there = device.energy_j(), self.energy_mj()
        except NotSupported:
            return named
        return [gpu for gpu in named if abs(there[gpu] / 1e3 - here_j) < _SAME_COUNTER_J]

    def _ask(self, method: str, path: str, **query: object) -> Any:
        connection = _connect(self.address)
        headers = {"Authorization": f"Bearer {self.address.token}"} if self.address.token else {}
        try:
            connection.request(method, f"{path}?{urlencode(query)}" if query else path, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoDevice(f"zeusd does not answer at {self.address}: {error}") from error
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            text = body.decode(errors="replace").strip()[:200]
            kind = {400: NotSupported, 401: PowerPermissionError, 403: PowerPermissionError}.get(
                answer.status, DeviceError
            )
            raise kind(f"zeusd at {self.address} answered {answer.status} to {path}: {text}")
        try:
            return json.loads(body) if body.strip() else None
        except ValueError as error:
            raise DeviceError(f"zeusd at {self.address} gave no JSON for {path}") from error


class ZeusdDevice(NvmlDevice):
    """An NVIDIA GPU that is read through NVML and changed through the daemon."""

    def __init__(self, device: NvmlDevice, zeusd: Zeusd) -> None:
        super().__init__(device.handle)
        self._zeusd = zeusd
        self._number = zeusd.number_of(device)

    def set_power_limit_w(self, watts: float) -> None:
        """Ask the daemon to set the power limit."""
        low, high = self.power_limit_range_w()
        if not low <= watts <= high:
            raise LimitOutOfRange(f"{self.model} accepts power limits from {low:g} to {high:g} W, not {watts:g} W")
        self._zeusd.set_power_limit_mw(self._number, round(watts * 1e3))

    def lock_clocks_mhz(self, low: int, high: int) -> None:
        """Ask the daemon to lock the graphics clocks."""
        self._zeusd.lock_clocks_mhz(self._number, low, high)

    def reset_clocks(self) -> None:
        """Ask the daemon to undo `lock_clocks_mhz`."""
        self._zeusd.reset_clocks(self._number)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _connect(address: ZeusdAddress) -> http.client.HTTPConnection:
    if address.host_port is not None:
        return http.client.HTTPConnection(address.host_port, timeout=_TIMEOUT_S)
    return _UnixConnection(address.socket_path)
