"""What energy costs and emits: rates in the job file, or a CSV file with a line for each hour."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator, model_validator

from zeus_flows.core.prices import EnergyRate, Tariff
from zeus_flows.core.text import shown
from zeus_flows.errors import ConfigError
from zeus_flows.yaml_file import Section

LARGEST_MB: Final = 16  # of a file of prices: more than thirty years of hours
_COLUMNS: Final = ("hour", "per_kwh", "carbon_g_per_kwh")
_EXAMPLE: Final = "hour,per_kwh,carbon_g_per_kwh"
_HOUR_S: Final = 3600


class PricesSection(Section):
    """What a kilowatt hour costs and emits, for reports; no decision depends on it.

    `hourly` names a CSV file, beside the job file unless its path is absolute; what is stated here counts in hours that
    it leaves out.
    """

    per_kwh: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    currency: str | None = Field(default=None, pattern=r"^[A-Z]{3}$")
    carbon_g_per_kwh: Annotated[float, Field(ge=0, le=1e6)] | None = None
    hourly: str | None = Field(default=None, min_length=1)
    zone: str = "UTC"
    location: str | None = Field(default=None, min_length=1, max_length=100)

    @field_validator("zone")
    @classmethod
    def _is_a_zone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("is no time zone that this machine knows, such as Europe/Berlin or UTC") from None
        return value

    @model_validator(mode="after")
    def _a_price_has_a_currency(self) -> PricesSection:
        if self.per_kwh is not None and self.currency is None:
            raise ValueError("per_kwh needs a currency, such as currency: EUR")
        return self

    def tariff(self, folder: Path, *, instead: Path | None = None) -> Tariff:
        """Return the rates, with those of the CSV file where there is one.

        Args:
            folder: Where the job file is.
            instead: A CSV file that counts instead of the one named here.

        Raises:
            ConfigError: the file cannot be read or is wrong; the text names file and line.
        """
        flat = EnergyRate(self.per_kwh, self.carbon_g_per_kwh)
        path = instead if instead is not None else None if self.hourly is None else folder / self.hourly
        if path is None:
            return Tariff(flat, currency=self.currency or "")
        hours, of_day = read_prices(path, zone=self.zone)
        tariff = Tariff(flat, hours, of_day, zone=self.zone, currency=self.currency or "")
        if tariff.prices and not tariff.currency:
            raise ConfigError(f"{path}:1: per_kwh needs a currency: say prices: {{currency: EUR}} in the job file")
        return tariff


def read_prices(path: Path, *, zone: str = "UTC") -> tuple[dict[int, EnergyRate], dict[int, EnergyRate]]:
    """Return rates by hour since 1970, and by hour of the day: a file has either.

    `hour` is a time such as 2026-11-18T14:00+01:00 (in `zone` where it has no offset), or 0 to 23, for every day.

    Raises:
        ConfigError: the file cannot be read or is wrong; the text names file and line.
    """
    hours, of_day, home = dict[int, EnergyRate](), dict[int, EnergyRate](), ZoneInfo(zone)
    for line, row in _rows(path):
        text = (row["hour"] or "").strip()
        rate = EnergyRate(
            _number(path, line, row, "per_kwh", least=-math.inf),
            _number(path, line, row, "carbon_g_per_kwh", least=0.0),
        )
        if re.fullmatch(r"\d{1,2}", text):
            into, key = of_day, int(text)
            if key > 23:
                raise ConfigError(f"{path}:{line}: hour {key} is not of a day: 0 to 23, or a time with its date")
        else:
            into, key = hours, _hour(path, line, text, home)
        if key in into:
            raise ConfigError(f"{path}:{line}: hour {shown(text)} is there twice; keep one")
        into[key] = rate
        if hours and of_day:
            raise ConfigError(f"{path}:{line}: some hours have a date and others are of every day; keep to one")
    if not hours and not of_day:
        raise ConfigError(f"{path}:2: there is no hour; a line is such as `2026-11-18T14:00+01:00,0.28,380`")
    return hours, of_day


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Yield a file's rows with their lines."""
    try:
        if path.stat().st_size > LARGEST_MB * 2**20:
            raise ConfigError(f"{path}:1: more than {LARGEST_MB} MB: keep the hours in which the job ran")
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_header(path, reader.fieldnames or [])
            for row in reader:
                if None in row or None in row.values():
                    raise ConfigError(f"{path}:{reader.line_num}: the line has not as many columns as the first one")
                yield reader.line_num, {name.strip(): value for name, value in row.items()}
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file\n  a file of prices begins with `{_EXAMPLE}`") from None
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: not valid CSV: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no text in UTF-8; a file of prices begins with `{_EXAMPLE}`") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _check_header(path: Path, names: Sequence[str]) -> None:
    found = [name.strip() for name in names]
    if len(found) == 1 and ";" in found[0]:
        raise ConfigError(f"{path}:1: columns are separated by commas, not semicolons")
    for name in found:
        if name not in _COLUMNS:
            close = difflib.get_close_matches(name[:64], _COLUMNS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(_COLUMNS)}"
            raise ConfigError(f"{path}:1: {shown(name)} is no column of a file of prices; {hint}")
    if "hour" not in found or len(found) < 2:
        raise ConfigError(f"{path}:1: a file of prices needs the column hour and one of the others: `{_EXAMPLE}`")
    if len(set(found)) != len(found):
        raise ConfigError(f"{path}:1: a column is there twice; keep one")


def _number(path: Path, line: int, row: dict[str, str | None], name: str, *, least: float) -> float | None:
    """Return a rate; None where the cell is empty or the column is not there."""
    text = (row.get(name) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and least <= value <= 1e6):
        raise ConfigError(f"{path}:{line}: {name} must be a number such as 0.28, not {shown(text)}")
    return value


def _hour(path: Path, line: int, text: str, home: ZoneInfo) -> int:
    """Return an hour since 1970."""
    example = "a time such as 2026-11-18T14:00+01:00, or 0 to 23 for every day"
    try:
        at = datetime.fromisoformat(text)
        at = (at.replace(tzinfo=home) if at.tzinfo is None else at).astimezone(UTC)
        seconds = at.timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"{path}:{line}: hour must be {example}, not {shown(text)}") from None
    if seconds % _HOUR_S:
        raise ConfigError(f"{path}:{line}: hour must begin a whole hour of UTC, not {shown(text)}")
    return int(seconds // _HOUR_S)
