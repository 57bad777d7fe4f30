"""Datasets with a time, read in bounded memory: what Capriccio's slices are cut from.

Three sources: Sentiment140's official CSV (six quoted columns, no header, latin-1, dates such as `Mon Apr 06 22:19:49
PDT 2009`), any CSV or Parquet file whose columns the experiment file names, and the embedded flights. Files may be
compressed (`.xz`, `.gz`, `.bz2`). Rows are parsed one at a time into flat arrays, words as 32-bit hashes: 1.6 million
tweets take 285 MB at most.

A row that cannot be parsed is counted and left out, with its line; above a stated share the file is refused.
"""

from __future__ import annotations

import bz2
import calendar
import csv
import gzip
import hashlib
import io
import lzma
import math
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.flights.data import FIRST_DAY, load_year

Progress = Callable[[float], None]  # told the share that has been read, 0 to 1
#: Who is told, where no caller says: reading happens deep inside an experiment.
READING: ContextVar[Progress | None] = ContextVar("READING", default=None)
Times = npt.NDArray[np.datetime64]

REMEMBERED: Final = 20  # malformed lines that are named
_EVERY: Final = 4096  # rows between two reports of progress
_WORD: Final = re.compile(r"[a-z0-9']+|[:;=8][-o']?[()\[\]dp/]|[!?]+|<3")
_MONTHS: Final = {name: number for number, name in enumerate(calendar.month_abbr) if name}
_MISSING: Final = frozenset({"", "na", "nan", "null", "none"})


@dataclass(frozen=True, slots=True)
class Malformed:
    """Lines that could not be parsed: how many of how many, and the first few with the reason."""

    bad: int = 0
    lines: int = 0
    first: tuple[tuple[int, str], ...] = ()

    @property
    def share(self) -> float:
        """Share of the lines that is malformed."""
        return self.bad / self.lines if self.lines else 0.0


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts as words: row i has `words[starts[i]:starts[i + 1]]`, each the CRC-32 of a lower-case word.

    `blob` keeps the texts themselves as UTF-8, where a tokenizer of its own needs them; `cuts` are its row bounds.
    """

    words: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.int64]
    blob: bytes = b""
    cuts: npt.NDArray[np.int64] | None = None

    def text(self, row: int) -> str:
        """Return a row's text, where it was kept."""
        assert self.cuts is not None
        return self.blob[self.cuts[row] : self.cuts[row + 1]].decode()


@dataclass(frozen=True, slots=True)
class FeatureColumns:
    """Numbers (NaN where missing) and categories (codes from 0, each below its entry of `sizes`)."""

    numbers: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int32]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Labelled rows in the order of their time.

    Attributes:
        name: What people call it: a file's name, or `flights`.
        digest: Hash of the rows; another digest is other data.
        times: When each row happened, in the zone the source uses; ascending.
        labels: Whether its label is the positive one.
        features: What is known of each row.
        order: The features of row i are at `order[i]`: they stay where they were read.
        malformed: What was left out.
    """

    name: str
    digest: str
    times: Times
    labels: npt.NDArray[np.bool_]
    features: Texts | FeatureColumns
    order: npt.NDArray[np.int64]
    malformed: Malformed = Malformed()

    def __len__(self) -> int:
        return len(self.times)

    def shuffled(self, seed: int) -> Dataset:
        """Return a placebo: the same rows and the same times, dealt to each other at random, so that nothing drifts."""
        deal = np.random.default_rng(seed).permutation(len(self))
        digest = hashlib.sha256(f"{self.digest} shuffled {seed}".encode()).hexdigest()[:16]
        return replace(self, digest=digest, labels=self.labels[deal], order=self.order[deal])


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


def read_sentiment140(
    path: Path, *, most_malformed: float = 0.01, keep_text: bool = False, progress: Progress | None = None
) -> Dataset:
    """Read Sentiment140's official CSV: polarity (0 or 4), id, date, query, user, text.

    Args:
        path: The file, compressed or not.
        most_malformed: Above this share of malformed lines the file is refused.
        keep_text: Keep the texts too.
        progress: Told the share that has been read.

    Raises:
        ConfigError: the file is not there, or too much of it is malformed; the text names file and line.
    """
    rows = _Rows(path, most_malformed, texts=True, keep_text=keep_text)
    for line, cells in _csv_rows(path, rows, "latin-1", progress):
        try:
            if len(cells) != 6:
                raise ValueError(f"{len(cells)} columns instead of 6")
            if cells[0] not in ("0", "4"):
                raise ValueError(f"the polarity must be 0 or 4, not {cells[0]!r:.20}")
            rows.add(twitter_seconds(cells[2]), cells[0] == "4", text=cells[5])
        except ValueError as error:
            rows.reject(line, str(error))
    return rows.dataset()


def read_csv(
    path: Path,
    layout: TableLayout,
    *,
    most_malformed: float = 0.01,
    keep_text: bool = False,
    encoding: str = "utf-8",
    progress: Progress | None = None,
) -> Dataset:
    """Read a CSV file with a header line; see `read_sentiment140` for the arguments."""
    rows = _Rows(path, most_malformed, texts=layout.text is not None, keep_text=keep_text)
    lines = _csv_rows(path, rows, encoding, progress)
    header = next(lines, (1, []))[1]
    if missing := [name for name in layout.columns if name not in header]:
        raise ConfigError(f"{path}:1: there is no column {missing[0]!r}; there are {', '.join(header) or 'none'}")
    at = {name: header.index(name) for name in layout.columns}
    for line, cells in lines:
        if len(cells) != len(header):
            rows.reject(line, f"{len(cells)} columns instead of {len(header)}")
        else:
            rows.add_named(line, {name: cells[i] for name, i in at.items()}, layout)
    return rows.dataset()


def read_parquet(
    path: Path,
    layout: TableLayout,
    *,
    most_malformed: float = 0.01,
    keep_text: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Read a Parquet file batch by batch; lines are rows from 1. See `read_sentiment140` for the arguments."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    _must_exist(path)
    rows = _Rows(path, most_malformed, texts=layout.text is not None, keep_text=keep_text)
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [name for name in layout.columns if name not in names]:
                raise ConfigError(f"{path}: there is no column {missing[0]!r}; there are {', '.join(names)}")
            total, line = file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=_EVERY, columns=list(layout.columns)):
                for row in batch.to_pylist():
                    line += 1
                    rows.lines = line
                    rows.add_named(line, row, layout)
                if progress is not None:
                    progress(line / total)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet: {error}") from None
    return rows.dataset()


def read_flights() -> Dataset:
    """Return the embedded flights of 2013 with what is known an hour before departure; see `flights.data`."""
    year = load_year()
    minutes = year.day.astype(np.int64) * 1440 + year.numbers[:, 0].astype(np.int64)
    order = np.argsort(minutes, kind="stable")
    angle = year.numbers[:, :1] * np.float32(2.0 * np.pi / 1440.0)
    numbers = np.concatenate([year.numbers, np.sin(angle), np.cos(angle)], axis=1)
    codes = np.column_stack([year.day % 7, year.codes]).astype(np.int32)
    features = FeatureColumns(numbers, codes, tuple(int(column.max()) + 1 for column in codes.T))
    times = np.datetime64(FIRST_DAY, "s") + minutes[order].astype("timedelta64[m]")
    return _finished("flights", times, year.late[order], features, order)


def twitter_seconds(text: str) -> int:
    """Return a tweet's date as seconds since 1970 in its own zone, which is PDT throughout Sentiment140.

    >>> datetime.fromtimestamp(twitter_seconds("Mon Apr 06 22:19:49 PDT 2009"), UTC).isoformat()
    '2009-04-06T22:19:49+00:00'

    Raises:
        ValueError: that is no such date.
    """
    parts = text.split()
    if len(parts) != 6 or parts[4] != "PDT" or parts[1] not in _MONTHS:
        raise ValueError(f"not a date such as 'Mon Apr 06 22:19:49 PDT 2009': {text!r:.40}")
    hour, minute, second = (int(part) for part in parts[3].split(":"))
    when = datetime(int(parts[5]), _MONTHS[parts[1]], int(parts[2]), hour, minute, second, tzinfo=UTC)
    return int(when.timestamp())


def words(text: str) -> list[int]:
    """Return a text's words, emoticons and runs of marks as 32-bit hashes; the same in every process.

    >>> len(words("@user I can't wait!! :)"))
    6
    """
    return [zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())]


class _Rows:
    """Collects rows into flat arrays."""

    def __init__(self, path: Path, most_malformed: float, *, texts: bool, keep_text: bool) -> None:
        self._path, self._most_malformed = path, most_malformed
        self._texts, self._keep_text = texts, keep_text
        self._times, self._labels = array("q"), array("b")
        self._words, self._ends = array("I"), array("q", [0])
        self._blob, self._cuts = bytearray(), array("q", [0])
        self._numbers, self._codes = array("f"), array("i")
        self._names: list[dict[str, int]] = []
        self._bad: list[tuple[int, str]] = []
        self._bad_count = 0
        self._width = (0, 0)
        self.lines = 0

    def add(self, seconds: int, positive: bool, *, text: str) -> None:
        """Take a row whose feature is a text."""
        self._words.extend(words(text))
        self._ends.append(len(self._words))
        if self._keep_text:
            self._blob += text.encode()
            self._cuts.append(len(self._blob))
        self._times.append(seconds)
        self._labels.append(positive)

    def add_named(self, line: int, cells: Mapping[str, Any], layout: TableLayout) -> None:
        """Take a row by its columns' names, or reject it."""
        try:
            seconds = _seconds(cells[layout.time], layout.time_format)
            positive = _label(cells[layout.label], layout.positive)
            if layout.text is not None:
                self.add(seconds, positive, text=str(cells[layout.text] or ""))
                return
            numbers = [_number(name, cells[name]) for name in layout.numbers]
        except ValueError as error:
            self.reject(line, str(error))
            return
        if not self._names:
            self._names = [{} for _ in layout.categories]
            self._width = (len(layout.numbers), len(layout.categories))
        names = [str(cells[name]) for name in layout.categories]
        self._codes.extend(known.setdefault(name, len(known)) for known, name in zip(self._names, names, strict=True))
        self._numbers.extend(numbers)
        self._times.append(seconds)
        self._labels.append(positive)

    def reject(self, line: int, why: str, *, lines: int = 1) -> None:
        """Leave out a row."""
        self._bad_count += lines
        if len(self._bad) < REMEMBERED:
            self._bad.append((line, why))

    def dataset(self) -> Dataset:
        """Return the rows in the order of their time."""
        malformed = Malformed(self._bad_count, self.lines, tuple(self._bad))
        if malformed.share > self._most_malformed:
            line, why = self._bad[0]
            raise ConfigError(
                f"{self._path}:{line}: {why}\n  {malformed.bad:,} of {malformed.lines:,} lines are malformed "
                f"({100 * malformed.share:.2g} %; at most {100 * self._most_malformed:.2g} % may be): "
                f"lines {', '.join(str(n) for n, _ in self._bad)}{' ...' if malformed.bad > len(self._bad) else ''}\n"
                "  mend them, or raise data.malformed in the experiment file"
            )
        if not self._times:
            raise ConfigError(f"{self._path}:1: has no rows")
        seconds = np.array(self._times, dtype=np.int64)
        order = np.argsort(seconds, kind="stable")
        features: Texts | FeatureColumns
        if self._texts:
            cuts = np.array(self._cuts, dtype=np.int64) if self._keep_text else None
            features = Texts(
                np.array(self._words, dtype=np.uint32), np.array(self._ends, dtype=np.int64), bytes(self._blob), cuts
            )
        else:
            features = self._columns()
        labels = np.array(self._labels, dtype=np.bool_)[order]
        times = seconds[order].astype("datetime64[s]")
        return _finished(self._path.name, times, labels, features, order, malformed)

    def _columns(self) -> FeatureColumns:
        n = len(self._times)
        codes = np.array(self._codes, dtype=np.int32).reshape(n, self._width[1])
        for column, known in enumerate(self._names):  # by name, not by first appearance
            rank = np.empty(len(known), dtype=np.int32)
            rank[[known[name] for name in sorted(known)]] = np.arange(len(known))
            codes[:, column] = rank[codes[:, column]]
        numbers = np.array(self._numbers, dtype=np.float32).reshape(n, self._width[0])
        return FeatureColumns(numbers, codes, tuple(len(known) for known in self._names))


def _finished(
    name: str,
    times: Times,
    labels: npt.NDArray[np.bool_],
    features: Texts | FeatureColumns,
    order: npt.NDArray[np.int64],
    malformed: Malformed | None = None,
) -> Dataset:
    digest = hashlib.sha256()
    parts: Sequence[Any] = (
        (features.words, features.starts) if isinstance(features, Texts) else (features.numbers, features.codes)
    )
    for part in (times.astype(np.int64), labels, order, *parts):
        digest.update(np.ascontiguousarray(part).data)
    if isinstance(features, Texts):
        digest.update(features.blob)  # where texts are kept, they count and not their words alone
    return Dataset(name, digest.hexdigest()[:16], times, labels, features, order, malformed or Malformed())


def _csv_rows(path: Path, rows: _Rows, encoding: str, progress: Progress | None) -> Iterator[tuple[int, list[str]]]:
    """Yield the line on which each row begins and its cells; what the parser cannot read is rejected."""
    _must_exist(path)
    with path.open("rb") as raw:
        size = path.stat().st_size or 1
        with _opened(raw, path) as plain, io.TextIOWrapper(plain, encoding=encoding, newline="") as text:
            reader = csv.reader(text, strict=True)
            while True:
                line = reader.line_num + 1
                try:
                    cells = next(reader)
                except StopIteration:
                    break
                except csv.Error as error:
                    rows.reject(line, str(error), lines=max(1, reader.line_num - line + 1))
                    rows.lines = reader.line_num
                    continue
                except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
                    raise ConfigError(f"{path}:{line}: cannot be read: {error}") from None
                rows.lines = reader.line_num
                if cells:
                    yield line, cells
                if progress is not None and line % _EVERY == 0:
                    progress(raw.tell() / size)
    if progress is not None:
        progress(1.0)


def _opened(raw: IO[bytes], path: Path) -> IO[bytes]:
    match path.suffix:
        case ".xz" | ".lzma":
            return lzma.open(raw)
        case ".gz":
            return gzip.open(raw)  # type: ignore[return-value]
        case ".bz2":
            return bz2.open(raw)
        case _:
            return io.BufferedReader(raw)  # type: ignore[type-var]


def _must_exist(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give its path in the experiment file, or with --data")


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
