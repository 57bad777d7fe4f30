"""Learning curves: what every batch size does on every slice, trained once and looked up after.

On a simulated GPU training decides only how many epochs are needed; energy and time come from the model. A run is
fixed by slice, batch size and seed, so each is trained once, to the target, in as many processes as there are cores,
and every policy looks the same runs up: differences between policies are then differences between decisions.
Curves are appended to a file of the cache as they come; a process that is killed loses the one it was at.

On a real GPU nothing is looked up: every attempt trains.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.datasets import Dataset
from zeus_flows.experiments.capriccio.file import ExperimentFile, load_experiment
from zeus_flows.experiments.capriccio.models import Learner, Prepared, Scores, prepare
from zeus_flows.experiments.capriccio.slices import split
from zeus_flows.experiments.fan_out import FanOut
from zeus_flows.experiments.flights.training import one_thread
from zeus_flows.settings import read_settings

LAYOUT = 1  # of the file; a change makes old files unread
PLACEBO_SEED = 1

Curve = tuple[Scores, ...]
FillProgress = Callable[[int, int], None]  # told how many cells are there, and of how many


class Cell(NamedTuple):
    """One training run: which rows, at which batch size, with which of the seeds."""

    rows: str
    batch_size: int
    seed: int


class CurveSession(Protocol):
    """The part of a training session that is used here."""

    batch_size: int
    recurrence: int
    seed: int

    def epochs(self) -> Iterator[int]: ...  # noqa: D102
    def steps(self, loader: Iterable[Any]) -> Iterator[Any]: ...  # noqa: D102
    def report_metric(self, value: float) -> None: ...  # noqa: D102


class CellTrainer:
    """Trains cells of one experiment in this process.

    Attributes:
        experiment: What is trained.
        dataset: On what; the experiment's, or its placebo.
        slices: Its slices.
        job: What all contenders share.
        train_rows: Samples in an epoch.
    """

    def __init__(self, experiment: ExperimentFile, dataset: Dataset) -> None:
        self.experiment, self.dataset = experiment, dataset
        self.slices = experiment.cut(dataset)
        self.job = experiment.job_file(next(iter(experiment.contenders)))
        self.train_rows, self._validation_rows = experiment.sizes(self.slices)
        self._by_key = {part.key: part for part in self.slices}
        self._prepared: dict[str, Prepared] = {}

    def cells(self) -> list[Cell]:
        """Return every cell, in the order of the slices; slices that repeat share theirs."""
        arms, seeds = sorted(self.job.batch_sizes), range(self.experiment.science.seeds)
        return [Cell(key, b, seed) for key in self._by_key for b in arms for seed in seeds]

    def learner(self, cell: Cell) -> Learner:
        """Return a training run that has not begun."""
        seed = int.from_bytes(hashlib.sha256(f"{cell.rows} {cell.seed}".encode()).digest()[:4], "big")
        return Learner(
            self.data(cell.rows),
            self.experiment.model,
            batch_size=cell.batch_size,
            learning_rate=self.job.learning_rate.at(cell.batch_size, self.job.default_batch_size),
            seed=seed,
        )

    def curve(self, cell: Cell) -> Curve:
        """Train a cell until the target, or for the job's max_epochs, on one thread."""
        target, scores = self.job.target, []
        with one_thread():
            for now in self.learner(cell).epochs():
                scores.append(now)
                value = getattr(now, target.metric)
                if target.reached(value) or math.isnan(value) or len(scores) >= self.job.max_epochs:
                    break
        return tuple(scores)

    def trained(self, cell: Cell, epochs: int) -> Learner:
        """Return a training run after so many epochs."""
        learner = self.learner(cell)
        with one_thread():
            for _ in zip(range(epochs), learner.epochs(), strict=False):
                pass
        return learner

    def data(self, key: str) -> Prepared:
        """Return a slice's rows as tensors; the last few are kept."""
        if key not in self._prepared:
            if len(self._prepared) > 1:
                self._prepared.pop(next(iter(self._prepared)))
            rows = split(
                self.dataset, self._by_key[key], train_rows=self.train_rows, validation_rows=self._validation_rows
            )
            self._prepared[key] = prepare(self.dataset, rows, self.experiment.model)
        return self._prepared[key]


class Curves:
    """The curves of an experiment, on disk and in memory.

    Args:
        experiment: What is trained.
        dataset: On what.
        folder: Where the file is.
        placebo: Whether to deal rows and times to each other at random first.

    Attributes:
        trained: Scores of the attempts that trained on a real GPU in this process, by recurrence and batch size.
    """

    def __init__(self, experiment: ExperimentFile, dataset: Dataset, folder: Path, *, placebo: bool = False) -> None:
        self.trainer = CellTrainer(experiment, dataset.shuffled(PLACEBO_SEED) if placebo else dataset)
        self.trained: dict[tuple[int, int], Curve] = {}
        key = f"{LAYOUT} {experiment.digest(self.trainer.dataset)} {self.trainer.job.fingerprint}"
        self.path = folder / f"capriccio-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"
        self._placebo = placebo
        self._known: dict[Cell, Curve] = dict(_read(self.path))

    def get(self, cell: Cell) -> Curve:
        """Return a curve, training it now where nobody has."""
        found = self._known.get(cell)
        return self._keep(cell, self.trainer.curve(cell)) if found is None else found

    def scores(self, recurrence: int, batch_size: int, seed: int, epochs: int) -> Scores | None:
        """Return the scores an attempt ended with; None where it trained in a process that is gone."""
        curve = self.trained.get((recurrence, batch_size), ())
        if self.trainer.experiment.simulated:
            key = self.trainer.slices[recurrence - 1].key
            curve = self.get(Cell(key, batch_size, self.draw(seed)))
        return curve[min(epochs, len(curve)) - 1] if curve and epochs else None

    def draw(self, seed: int) -> int:
        """Return which of the seeds an attempt trains with: the same for all contenders."""
        return seed % self.trainer.experiment.science.seeds

    def fill(self, progress: FillProgress = lambda _done, _all: None, fan_out: FanOut | None = None) -> None:
        """Train everything that is missing.

        Args:
            progress: Told how far it is.
            fan_out: Who trains; None: processes of its own. All seeds of a batch size on a slice are one piece.
        """
        cells = self.trainer.cells()
        missing = [cell for cell in cells if cell not in self._known]
        progress(len(cells) - len(missing), len(cells))
        if not missing:
            return
        experiment = self.trainer.experiment
        if fan_out is not None:
            pieces = groupby(missing, key=lambda cell: (cell.rows, cell.batch_size))

            def told(piece: CellsToTrain, curves: list[Curve]) -> None:
                for cell, curve in zip(piece.cells, curves, strict=True):
                    self._keep(cell, curve)
                progress(sum(cell in self._known for cell in cells), len(cells))

            fan_out(train_piece, [CellsToTrain(experiment, self._placebo, tuple(its)) for _, its in pieces], told)
            return
        pool = ProcessPoolExecutor(
            min(experiment.science.workers, len(missing)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(experiment, self._placebo),
        )
        try:
            futures = {pool.submit(_train_cell, cell): cell for cell in missing}
            for done, future in enumerate(as_completed(futures), start=len(cells) - len(missing) + 1):
                self._keep(futures[future], future.result())
                progress(done, len(cells))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _keep(self, cell: Cell, curve: Curve) -> Curve:
        line = json.dumps([*cell, [[round(value, 6) for value in scores] for scores in curve]]) + "\n"
        self._known[cell] = kept = _parse(line)[1]  # what a later process will read, to the last digit
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="ascii") as file:
            file.write(line)
        return kept


@lru_cache(maxsize=2)
def open_curves(experiment: str, data: str | None = None) -> Curves:
    """Return the curves of an experiment file, read once per process; `data` is as `load_experiment` has it."""
    file = load_experiment(Path(experiment), data=None if data is None else Path(data))
    file.model.check()
    dataset = file.data.read(keep_text=file.model.kind == "bert")
    return Curves(file, dataset, read_settings().cache_dir)


def train(session: CurveSession, *, experiment: str, data: str | None = None) -> None:
    """Train on the slice of this recurrence: the train function of the contenders' jobs.

    On a simulated GPU the curve is looked up, and only the steps are counted; on a real one it trains.

    Args:
        session: Says recurrence, batch size and seed; is told the metric.
        experiment: Path of the experiment file.
        data: Path of the data, whatever the experiment file says.
    """
    curves = open_curves(experiment, data)
    trainer = curves.trainer
    if session.recurrence > len(trainer.slices):
        raise ConfigError(
            f"{experiment}: has {len(trainer.slices)} slices; there is none for recurrence {session.recurrence}"
        )
    cell = Cell(trainer.slices[session.recurrence - 1].key, session.batch_size, curves.draw(session.seed))
    metric = trainer.job.target.metric
    if trainer.experiment.simulated:
        curve = curves.get(cell)
        for epoch in session.epochs():
            for _ in session.steps(_Counted(trainer.train_rows, session.batch_size)):
                pass
            session.report_metric(getattr(curve[epoch - 1], metric))
        return
    learner = trainer.learner(cell._replace(seed=session.seed))
    scores: list[Scores] = []
    for _ in session.epochs():
        for batch in session.steps(learner.batches):
            learner.step(batch)
        scores.append(learner.scores())
        session.report_metric(getattr(scores[-1], metric))
    curves.trained[session.recurrence, session.batch_size] = tuple(scores)


class _Counted:
    """A loader that yields as many batches as there would be, and nothing in them."""

    def __init__(self, rows: int, batch_size: int) -> None:
        self.dataset = range(rows)
        self._steps = math.ceil(rows / batch_size)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._steps))


def _read(path: Path) -> Iterator[tuple[Cell, Curve]]:
    """Yield the curves of a file; a line that a killed process cut short is no curve."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield _parse(line)
        except (ValueError, TypeError, IndexError):
            continue


def _parse(line: str) -> tuple[Cell, Curve]:
    rows, batch_size, seed, curve = json.loads(line)
    return Cell(str(rows), int(batch_size), int(seed)), tuple(Scores(*map(float, scores)) for scores in curve)


@dataclass(frozen=True)
class CellsToTrain:
    """Cells that are trained together, wherever that is; the data are there at the same path."""

    experiment: ExperimentFile
    placebo: bool
    cells: tuple[Cell, ...]


_one_at_a_time = threading.Lock()  # torch has one generator of random numbers for all threads
_last: dict[tuple[str, bool], CellTrainer] = {}  # what this process trained last


def train_piece(piece: CellsToTrain) -> list[Curve]:
    """Train cells; the same wherever that is done."""
    what = (piece.experiment.model_dump_json(), piece.placebo)
    with _one_at_a_time:
        if what not in _last:
            _last.clear()
            _last[what] = _trainer(piece.experiment, placebo=piece.placebo)
        return [_last[what].curve(cell) for cell in piece.cells]


def _trainer(experiment: ExperimentFile, *, placebo: bool) -> CellTrainer:
    dataset = experiment.data.read(keep_text=experiment.model.kind == "bert")
    return CellTrainer(experiment, dataset.shuffled(PLACEBO_SEED) if placebo else dataset)


_worker: CellTrainer | None = None  # in a worker process: what it trains


def _begin_worker(experiment: ExperimentFile, placebo: bool) -> None:
    global _worker
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    _worker = _trainer(experiment, placebo=placebo)


def _train_cell(cell: Cell) -> Curve:
    assert _worker is not None
    return _worker.curve(cell)


def _die_with(parent: int) -> None:
    """End this process when the one that started it is gone: a killed experiment leaves nothing behind."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
