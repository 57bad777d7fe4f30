"""What a job will find on this machine, each line with what it means and what to type."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from zeus_flows.errors import ConfigError, DeviceError, NoDevice, NotSupported

if TYPE_CHECKING:
    from zeus_flows.gpu.address import ZeusdAddress
    from zeus_flows.gpu.journal import Journal
    from zeus_flows.gpu.nvml import Nvml, NvmlDevice


class Status(StrEnum):
    """How a finding bears on a job."""

    OK = "ok"
    WARN = "warn"  # a job runs, with less
    FAIL = "fail"  # no job runs


@dataclass(frozen=True, slots=True)
class Check:
    """One line.

    Attributes:
        name: What was looked at.
        status: How it bears on a job.
        found: What is there.
        means: What that means for a job.
        todo: What to type, where something can be done.
    """

    name: str
    status: Status
    found: str
    means: str
    todo: str = ""


_START_ZEUSD = "sudo zeusd serve --socket-path /run/zeusd/zeusd.sock --socket-permissions 666"

#: A check of another room, such as whether MLflow answers.
CheckFunction = Callable[[], Check]


def diagnose(
    *, state_dir: Path, visible: str | None, zeusd: ZeusdAddress, extra: Sequence[CheckFunction] = ()
) -> tuple[Check, ...]:
    """Return every check; nothing that outlives this call is changed.

    Args:
        state_dir: Where the journal of power limits is.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        zeusd: Where the Zeus daemon would be.
        extra: Checks of other rooms, run last.
    """
    return (*_gpu_checks(state_dir, visible, zeusd), *(check() for check in extra))


def a_job_could_run(checks: Sequence[Check]) -> bool:
    """Return whether nothing found keeps every job from running."""
    return all(check.status is not Status.FAIL for check in checks)


def _gpu_checks(state_dir: Path, visible: str | None, zeusd: ZeusdAddress) -> Iterator[Check]:
    from zeus_flows.gpu.nvml import Nvml

    simulate = "type `zeus-flows run job.yaml --simulate v100` to run on a simulated GPU"
    try:
        nvml = Nvml()
    except NoDevice as error:
        yield Check("driver", Status.FAIL, str(error), "no GPU can be used", f"install NVIDIA's driver, or {simulate}")
        return
    try:
        yield Check("driver", Status.OK, nvml.driver(), "NVML answers")
        try:
            yield from _picked(nvml, state_dir, visible)
        except (ConfigError, DeviceError) as error:
            yield Check("GPUs", Status.FAIL, str(error), "no GPU can be used", simulate)
        yield _zeusd(zeusd)
    finally:
        nvml.close()


def _picked(nvml: Nvml, state_dir: Path, visible: str | None) -> Iterator[Check]:
    from zeus_flows.gpu.open_gpus import pick_gpus

    devices, sliced = pick_gpus(nvml, visible, None)
    named = ", ".join(f"{device.model} ({device.uuid})" for device in devices)
    stated = "is not set: a job takes the first GPU" if visible is None else f"is {visible}"
    yield Check("GPUs", Status.OK, named, f"what a job would train on; CUDA_VISIBLE_DEVICES {stated}")
    for device in devices:
        yield _limits(device, state_dir)
        yield _clocks(device, state_dir)
        yield _energy(device)
        yield _permission(device, state_dir, sliced)
        yield _sharing(device, sliced)


def _limits(device: NvmlDevice, state_dir: Path) -> Check:
    from zeus_flows.gpu.journal import Journal, journal_folder

    name = f"power limit of GPU {device.index}"
    if not device.has_power_limits:
        return Check(name, Status.OK, "none: the GPU does not support power limits", "jobs choose the batch size only")
    low, high = device.power_limit_range_w()
    found = (
        f"{device.power_limit_w():g} W set, {device.enforced_power_limit_w():g} W enforced, range {low:g}-{high:g} W"
    )
    try:
        journal = Journal(journal_folder(state_dir))
        entry = journal.read(device.uuid)
    except ConfigError as error:
        return Check(name, Status.WARN, found, "what was before cannot be told", str(error))
    if entry is None or entry.previous_w is None:
        return Check(name, Status.OK, found, "nothing is left to be put back")
    found = f"{found}, {entry.previous_w:g} W before"
    if not _runs(journal, device):
        if not entry.left_alone(device.power_limit_w()):
            means = f"process {entry.pid} ended without putting it back, and somebody else has set it since: it stays"
            return Check(name, Status.OK, found, means)
        means = f"process {entry.pid} ended without putting it back; the next job will"
        return Check(name, Status.WARN, found, means, "type `zeus-flows restore-power` to do it now")
    return Check(name, Status.OK, found, f"a running job (process {entry.pid}) controls it and will put it back")


def _runs(journal: Journal, device: NvmlDevice) -> bool:
    """Return whether the job that wrote a GPU's journal still runs."""
    lock = journal.lock(device.uuid)
    if not lock.acquire():
        return True
    lock.release()
    return False


def _clocks(device: NvmlDevice, state_dir: Path) -> Check:
    from zeus_flows.gpu.journal import Journal, journal_folder

    name = f"clocks of GPU {device.index}"
    try:
        clocks = device.graphics_clocks_mhz()
        graphics, memory = device.clocks_mhz()
    except NotSupported as error:
        return Check(name, Status.OK, str(error), "jobs tune the power limit; `knob: clocks` measures only")
    found = f"graphics {graphics} MHz now, {len(clocks)} from {clocks[-1]} to {clocks[0]} MHz; memory {memory} MHz"
    try:
        journal = Journal(journal_folder(state_dir))
        entry = journal.read(device.uuid)
    except ConfigError as error:
        return Check(name, Status.WARN, found, "whether a job has locked them cannot be told", str(error))
    if entry is None or not entry.clocks_locked:
        means = "`knob: clocks` locks the graphics clocks; a lock of somebody else cannot be told by any driver"
        return Check(name, Status.OK, f"{found}; not locked by us", means)
    again = "resets them" if entry.previous_mhz is None else f"locks them to {entry.previous_mhz} MHz again"
    if _runs(journal, device):
        means = f"a running job (process {entry.pid}) {again} at its end"
        return Check(name, Status.OK, f"{found}; locked by us", means)
    means = f"process {entry.pid} ended with them locked; the next job {again}"
    return Check(name, Status.WARN, f"{found}; locked by us", means, "type `zeus-flows restore-power` to do it now")


def _energy(device: NvmlDevice) -> Check:
    from zeus_flows.gpu.meter import update_period_s

    name = f"energy of GPU {device.index}"
    try:
        period_s = update_period_s(device.energy_j, time.monotonic, time.sleep)
    except NotSupported:
        period_s = None
    if period_s is not None:
        found = f"a counter with a new value every {period_s * 1e3:.0f} ms"
        return Check(name, Status.OK, found, f"a 5 s span errs by about {period_s / 5:.1%} at most")
    try:
        period_s = update_period_s(device.power_w, time.monotonic, time.sleep)
    except NotSupported:
        return Check(name, Status.WARN, "neither a counter nor a power sensor", "jobs run and learn on time alone")
    pace = "steady now" if period_s is None else f"a new value every {period_s * 1e3:.0f} ms"
    return Check(name, Status.OK, f"no counter that counts; a power sensor, {pace}", "power is sampled in a thread")


def _permission(device: NvmlDevice, state_dir: Path, sliced: bool) -> Check:
    from zeus_flows.gpu.guard import Obstacle, PowerGuard
    from zeus_flows.gpu.journal import journal_folder

    name = f"permission on GPU {device.index}"
    if not device.has_power_limits:
        return Check(name, Status.OK, "not asked: there is no power limit to set", "jobs measure only")
    if sliced:
        return Check(name, Status.WARN, "not tried: the GPU is cut into MIG slices", "no limits are set")
    why_not = PowerGuard([device], journal_folder(state_dir)).probe()
    if why_not is None:
        found = "power limits and clocks may be set"
        return Check(name, Status.OK, found, "jobs profile and tune the power limit, or the clocks")
    if why_not.obstacle is Obstacle.ANOTHER_JOB:
        return Check(name, Status.OK, why_not.text, "a second job on this GPU would only measure")
    found = "power limits and clocks may not be set"
    return Check(name, Status.WARN, found, "jobs measure only, in observer mode", why_not.text)


def _sharing(device: NvmlDevice, sliced: bool) -> Check:
    name = f"sharing of GPU {device.index}"
    if sliced:
        return Check(name, Status.WARN, "MIG", "slices cannot be measured: jobs run and learn on time alone")
    declare = "write `shared_gpu: true` in the job file if others use this GPU at the same time (MPS, time slicing)"
    try:
        users = len(device.process_ids())
    except DeviceError:
        return Check(name, Status.OK, "not known", "pids of other containers cannot be seen", declare)
    if users > 0:
        return Check(name, Status.WARN, f"{users} processes compute on it now", "joules would be theirs too", declare)
    return Check(name, Status.OK, "nobody computes on it now", "joules are the job's own")


def _zeusd(address: ZeusdAddress) -> Check:
    from zeus_flows.gpu.zeusd import Zeusd

    if not address.likely():
        means = "needed only where a job may not set power limits itself"
        return Check("zeusd", Status.OK, f"none at {address}", means)
    try:
        zeusd = Zeusd(address)
    except DeviceError as error:
        return Check("zeusd", Status.WARN, str(error), "it cannot set power limits", f"start it: `{_START_ZEUSD}`")
    if not zeusd.can_control:
        todo = "start it with the API group gpu-control"
        return Check("zeusd", Status.WARN, f"answers at {address}", "it does not set power limits", todo)
    return Check("zeusd", Status.OK, f"answers at {address}", "it sets power limits for jobs that may not")
