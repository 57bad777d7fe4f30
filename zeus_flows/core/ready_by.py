"""When a model must be ready each day: a time of day in a time zone. No clock is read here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_FORM: Final = re.compile(r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?: +(?P<zone>[A-Za-z0-9_+/-]+))?")
_EXAMPLE: Final = "such as '06:00 Europe/Berlin' or '06:00 UTC'"


@dataclass(frozen=True, slots=True)
class ReadyBy:
    """A time of day, every day, in a time zone.

    >>> str(read_ready_by("6:00 Europe/Berlin"))
    '06:00 Europe/Berlin'
    """

    hour: int
    minute: int
    zone: str

    def __str__(self) -> str:
        return f"{self.hour:02}:{self.minute:02} {self.zone}"

    def due(self, start: datetime) -> datetime:
        """Return the first such time that is not before a start, in UTC; the start must have a time zone.

        A recurrence is due after it was scheduled: one that begins so late that the time is over is late, not a day
        early.

        >>> scheduled = datetime(2026, 3, 28, 23, 30, tzinfo=UTC)  # the night in which Berlin loses an hour
        >>> read_ready_by("06:00 Europe/Berlin").due(scheduled).isoformat()
        '2026-03-29T04:00:00+00:00'
        """
        local = start.astimezone(ZoneInfo(self.zone))
        for days in (0, 1):
            day = local.date() + timedelta(days=days)
            at = datetime(day.year, day.month, day.day, self.hour, self.minute, tzinfo=local.tzinfo).astimezone(UTC)
            if at >= start:
                return at
        return at + timedelta(days=1)  # the clock was put back over it


def read_ready_by(text: str) -> ReadyBy:
    """Return what a job file's `ready_by` says.

    Raises:
        ValueError: it is no time of day with a time zone; the text says what would be.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None or not (int(match["hour"]) < 24 and int(match["minute"]) < 60):
        raise ValueError(f"must be a time of day and its time zone, {_EXAMPLE}")
    if match["zone"] is None:
        raise ValueError(f"needs its time zone, {_EXAMPLE}: workers may be in another")
    try:
        ZoneInfo(match["zone"])
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{match['zone']} is no time zone that this machine knows; write one {_EXAMPLE}") from None
    return ReadyBy(int(match["hour"]), int(match["minute"]), match["zone"])
