from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pynvml
import pytest

from tests.gpu import fake_zeusd
from tests.gpu.nvml_emulator import Emulator
from tests.gpu.test_nvml import opened
from zeus_flows.errors import LimitOutOfRange, NoDevice, NotSupported, PowerPermissionError
from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.nvml import Nvml
from zeus_flows.gpu.zeusd import Zeusd, ZeusdDevice

pytestmark = pytest.mark.slow


@contextmanager
def daemon(emulator: Emulator, where: str, *token: str, **switches: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(fake_zeusd.__file__)), where, *token],
        env=emulator.environment(**{"NVMLEMU_PERMISSION": "allow", **switches}),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def start(emulate: Callable[..., Emulator], tmp_path: Path) -> Iterator[Callable[..., tuple[Emulator, ZeusdAddress]]]:
    with ExitStack() as stack:

        def begin(**switches: str) -> tuple[Emulator, ZeusdAddress]:
            emulator = emulate(NVMLEMU_GPUS="v100,v100", NVMLEMU_PERMISSION="deny")
            path = stack.enter_context(daemon(emulator, str(tmp_path / "zeusd.sock"), **switches))
            return emulator, ZeusdAddress(Path(path))

        yield begin


def test_limits_and_clocks_are_set_through_the_daemon(start: Callable[..., tuple[Emulator, ZeusdAddress]]) -> None:
    emulator, address = start()
    device = ZeusdDevice(Nvml().devices()[1], Zeusd(address))
    device.set_power_limit_w(150.0)
    assert (emulator.limit_w(0), emulator.limit_w(1)) == (250.0, 150.0)
    assert device.power_limit_w() == 150.0
    device.lock_clocks_mhz(690, 690)
    device.reset_clocks()
    with pytest.raises(LimitOutOfRange):
        device.set_power_limit_w(50.0)
    with pytest.raises(NotSupported):
        device.lock_clocks_mhz(10, 20)


@pytest.mark.parametrize("device", ["auto", "zeusd"])
def test_a_process_without_permission_goes_through_the_daemon(
    start: Callable[..., tuple[Emulator, ZeusdAddress]], tmp_path: Path, device: str
) -> None:
    emulator, address = start()
    with opened(tmp_path, device=device, zeusd=address) as gpus:
        assert gpus.power.can_set
        gpus.power.set_limit_w(100.0)
        assert emulator.limit_w() == 100.0
    assert emulator.limit_w() == 250.0


def test_a_gpu_with_another_number_in_the_container_is_told_by_its_pci_address(
    start: Callable[..., tuple[Emulator, ZeusdAddress]],
) -> None:
    _, address = start()
    zeusd, device = Zeusd(address), Nvml().devices()[1]
    assert device.pci_address() == "0000:41:00.0"
    device.index = 0  # as in a container that has only this GPU
    here_mj = int(device.energy_j() * 1e3)
    zeusd.energy_mj = lambda: {0: here_mj, 1: here_mj}  # type: ignore[method-assign]  # no help
    assert zeusd.number_of(device) == 1
    del zeusd.by_address["0000:41:00.0"]
    with pytest.raises(NoDevice, match="does not know"):
        zeusd.number_of(device)


def test_where_an_older_daemon_tells_no_address_energy_counters_have_to_do(
    start: Callable[..., tuple[Emulator, ZeusdAddress]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = start()
    zeusd, device = Zeusd(address), Nvml().devices()[1]
    zeusd.by_address.clear()
    device.index = 0
    here_mj = int(device.energy_j() * 1e3)
    counters = {0: 7_000_000_000, 1: here_mj}
    zeusd.energy_mj = lambda: counters  # type: ignore[method-assign]
    assert zeusd.number_of(device) == 1
    counters[1] = 9_000_000_000
    with pytest.raises(NoDevice, match="does not know"):
        zeusd.number_of(device)
    counters |= {0: here_mj, 1: here_mj}  # as just after a reboot
    device.index = 1
    assert zeusd.number_of(device) == 1  # all GPUs are seen: numbers are the driver's
    monkeypatch.setattr(device, "count", lambda: 1)
    with pytest.raises(NoDevice, match="cannot tell which of 2 GPUs is"):
        zeusd.number_of(device)


def test_a_daemon_that_may_not_either_is_a_matter_of_permission(
    start: Callable[..., tuple[Emulator, ZeusdAddress]], tmp_path: Path
) -> None:
    _, address = start(NVMLEMU_PERMISSION="deny")
    with pytest.raises(PowerPermissionError, match="403"):
        ZeusdDevice(Nvml().devices()[0], Zeusd(address)).set_power_limit_w(100.0)
    with opened(tmp_path, device="auto", zeusd=address) as gpus:
        assert not gpus.power.can_set


def test_over_tcp_the_daemon_wants_its_token(emulate: Callable[..., Emulator]) -> None:
    emulator = emulate(NVMLEMU_PERMISSION="deny")
    with daemon(emulator, "0", "secret") as port:
        address = ZeusdAddress(host_port=f"127.0.0.1:{port}", token="secret")  # noqa: S106
        ZeusdDevice(Nvml().devices()[0], Zeusd(address)).set_power_limit_w(100.0)
        assert emulator.limit_w() == 100.0
        wrong = ZeusdAddress(host_port=f"127.0.0.1:{port}", token="wrong")  # noqa: S106
        with pytest.raises(PowerPermissionError, match="401"):
            ZeusdDevice(Nvml().devices()[0], Zeusd(wrong)).set_power_limit_w(100.0)
        assert "secret" not in repr(address) + str(address)


def test_no_daemon_is_said_with_its_address(emulate: Callable[..., Emulator], tmp_path: Path) -> None:
    emulate(NVMLEMU_PERMISSION="deny")
    address = ZeusdAddress(tmp_path / "nothing.sock")
    assert not address.likely()
    with pytest.raises(NoDevice, match=r"nothing\.sock"):
        opened(tmp_path, device="zeusd", zeusd=address)
    assert pynvml.nvmlDeviceGetCount() == 1
