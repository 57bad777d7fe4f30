"""Rows of a CSV file that somebody else wrote: every complaint names file and line."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zeus_flows.core.text import shown
from zeus_flows.errors import ConfigError


def rows(
    file: Path, columns: Sequence[str], *, named_by: str = "--traces names the folder that holds the traces"
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield `file:line` and each row as a mapping, read as they are asked for.

    Args:
        file: With a header in its first line.
        columns: What the header must have; it may have more.
        named_by: Where a missing file's name came from, for the complaint.

    Raises:
        ConfigError: the file is missing, cannot be read, or has another form.
    """
    try:
        with file.open(encoding="utf-8", newline="") as text:
            reader = csv.reader(text)
            try:
                filled = (cells for cells in reader if cells)
                header = next(filled, [])
                missing = [c for c in columns if c not in header]
                if missing:
                    raise ConfigError(f"{file}:1: the columns {', '.join(missing)} are missing")
                for cells in filled:
                    if len(cells) != len(header):
                        where = f"{file}:{reader.line_num}"
                        raise ConfigError(f"{where}: {len(cells)} cells where the header has {len(header)}")
                    yield f"{file}:{reader.line_num}", dict(zip(header, cells, strict=True))
            except csv.Error as error:
                raise ConfigError(f"{file}:{reader.line_num}: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file; {named_by}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None


def number(where: str, row: Mapping[str, str], column: str) -> float:
    """Return a cell as a finite number.

    Raises:
        ConfigError: it is none.
    """
    try:
        value = float(row[column])
    except ValueError:
        raise ConfigError(f"{where}: {column} must be a number, not {shown(row[column])}") from None
    if not math.isfinite(value):
        raise ConfigError(f"{where}: {column} must be finite, not {shown(row[column])}")
    return value


def integer(where: str, row: Mapping[str, str], column: str) -> int:
    """Return a cell as a positive whole number.

    Raises:
        ConfigError: it is none.
    """
    value = number(where, row, column)
    if value != int(value) or not 1 <= value <= 10**9:
        raise ConfigError(f"{where}: {column} must be a positive whole number, not {shown(row[column])}")
    return int(value)
