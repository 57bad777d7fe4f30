"""Datasets with a time, read in bounded memory.

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
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

import numpy as np

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.datasets import Dataset, FeatureColumns, dataset_of
from zeus_flows.experiments.capriccio.rows import Rows, TableLayout, TextRows, table_rows
from zeus_flows.experiments.flights.data import FIRST_DAY, load_year

Progress = Callable[[float], None]  # told the share that has been read, 0 to 1
#: Who is told, where no caller says: reading happens deep inside an experiment.
READING: ContextVar[Progress | None] = ContextVar("READING", default=None)

_EVERY: Final = 4096  # rows between two reports of progress
_MONTHS: Final = {name: number for number, name in enumerate(calendar.month_abbr) if name}


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
    texts = TextRows(keep_text=keep_text)
    rows = Rows(path, most_malformed, texts)
    for line, cells in _csv_rows(path, rows, "latin-1", progress):
        try:
            if len(cells) != 6:
                raise ValueError(f"{len(cells)} columns instead of 6")
            if cells[0] not in ("0", "4"):
                raise ValueError(f"the polarity must be 0 or 4, not {cells[0]!r:.20}")
            rows.add(twitter_seconds(cells[2]), positive=cells[0] == "4")
            texts.add(cells[5])
        except ValueError as error:
            rows.rejected.add(line, str(error))
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
    rows = table_rows(path, most_malformed, layout, keep_text=keep_text)
    lines = _csv_rows(path, rows, encoding, progress)
    header = next(lines, (1, []))[1]
    if missing := [name for name in layout.columns if name not in header]:
        raise ConfigError(f"{path}:1: there is no column {missing[0]!r}; there are {', '.join(header) or 'none'}")
    at = {name: header.index(name) for name in layout.columns}
    for line, cells in lines:
        if len(cells) != len(header):
            rows.rejected.add(line, f"{len(cells)} columns instead of {len(header)}")
        else:
            rows.take(line, {name: cells[i] for name, i in at.items()}, layout)
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
    rows = table_rows(path, most_malformed, layout, keep_text=keep_text)
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [name for name in layout.columns if name not in names]:
                raise ConfigError(f"{path}: there is no column {missing[0]!r}; there are {', '.join(names)}")
            total, line = file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=_EVERY, columns=list(layout.columns)):
                for row in batch.to_pylist():
                    line += 1
                    rows.rejected.lines_read = line
                    rows.take(line, row, layout)
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
    return dataset_of("flights", times, year.late[order], features, order)


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


def _csv_rows(path: Path, rows: Rows, encoding: str, progress: Progress | None) -> Iterator[tuple[int, list[str]]]:
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
                    rows.rejected.add(line, str(error), lines=max(1, reader.line_num - line + 1))
                    rows.rejected.lines_read = reader.line_num
                    continue
                except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
                    raise ConfigError(f"{path}:{line}: cannot be read: {error}") from None
                rows.rejected.lines_read = reader.line_num
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
