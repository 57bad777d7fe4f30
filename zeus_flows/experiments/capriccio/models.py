"""What is trained on a slice: a bag of hashed word embeddings, a small network, or BERT from a local directory.

The first two take a CPU a fraction of a second per slice, so that every batch size can be trained on every slice
over several seeds. BERT needs the package `transformers` and, unless it is a tiny one, a GPU.

Whatever the target is, four scores are kept after every epoch: labels shift as well, and accuracy alone would then
show the shift of the labels as if it were learning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.bert import Bert, Tokenizer, require
from zeus_flows.experiments.capriccio.datasets import Dataset, FeatureColumns, Texts
from zeus_flows.experiments.capriccio.slices import Split
from zeus_flows.experiments.flights.training import Batches, logistic_log_loss

_GOLDEN: Final = np.uint32(0x9E3779B1)  # mixes two words' hashes into one of the pair
_SCORED_AT_ONCE: Final = {"bag": 4096, "mlp": 4096, "bert": 256}  # rows; what a large model makes of them fills memory


class ModelSection(BaseModel):
    """The model, as the experiment file names it.

    Attributes:
        kind: `bag` for texts, `mlp` for columns, `bert` for texts with `transformers`.
        buckets: Rows of the embedding table that hashed words share (`bag`).
        dimensions: Width of an embedding (`bag`).
        words: At most so many words of a text count (`bag`), or tokens with the special ones at both ends (`bert`).
        pairs: Whether pairs of neighbouring words count too (`bag`).
        hidden: Width of the hidden layer (`mlp`).
        directory: Where a pretrained model and its tokenizer are (`bert`); nothing is downloaded.
        baseline: What `log_loss_ratio` divides by: the log loss of stating the training labels' share (`majority`),
            or that of a logistic regression (`logistic`; `mlp` only), so that hard and easy slices share a target.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["bag", "mlp", "bert"]
    buckets: int = Field(default=4096, ge=16)
    dimensions: int = Field(default=8, ge=1)
    words: int = Field(default=24, ge=1)
    pairs: bool = True
    hidden: int = Field(default=64, ge=1)
    directory: Path | None = None
    baseline: Literal["majority", "logistic"] = "majority"

    @model_validator(mode="after")
    def _is_whole(self) -> ModelSection:
        if self.kind == "bert" and self.directory is None:
            raise ValueError("directory is missing: where is the pretrained model?")
        return self

    def check(self) -> None:
        """Look at the model as far as that is quick, before data are read for it.

        Raises:
            ConfigError: it cannot be used.
        """
        if self.kind == "bert":
            Tokenizer(require(self.directory), self.words)


class Scores(NamedTuple):
    """How good a model is on the rows held out.

    `balanced_accuracy` is the mean of the accuracies on either label: 0.5 for any constant guess, however the labels
    are balanced. `log_loss_ratio` is below 1 where the model beats the baseline.
    """

    accuracy: float
    balanced_accuracy: float
    log_loss: float
    log_loss_ratio: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """A slice as tensors, with the log loss that a model has to beat."""

    x: Tensor
    y: Tensor
    x_validation: Tensor
    y_validation: Tensor
    baseline_log_loss: float


def prepare(dataset: Dataset, rows: Split, model: ModelSection) -> Prepared:
    """Return the rows of a slice as the model wants them.

    Raises:
        ConfigError: the model is for other features than the dataset has, or its directory is of no use.
    """
    y, y_validation = (torch.from_numpy(dataset.labels[part].astype(np.float32)) for part in _parts(rows))
    features = dataset.features
    if isinstance(features, FeatureColumns) != (model.kind == "mlp"):
        has = "columns" if isinstance(features, FeatureColumns) else "texts"
        raise ConfigError(f"model.kind {model.kind} does not fit {dataset.name}, which has {has}; use mlp for columns")
    if isinstance(features, FeatureColumns):
        x, x_validation = _columns(features, *(dataset.order[part] for part in _parts(rows)))
    elif model.kind == "bag":
        x, x_validation = (_bags(features, dataset.order[part], model) for part in _parts(rows))
    else:
        tokenizer = Tokenizer(require(model.directory), model.words)
        texts = ([features.text(int(row)) for row in dataset.order[part]] for part in _parts(rows))
        x, x_validation = (tokenizer.encode(part) for part in texts)
    share = min(max(float(y.mean()), 1e-3), 1.0 - 1e-3)
    positive = float(y_validation.mean())
    baseline = -(positive * math.log(share) + (1.0 - positive) * math.log(1.0 - share))
    if model.baseline == "logistic" and model.kind == "mlp":
        baseline = logistic_log_loss(x.numpy(), y.numpy(), x_validation.numpy(), y_validation.numpy())
    return Prepared(x, y, x_validation, y_validation, baseline)


class Learner:
    """One training run: batches, steps and scores; the same arguments give the same run on one machine's CPU.

    Args:
        data: What to learn.
        model: What learns.
        batch_size: Samples a step.
        learning_rate: Of Adam.
        seed: Of the initial weights, the order of the samples and the dropout.
    """

    def __init__(
        self, data: Prepared, model: ModelSection, *, batch_size: int, learning_rate: float, seed: int
    ) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._data, self._kind, self._seed, self._steps = data, model.kind, seed, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = _build(data, model).to(self._device).train()
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=learning_rate, fused=True)
        self._log_loss = nn.BCEWithLogitsLoss()
        x, y = (part.to(self._device) for part in (data.x, data.y))
        self.batches = Batches(x, y, batch_size=batch_size, seed=seed)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Learn from one batch."""
        features, positive = batch
        self._optimizer.zero_grad()
        with self._dropout():
            self._log_loss(self._model(features), positive).backward()
        self._optimizer.step()
        self._steps += 1

    def scores(self) -> Scores:
        """Return how good the model is now."""
        return self.scores_on(self._data)

    def scores_on(self, data: Prepared) -> Scores:
        """Return how good the model is on the held-out rows of some slice."""
        self._model.eval()
        with torch.no_grad():
            some = torch.split(data.x_validation, _SCORED_AT_ONCE[self._kind])
            parts = [self._model(part.to(self._device)).cpu() for part in some]
        self._model.train()
        return score(torch.cat(parts), data.y_validation, data.baseline_log_loss)

    def epochs(self) -> Iterator[Scores]:
        """Train for as long as the caller asks, and yield the scores after every epoch."""
        while True:
            for batch in self.batches:
                self.step(batch)
            yield self.scores()

    @contextmanager
    def _dropout(self) -> Iterator[None]:
        """Let dropout, which draws from torch's global generators, depend on this run's seed and step alone."""
        if self._kind != "bert":
            yield
            return
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if self._device == "cuda" else []):
            torch.manual_seed(self._seed + self._steps)
            yield


def score(logits: Tensor, labels: Tensor, baseline_log_loss: float) -> Scores:
    """Return the scores of predictions.

    >>> score(torch.tensor([2.0, -1.0, 1.0]), torch.tensor([1.0, 0.0, 0.0]), 1.0).balanced_accuracy
    0.75
    """
    right = (logits > 0) == (labels > 0.5)
    classes = [right[labels > 0.5], right[labels <= 0.5]]
    loss = float(nn.functional.binary_cross_entropy_with_logits(logits, labels))
    return Scores(
        accuracy=float(right.float().mean()),
        balanced_accuracy=float(np.mean([float(part.float().mean()) for part in classes if len(part)])),
        log_loss=loss,
        log_loss_ratio=loss / baseline_log_loss,
    )


class _Bag(nn.Module):
    """The sum of a text's embeddings, then one linear unit. Row 0 is padding."""

    def __init__(self, buckets: int, dimensions: int) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(buckets + 1, dimensions, mode="sum", padding_idx=0)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.out = nn.Linear(dimensions, 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.out(self.embed(ids)).flatten()
        return logits


def _build(data: Prepared, model: ModelSection) -> nn.Module:
    match model.kind:
        case "bag":
            return _Bag(model.buckets, model.dimensions)
        case "mlp":
            layers = (nn.Linear(data.x.shape[1], model.hidden), nn.ReLU(), nn.Linear(model.hidden, 1), nn.Flatten(0))
            return nn.Sequential(*layers)
        case "bert":
            return Bert(require(model.directory))


def _parts(rows: Split) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return rows.training, rows.validation


def _columns(
    features: FeatureColumns, training: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Return standardised numbers (missing ones at the mean) and one-hot categories, by the training rows alone."""
    with np.errstate(invalid="ignore"):
        known = features.numbers[training]
        mean = np.nan_to_num(np.nanmean(known, axis=0)) if known.shape[1] else np.zeros(0)
        spread = np.maximum(np.nan_to_num(np.nanstd(known, axis=0)), 1e-3) if known.shape[1] else np.ones(0)

    def encode(rows: npt.NDArray[np.int64]) -> Tensor:
        numbers = np.nan_to_num((features.numbers[rows] - mean) / spread).clip(-4.0, 4.0)
        one_hot = [np.eye(size, dtype=np.float32)[features.codes[rows, i]] for i, size in enumerate(features.sizes)]
        return torch.from_numpy(np.concatenate([numbers, *one_hot], axis=1, dtype=np.float32))

    return encode(training), encode(validation)


def _bags(features: Texts, rows: npt.NDArray[np.int64], model: ModelSection) -> Tensor:
    """Return a row of bucket numbers (from 1) per text, padded with 0: the first words, and pairs of them."""
    width = 2 * model.words if model.pairs else model.words
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        words = features.words[features.starts[row] : features.starts[row + 1]][: model.words]
        ids[i, : len(words)] = words % model.buckets + 1
        if model.pairs and len(words) > 1:
            pairs = words[:-1] * _GOLDEN ^ words[1:]  # wraps around, as hashes may
            ids[i, model.words : model.words + len(pairs)] = pairs % model.buckets + 1
    return torch.from_numpy(ids)
