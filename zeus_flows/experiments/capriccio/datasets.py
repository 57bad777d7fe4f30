"""Labelled rows with a time, as arrays: what Capriccio's slices are cut from. `dataset_files` reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.datetime64]


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


def dataset_of(
    name: str,
    times: Times,
    labels: npt.NDArray[np.bool_],
    features: Texts | FeatureColumns,
    order: npt.NDArray[np.int64],
    malformed: Malformed | None = None,
) -> Dataset:
    """Return rows, in the order of their time, with the digest of what they hold; see `Dataset`."""
    digest = hashlib.sha256()
    parts: Sequence[Any] = (
        (features.words, features.starts) if isinstance(features, Texts) else (features.numbers, features.codes)
    )
    for part in (times.astype(np.int64), labels, order, *parts):
        digest.update(np.ascontiguousarray(part).data)
    if isinstance(features, Texts):
        digest.update(features.blob)  # where texts are kept, they count and not their words alone
    return Dataset(name, digest.hexdigest()[:16], times, labels, features, order, malformed or Malformed())
