"""Does the power limit come back? A child sets one and ends: by an exception, by SIGTERM, by SIGKILL.

`python -m zeus_flows.experiments.acceptance.put_back <how> <watts>` is that child.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from zeus_flows.errors import DeviceError
from zeus_flows.experiments.acceptance.findings import REPORT_IT, Finding, Verdict
from zeus_flows.gpu.address import ZeusdAddress
from zeus_flows.gpu.journal import is_ours
from zeus_flows.gpu.nvml import Nvml, NvmlDevice
from zeus_flows.gpu.open_gpus import open_gpus
from zeus_flows.gpu.putting_back import restore_power
from zeus_flows.settings import environment_of_child, read_settings

#: Ways to end.
EXCEPTION, TERMINATED, KILLED = "an exception", "SIGTERM", "SIGKILL"
#: What is promised, and what a child may take to begin or to end.
WITHIN_S, _CHILD_S = 5.0, 60.0


def judge_put_back(uuid: str, limits_w: tuple[float, ...], state_dir: Path) -> tuple[Finding, ...]:
    """Return whether the limit of a GPU that nobody controls comes back, for each way to end.

    Args:
        uuid: The GPU.
        limits_w: Limits it takes; the one farthest from the present one is set.
        state_dir: Where the journal of power limits is.
    """
    nvml = Nvml()
    try:
        device = next(device for device in nvml.devices() if device.uuid == uuid)
        return tuple(_judge(device, limits_w, state_dir, how) for how in (EXCEPTION, TERMINATED, KILLED))
    finally:
        nvml.close()


def _judge(device: NvmlDevice, limits_w: tuple[float, ...], state_dir: Path, how: str) -> Finding:
    name = f"the limit comes back after {how}"
    before_w = device.power_limit_w()
    other_w = max(limits_w, key=lambda watts: abs(watts - before_w))
    with _child(how, other_w, state_dir) as (child, ready):
        if ready != "ready":
            found = f"the child could not set {other_w:g} W: {ready or 'it ended'}"
            return Finding(name, Verdict.CANNOT_TELL, found, "", "type `zeus-flows doctor` and see what it says")
        if not is_ours(device.power_limit_w(), (other_w,)):
            found = f"{other_w:g} W was set and {device.power_limit_w():g} W is read"
            return Finding(name, Verdict.CANNOT_TELL, found, "the driver does not take limits", REPORT_IT)
        if how == TERMINATED:
            child.send_signal(signal.SIGTERM)
        elif how == KILLED:
            child.kill()
        elif child.stdin is not None:
            child.stdin.close()
        try:
            child.wait(_CHILD_S)
        except subprocess.TimeoutExpired:
            return Finding(name, Verdict.FAIL, f"the child did not end within {_CHILD_S:g} s", "", REPORT_IT)
    by = "that"
    if how == KILLED:
        by = "`zeus-flows restore-power`"
        restore_power(state_dir, {device.uuid: device}.get)
    ended = time.monotonic()
    while not is_ours(device.power_limit_w(), (before_w,)) and time.monotonic() - ended < WITHIN_S:
        time.sleep(0.05)
    left_w = device.power_limit_w()
    if is_ours(left_w, (before_w,)):
        found = f"{before_w:g} W before, {other_w:g} W meanwhile, {left_w:g} W after {by}"
        means = "the next job puts it back, too" if how == KILLED else "a job leaves the GPU as it found it"
        return Finding(name, Verdict.PASS, found, means)
    found = f"{before_w:g} W before, {other_w:g} W meanwhile, and still {left_w:g} W {WITHIN_S:g} s after {by}"
    todo = f"type `sudo nvidia-smi -i {device.index} -pl {before_w:g}`; {REPORT_IT}"
    return Finding(name, Verdict.FAIL, found, "jobs leave their limit on this GPU", todo)


@contextmanager
def _child(how: str, watts: float, state_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a child; yield it and its first line. It is over afterwards."""
    child = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", __name__, how, str(watts)],
        env=environment_of_child({"ZEUS_FLOWS_STATE_DIR": str(state_dir)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield child, _first_line(child.stdout)
    finally:
        child.kill()
        child.wait()


def _first_line(stream: IO[str] | None) -> str:
    return stream.readline().strip() if stream is not None else ""


def main(how: str, watts: float) -> None:
    """Be a job that sets a limit and ends in some way."""
    settings = read_settings()
    try:
        gpus = open_gpus(
            "auto",
            workload=None,
            batch_size=1,
            samples_per_epoch=None,
            state_dir=settings.state_dir,
            visible=settings.cuda_visible_devices,
            zeusd=ZeusdAddress(settings.zeusd_socket, settings.zeusd_host_port, settings.zeusd_token),
        )
        gpus.power.set_limit_w(watts)
    except DeviceError as error:
        _tell(str(error))
        return
    _tell("ready")
    sys.stdin.read()  # until the parent has looked at the limit, or is gone
    raise RuntimeError(how)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
