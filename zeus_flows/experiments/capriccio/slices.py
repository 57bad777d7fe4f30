"""Capriccio (section 6.4): a dataset sorted by time, and a window over it that moves forward day by day.

The paper's recipe: 1.6 million tweets, a window of 500,000, moved by a day at a time: 38 slices. Its text says that
empty dates are skipped, to avoid identical slices; by that recipe 38 slices come out only where they repeat (29
otherwise, on the masked sample). `empty` offers both.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import date
from typing import Literal

import numpy as np
import numpy.typing as npt

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.datasets import Dataset, Times

Empty = Literal["repeat", "skip"]


@dataclass(frozen=True, slots=True)
class SliceWindow:
    """How slices are cut: exactly one of `rows`, `fraction` (of all rows) and `days`.

    Attributes:
        stride_days: Days by which each slice begins later than the one before.
        start: Where the first slice begins; None: with the first row's day.
        empty: What becomes of a slice that holds the same rows as the one before it, because nothing happened on
            the days between: it is there again (`repeat`), or left out (`skip`).
        most: At most so many slices.
    """

    rows: int | None = None
    fraction: float | None = None
    days: int | None = None
    stride_days: int = 1
    start: date | None = None
    empty: Empty = "repeat"
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows `first` up to but not including `end` of a dataset.

    Attributes:
        number: From 1: the recurrence that trains on it.
        day: The date the window begins at.
        began, ended: Times of its first and its last row.
        positive: Share of positive labels.
        overlap: Share of its rows that the slice before it has too; 0 for the first.
    """

    number: int
    day: date
    first: int
    end: int
    began: np.datetime64
    ended: np.datetime64
    positive: float
    overlap: float

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.end - self.first

    @property
    def key(self) -> str:
        """Names its rows: slices that repeat have one key."""
        return f"{self.first}-{self.end}"

    @property
    def majority(self) -> float:
        """The accuracy of always guessing the more frequent label."""
        return max(self.positive, 1.0 - self.positive)


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of a slice to train on and to validate on, drawn once: every attempt at a slice sees the same."""

    training: npt.NDArray[np.int64]
    validation: npt.NDArray[np.int64]


def cut(dataset: Dataset, window: SliceWindow) -> tuple[Slice, ...]:
    """Return the slices of a dataset.

    A window in rows begins with the first row of its date and has always as many; one in days has what its days
    have. The last slice is the last that is whole.

    Raises:
        ConfigError: the window is larger than the data, or leaves nothing.
    """
    size = _size(dataset, window)
    last_day = dataset.times[-1].astype("datetime64[D]")
    day = np.datetime64(window.start) if window.start else dataset.times[0].astype("datetime64[D]")
    slices: list[Slice] = []
    while window.most is None or len(slices) < window.most:
        first, end = _bounds(dataset.times, day, size, window.days)
        if end > len(dataset) or (window.days is not None and day + window.days - 1 > last_day):
            break
        before = slices[-1] if slices else None
        same = before is not None and (before.first, before.end) == (first, end)
        if end > first and not (same and window.empty == "skip"):
            slices.append(_slice(dataset, len(slices) + 1, day, first, end, before))
        day = day + window.stride_days
    if not slices:
        begins = window.start or dataset.times[0].astype("datetime64[D]")
        raise ConfigError(
            f"{dataset.name} has no whole slice from {begins} on: it has {len(dataset):,} rows from {dataset.times[0]} "
            f"to {dataset.times[-1]}; make the window smaller or the start earlier"
        )
    return tuple(slices)


def split(dataset: Dataset, part: Slice, *, train_rows: int, validation_rows: int) -> Split:
    """Return which rows of a slice to train and to validate on; the same arguments always give the same rows.

    Whether a row trains or validates is drawn once for all slices: neighbouring slices, which share most rows, share
    the split too, so that what changes between them is the data and not the draw. Validation holds out rows of the
    same days: it says how well the slice is explained, not how well the next one is foretold.
    """
    seed = int.from_bytes(hashlib.sha256(dataset.digest.encode()).digest()[:8], "big")
    draws = np.random.default_rng(seed).random(len(dataset))[part.first : part.end]
    rows = part.first + np.argsort(draws, kind="stable")
    return Split(rows[validation_rows : validation_rows + train_rows], rows[:validation_rows])


def sizes(slices: tuple[Slice, ...], *, validation: float, most_rows: int | None = None) -> tuple[int, int]:
    """Return how many rows every slice trains and validates on: what the smallest slice allows.

    All slices train on equally many, so that an epoch costs the same on each and only the epochs can drift.

    Raises:
        ConfigError: the smallest slice is too small.
    """
    smallest = min(slices, key=lambda s: s.rows)
    held_out = round(validation * smallest.rows)
    training = smallest.rows - held_out
    if most_rows is not None:
        training = min(training, most_rows)
    if min(held_out, training) < 10:
        raise ConfigError(f"slice {smallest.number} ({smallest.day}) has {smallest.rows} rows: too few to learn from")
    return training, held_out


def _size(dataset: Dataset, window: SliceWindow) -> int | None:
    if sum(x is not None for x in (window.rows, window.fraction, window.days)) != 1:
        raise ConfigError("slices need exactly one of rows, fraction and days")
    if window.fraction is not None:
        return int(window.fraction * len(dataset))
    return window.rows


def _bounds(times: Times, day: np.datetime64, size: int | None, days: int | None) -> tuple[int, int]:
    first = int(np.searchsorted(times, day))
    if size is not None:
        return first, first + size
    assert days is not None
    return first, int(np.searchsorted(times, day + days))


def _slice(dataset: Dataset, number: int, day: np.datetime64, first: int, end: int, before: Slice | None) -> Slice:
    shared = 0 if before is None else max(0, min(end, before.end) - max(first, before.first))
    return Slice(
        number=number,
        day=day.astype(object),
        first=first,
        end=end,
        began=dataset.times[first],
        ended=dataset.times[end - 1],
        positive=float(dataset.labels[first:end].mean()),
        overlap=shared / (end - first),
    )
