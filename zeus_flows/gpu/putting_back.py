"""Undoing what was changed on a GPU, by its journal entry: when a job ends, or for a process that died."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from zeus_flows.errors import ConfigError, DeviceError, DeviceLost, PowerPermissionError
from zeus_flows.gpu.device import Device
from zeus_flows.gpu.journal import Entry, Journal, journal_folder

log = logging.getLogger(__name__)

#: A driver that is busy answers again soon; five seconds are promised.
_TRIES, _BETWEEN_TRIES_S = 4, 0.25


@dataclass(frozen=True, slots=True)
class Restored:
    """What was done with one journal entry.

    Attributes:
        uuid: The GPU.
        done: Whether it is as it was before.
        text: What happened, for people.
        denied: Whether this user may not change it; root may, and the Zeus daemon.
    """

    uuid: str
    done: bool
    text: str
    denied: bool = False


def restore_power(state_dir: Path, find: Callable[[str], Device | None]) -> tuple[Restored, ...]:
    """Put back the power limits and clocks that dead processes left. GPUs of running jobs are left alone.

    Args:
        state_dir: Whose journal to read.
        find: Returns the GPU of a UUID, or None where it is not on this machine.
    """
    journal = Journal(journal_folder(state_dir))
    return tuple(_restore_one(journal, uuid, find) for uuid in journal.uuids())


def _restore_one(journal: Journal, uuid: str, find: Callable[[str], Device | None]) -> Restored:
    lock = journal.lock(uuid)
    try:
        if not lock.acquire():
            return Restored(uuid, False, f"a running job (process {lock.holder()}) controls it; left alone")
        device = find(uuid)
        if device is None:
            return Restored(uuid, False, "is not on this machine now; its journal is kept")
        entry = undo_dead(journal, device)
        if entry is None:
            return Restored(uuid, True, "was put back by another process meanwhile")
        return Restored(uuid, True, entry.put_back_text(device.power_limit_w()))
    except PowerPermissionError:
        text = "may not be changed by this user: type `sudo zeus-flows restore-power`"
        return Restored(uuid, False, text, denied=True)
    except (ConfigError, DeviceError) as error:
        return Restored(uuid, False, str(error))
    except OSError as error:
        return Restored(uuid, False, f"its journal cannot be used: {error}")
    finally:
        lock.release()


def undo_dead(journal: Journal, device: Device) -> Entry | None:
    """Put back what a dead process left on a GPU. The caller holds its lock. Return the entry, or None."""
    entry = journal.read(device.uuid)
    if entry is None:
        return None
    ours = _put_back_ours(device, entry)
    journal.remove(device.uuid)
    if ours or entry.clocks_locked:
        said = replace(entry, previous_w=entry.previous_w if ours else None).put_back_text(device.power_limit_w())
        log.warning("%s: process %s ended without putting it back; %s", device.uuid, entry.pid, said)
    return entry


def _put_back_ours(device: Device, entry: Entry) -> bool:
    """Put back what an entry says, but for a limit that somebody else has set since. Return whether that was ours."""
    limit_w = _limit_or_none(device) if entry.previous_w is not None else None
    ours = entry.previous_w is not None and (limit_w is None or entry.left_alone(limit_w))
    try:
        if ours and entry.previous_w is not None:
            device.set_power_limit_w(entry.previous_w)
        elif limit_w != entry.previous_w:
            log.info(
                "%s: the power limit is %g W, not the %g W that was set here: somebody else set it, and it stays",
                device.uuid,
                limit_w,
                entry.ours_w[-1],
            )
    finally:
        if entry.clocks_locked:
            unlock(device, entry.previous_mhz)
    return ours


def unlock(device: Device, previous_mhz: int | None) -> None:
    """Reset a GPU's clocks, or lock them again as somebody had them."""
    if previous_mhz is None:
        device.reset_clocks()
    else:
        device.lock_clocks_mhz(previous_mhz, previous_mhz)


def _limit_or_none(device: Device) -> float | None:
    """Return the limit in force; None where it cannot be read: then it is put back blindly."""
    try:
        return device.power_limit_w()
    except DeviceLost:
        raise
    except DeviceError:
        return None


def undo(device: Device, entry: Entry) -> bool:
    """Return whether nothing is left to put back on a GPU."""
    for attempt in range(_TRIES):
        try:
            _put_back_ours(device, entry)
            return True
        except DeviceLost as error:
            log.error("%s; its journal is kept", error)
            return False
        except DeviceError as error:
            if attempt == _TRIES - 1:
                log.error("%s; type `zeus-flows restore-power`", error)
            else:
                time.sleep(_BETWEEN_TRIES_S)
    return False
