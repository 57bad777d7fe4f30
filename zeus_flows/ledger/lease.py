"""Who holds an attempt, and whether they are still there.

A holder writes a beat every 30 s. On its own machine a process that is gone is known to be dead at once. From another
machine it is dead when its beat has not changed for five minutes of the observer's own monotonic clock: wall clocks
disagree and move. So it is on its own machine too, where that does not tell one boot from another: its process ids
would say nothing, for they may be those of a namesake.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
import uuid
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from zeus_flows.core.json import from_text, to_text

HEARTBEAT_S: Final = 30.0
DEAD_AFTER_S: Final = 300.0
#: What macOS and the BSDs say of a boot, and where they keep the command that says it. The first is a UUID; the second
#: moves with the wall clock, after which nothing is known of a holder.
_BOOT_SYSCTLS: Final = ("kern.bootsessionuuid", "kern.boottime")
_SYSCTL_COMMANDS: Final = ("/usr/sbin/sysctl", "/sbin/sysctl")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that works on a recurrence, and how often it has said so.

    Attributes:
        token: Unique to one ledger in one process.
        host: Its machine.
        boot: That machine's boot; empty where the machine does not tell.
        namespace: Its namespace of process ids: containers on one machine have their own.
        pid: Its process id, by that machine.
        started: When the process started, in the kernel's ticks: process ids come round again.
        beat: Counts up.
        flow_run_id: The Prefect flow run it belongs to; empty outside of one.
        machine: The machine's own id: machines may share a name. Empty where it has none, as in most containers.
    """

    token: str
    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    beat: int = 0
    flow_run_id: str = ""
    machine: str = ""

    def dump(self) -> str:
        """Return the holder as JSON text."""
        return to_text(self)

    def next(self) -> Holder:
        """Return the holder one beat later."""
        return replace(self, beat=self.beat + 1)


@lru_cache(maxsize=256)
def read_holder(text: str) -> Holder | None:
    """Return the holder that `dump` wrote, or None where the text is something else.

    >>> read_holder(this_process(token="t").dump()).token, read_holder(""), read_holder("[]")
    ('t', None, None)
    """
    try:
        return from_text(Holder, text)
    except (LookupError, TypeError, ValueError):
        return None


def this_process(*, flow_run_id: str = "", token: str | None = None) -> Holder:
    """Return the holder that this process is."""
    return Holder(
        token=token or uuid.uuid4().hex,
        host=platform.node(),
        boot=_boot_id(),
        namespace=_namespace(),
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
        flow_run_id=flow_run_id,
        machine=_machine_id(),
    )


def is_gone(holder: Holder) -> bool | None:
    """Return whether a holder's process has ended; None where this machine cannot know."""
    if holder.host != platform.node():
        return None
    if holder.boot != _boot_id():  # rebooted, or another machine of the same name
        known = holder.boot and _boot_id() and holder.machine and holder.machine == _machine_id()
        return True if known else None
    if not holder.boot:  # of this machine, or of another of the same name that does not tell either
        return None
    if holder.namespace != _namespace():
        return None
    return _started(holder.pid) != holder.started


def monotonic_s() -> float:
    """Return seconds since this machine's boot, the same for all its processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@lru_cache(maxsize=1)
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return next((said for name in _BOOT_SYSCTLS if (said := _sysctl(name))), "")


def _sysctl(name: str) -> str:
    """Return what the kernel of macOS or a BSD says of a name; empty where it says nothing."""
    for command in _SYSCTL_COMMANDS:
        try:
            said = subprocess.run([command, "-n", name], capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
        except (OSError, ValueError, subprocess.SubprocessError):
            continue
        return said.stdout.strip() if said.returncode == 0 else ""
    return ""


@lru_cache(maxsize=1)
def _machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


@lru_cache(maxsize=1)
def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None where there is none (zombies have ended)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self").exists():
            return None
        return _exists(pid)
    return None if fields[0] in "ZX" else int(fields[19])


def _exists(pid: int) -> int | None:
    """Return 0 for a process that exists, on systems that do not tell when it started."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
