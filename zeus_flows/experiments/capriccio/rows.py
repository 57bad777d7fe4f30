"""Rows of a file, parsed cell by cell into flat arrays: what a dataset is made of.

A row that cannot be parsed is counted and left out, with its line.
"""

from __future__ import annotations

import math
import re
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.datasets import Dataset, FeatureColumns, Malformed, Texts, dataset_of

REMEMBERED: Final = 20  # malformed lines that are named
_WORD: Final = re.compile(r"[a-z0-9']+|[:;=8][-o']?[()\[\]dp/]|[!?]+|<3")
_MISSING: Final = frozenset({"", "na", "nan", "null", "none"})


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Which columns of a CSV or Parquet file mean what.

    Attributes:
        time: The column with the time: ISO 8601, or `time_format` (as `strptime` has it).
        label: The column with the label: 0 and 1, or `positive` against everything else.
        text: The column with the text, where rows are texts.
        numbers: Columns with numbers, where they are not; empty cells are missing.
        categories: Columns with names.
        positive: The label's positive value.
        time_format: For times that are not ISO 8601.
    """

    time: str
    label: str
    text: str | None = None
    numbers: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    positive: str | None = None
    time_format: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (self.time, self.label, *([self.text] if self.text else []), *self.numbers, *self.categories)


def words(text: str) -> list[int]:
    """Return a text's words, emoticons and runs of marks as 32-bit hashes; the same in every process.

    >>> len(words("@user I can't wait!! :)"))
    6
    """
    return [zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())]


class FeatureRows(Protocol):
    """What is known of each row, in the order in which rows were taken."""

    def take(self, cells: Mapping[str, Any], layout: TableLayout) -> None:
        """Take a row by its columns' names. A ValueError says that nothing was taken."""

    def features(self) -> Texts | FeatureColumns:
        """Return all of them."""


class TextRows:
    """Texts, as the hashes of their words; see `Texts`.

    Args:
        keep_text: Keep the texts themselves too.
    """

    def __init__(self, *, keep_text: bool) -> None:
        self._keep_text = keep_text
        self._words, self._ends = array("I"), array("q", [0])
        self._blob, self._cuts = bytearray(), array("q", [0])

    def add(self, text: str) -> None:
        """Take a text."""
        self._words.extend(words(text))
        self._ends.append(len(self._words))
        if self._keep_text:
            self._blob += text.encode()
            self._cuts.append(len(self._blob))

    def take(self, cells: Mapping[str, Any], layout: TableLayout) -> None:
        """Take the column with the text."""
        assert layout.text is not None
        self.add(str(cells[layout.text] or ""))

    def features(self) -> Texts:
        """Return the texts."""
        cuts = np.array(self._cuts, dtype=np.int64) if self._keep_text else None
        starts = np.array(self._ends, dtype=np.int64)
        return Texts(np.array(self._words, dtype=np.uint32), starts, bytes(self._blob), cuts)


class ColumnRows:
    """Columns with numbers and columns with names; see `FeatureColumns`."""

    def __init__(self, *, numbers: int, categories: int) -> None:
        self._width = numbers
        self._numbers, self._codes = array("f"), array("i")
        self._names: list[dict[str, int]] = [{} for _ in range(categories)]
        self._count = 0

    def take(self, cells: Mapping[str, Any], layout: TableLayout) -> None:
        """Take the columns with numbers and those with names."""
        numbers = [_number(name, cells[name]) for name in layout.numbers]
        names = [str(cells[name]) for name in layout.categories]
        self._codes.extend(known.setdefault(name, len(known)) for known, name in zip(self._names, names, strict=True))
        self._numbers.extend(numbers)
        self._count += 1

    def features(self) -> FeatureColumns:
        """Return the columns."""
        codes = np.array(self._codes, dtype=np.int32).reshape(self._count, len(self._names))
        for column, known in enumerate(self._names):  # by name, not by first appearance
            rank = np.empty(len(known), dtype=np.int32)
            rank[[known[name] for name in sorted(known)]] = np.arange(len(known))
            codes[:, column] = rank[codes[:, column]]
        numbers = np.array(self._numbers, dtype=np.float32).reshape(self._count, self._width)
        return FeatureColumns(numbers, codes, tuple(len(known) for known in self._names))


class RejectedLines:
    """Lines that are left out: how many, and the first few with the reason.

    Attributes:
        lines_read: Lines, good and bad ones.
    """

    def __init__(self) -> None:
        self.lines_read = 0
        self._count = 0
        self._first: list[tuple[int, str]] = []

    def add(self, line: int, why: str, *, lines: int = 1) -> None:
        """Leave out a row."""
        self._count += lines
        if len(self._first) < REMEMBERED:
            self._first.append((line, why))

    def at_most(self, share: float, path: Path) -> Malformed:
        """Return what was left out; raise ConfigError where that is more than a share of the file."""
        malformed = Malformed(self._count, self.lines_read, tuple(self._first))
        if malformed.share > share:
            line, why = self._first[0]
            named = ", ".join(str(number) for number, _ in self._first)
            raise ConfigError(
                f"{path}:{line}: {why}\n  {malformed.bad:,} of {malformed.lines:,} lines are malformed "
                f"({100 * malformed.share:.2g} %; at most {100 * share:.2g} % may be): "
                f"lines {named}{' ...' if malformed.bad > len(self._first) else ''}\n"
                "  mend them, or raise data.malformed in the experiment file"
            )
        return malformed


class Rows:
    """Collects a file's rows.

    Args:
        path: The file.
        most_malformed: Above this share of malformed lines the file is refused.
        features: Collects what is known of each row, beside its time and its label.

    Attributes:
        rejected: The lines that are left out.
    """

    def __init__(self, path: Path, most_malformed: float, features: FeatureRows) -> None:
        self._path, self._most_malformed = path, most_malformed
        self._times, self._labels = array("q"), array("b")
        self._features = features
        self.rejected = RejectedLines()

    def add(self, seconds: int, *, positive: bool) -> None:
        """Take a row's time and label; whoever calls has the features take the rest."""
        self._times.append(seconds)
        self._labels.append(positive)

    def take(self, line: int, cells: Mapping[str, Any], layout: TableLayout) -> None:
        """Take a row by its columns' names, or reject it."""
        try:
            seconds = _seconds(cells[layout.time], layout.time_format)
            positive = _label(cells[layout.label], layout.positive)
            self._features.take(cells, layout)
        except ValueError as error:
            self.rejected.add(line, str(error))
            return
        self.add(seconds, positive=positive)

    def dataset(self) -> Dataset:
        """Return the rows in the order of their time.

        Raises:
            ConfigError: there are none, or too many of them are malformed.
        """
        malformed = self.rejected.at_most(self._most_malformed, self._path)
        if not self._times:
            raise ConfigError(f"{self._path}:1: has no rows")
        seconds = np.array(self._times, dtype=np.int64)
        order = np.argsort(seconds, kind="stable")
        labels = np.array(self._labels, dtype=np.bool_)[order]
        times = seconds[order].astype("datetime64[s]")
        return dataset_of(self._path.name, times, labels, self._features.features(), order, malformed)


def table_rows(path: Path, most_malformed: float, layout: TableLayout, *, keep_text: bool) -> Rows:
    """Return what collects the rows of a table: texts where the layout names a column of them, else columns."""
    if layout.text is not None:
        return Rows(path, most_malformed, TextRows(keep_text=keep_text))
    columns = ColumnRows(numbers=len(layout.numbers), categories=len(layout.categories))
    return Rows(path, most_malformed, columns)


def _seconds(value: object, time_format: str | None) -> int:
    """Return a time as seconds since 1970; times that state a zone in UTC, others as they stand."""
    if isinstance(value, str):
        value = datetime.strptime(value, time_format) if time_format else datetime.fromisoformat(value)
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise ValueError(f"not a time: {value!r:.40}")
    when = value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    return math.floor(when.timestamp())


def _label(value: object, positive: str | None) -> bool:
    text = str(value).strip().lower()
    if text in _MISSING:
        raise ValueError("the label is missing")
    if positive is not None:
        return str(value).strip() == positive
    if text in ("1", "1.0", "true"):
        return True
    if text in ("0", "0.0", "false"):
        return False
    raise ValueError(f"the label must be 0 or 1, not {value!r:.20}; name the positive one as data.positive")


def _number(name: str, value: object) -> float:
    if value is None or str(value).strip().lower() in _MISSING:
        return math.nan
    try:
        number = float(str(value))
    except ValueError:
        raise ValueError(f"{name} is not a number: {value!r:.20}") from None
    if math.isinf(number):
        raise ValueError(f"{name} is infinite")
    return number
