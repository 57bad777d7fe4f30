"""How much a recurrence may change: the least that job file, roll-out, fleet and caller allow, and who said so."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from zeus_flows.core.job import Job, Mode, Rollout

_ORDER: Final = tuple(Mode)  # from the one that changes least to the one that changes most


def lowered(job: Job, mode: Mode | None, why: str) -> Job:
    """Return the job in another mode where that changes less, and whose word that is; else the job as it is.

    >>> job = Job("nightly", (8, 16), 8, 1, mode=Mode.POWER)
    >>> lowered(job, Mode.OFF, "the fleet").mode_why, lowered(job, Mode.FULL, "the fleet") is job
    ('the fleet', True)
    """
    if mode is None or _ORDER.index(mode) >= _ORDER.index(job.mode):
        return job
    return replace(job, mode=mode, mode_why=why)


def in_force(job: Job, recurrence: int) -> Job:
    """Return the job in the mode that is in force in a recurrence: its own, or its roll-out's stage where that is less.

    >>> job = Job("nightly", (8, 16), 8, 1, rollout=Rollout(observe=2, power=1))
    >>> [in_force(job, n).mode.value for n in (1, 2, 3, 4)]
    ['observe', 'observe', 'power', 'full']
    >>> in_force(job, 1).mode_why
    'its roll-out, up to recurrence 2'
    """
    stage = _stage(job.rollout, recurrence) if job.rollout is not None else None
    return job if stage is None else lowered(job, stage[0], f"its roll-out, up to recurrence {stage[1]}")


def why_in_force(job: Job) -> str:
    """Return whose word the mode is, as the end of a sentence.

    >>> why_in_force(Job("nightly", (8, 16), 8, 1)), why_in_force(Job("nightly", (8, 16), 8, 1, mode_why="the fleet"))
    ('as its job file says', 'by the fleet')
    """
    return f"by {job.mode_why}" if job.mode_why else "as its job file says"


def _stage(rollout: Rollout, recurrence: int) -> tuple[Mode, int] | None:
    """Return the stage that a recurrence is in and the last recurrence of it; None where the roll-out is over."""
    last = 0
    for mode, recurrences in ((Mode.OBSERVE, rollout.observe), (Mode.POWER, rollout.power)):
        last += recurrences
        if recurrence <= last:
            return mode, last
    return None
