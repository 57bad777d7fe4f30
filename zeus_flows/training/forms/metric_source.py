"""Where a command's metric comes from: its output, a file, or its MLflow run. Each value ends an epoch."""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from zeus_flows.errors import ConfigError
from zeus_flows.job_sections.train_section import MetricSource

if TYPE_CHECKING:
    from zeus_flows.training.forms.script_runs import AttemptRun

#: Seconds between looks at a file, and at MLflow.
_FILE_S: Final = 0.1
_MLFLOW_S: Final = 2.0
_FIRST_NUMBER: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf(inity)?)\b", re.IGNORECASE)


class MetricReader(Protocol):
    """Finds the values of a metric, in order.

    Attributes:
        found: How many there were.
        text: Where they are looked for, for people.
    """

    found: int
    text: str

    def value(self, line: str | None, *, last: bool = False) -> float | None:
        """Return the next value, given a line of output or None; None where there is none yet.

        Args:
            line: What the command printed; None where it printed nothing for a while.
            last: Whether the command has ended, so that it is the time for what was written last.
        """


def metric_reader(source: MetricSource | None, folder: Path, run: AttemptRun | None) -> MetricReader:
    """Return what finds the metric of one attempt.

    Raises:
        ConfigError: the metric is to come from MLflow, and the attempt has no run there.
    """
    assert source is not None
    if source.pattern is not None:
        return _InOutput(source.pattern)
    if source.file is not None and source.key is not None:
        return _InFile(folder / source.file, source.key)
    assert source.mlflow is not None
    if run is None:
        raise ConfigError("train.metric.mlflow: MLflow is away, so that the command has no run to log its metric to")
    return _InMlflow(run, source.mlflow)


def as_number(text: str) -> float | None:
    """Return a number that was printed; None where there is none.

    >>> as_number("0.91"), as_number("1e-3,"), as_number("nan"), as_number("high")
    (0.91, 0.001, nan, None)
    """
    match = _FIRST_NUMBER.match(text.strip())
    return float(match.group()) if match else None


class _InOutput:
    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self.found = 0
        self.text = f"no line matched {pattern!r} (train.metric.pattern)"

    def value(self, line: str | None, *, last: bool = False) -> float | None:
        match = self._pattern.search(line) if line else None
        number = as_number(match[1]) if match and match[1] else None
        self.found += number is not None
        return number


class _Waiting(ABC):
    """Values that came together are handed out one by one."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._looked_s = every_s, float("-inf")
        self._values: deque[float] = deque()
        self.found = 0

    def value(self, line: str | None, *, last: bool = False) -> float | None:
        if not self._values and (last or time.monotonic() - self._looked_s >= self._every_s):
            self._looked_s = time.monotonic()
            self._values.extend(self._look())
        if not self._values:
            return None
        self.found += 1
        return self._values.popleft()

    @abstractmethod
    def _look(self) -> Iterable[float]:
        """Return the values that came since the last look."""


class _InFile(_Waiting):
    """What was in the file before does not count; one that got shorter was written anew."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(_FILE_S)
        self._path, self._key = path, key
        self._at = path.stat().st_size if path.is_file() else 0
        self.text = f"{path} had no line with {key!r} (train.metric.file)"

    def _look(self) -> Iterable[float]:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(self._at if size >= self._at else 0)
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._at = file.tell() - len(data) + len(whole)
        except OSError:
            return
        for line in whole.splitlines():
            with suppress(ValueError, TypeError):
                told = json.loads(line)
                if isinstance(told, dict) and isinstance(told.get(self._key), int | float):
                    yield float(told[self._key])


class _InMlflow(_Waiting):
    """Points of the metric in the attempt's run, or in runs that the command made for itself."""

    def __init__(self, run: AttemptRun, name: str) -> None:
        super().__init__(_MLFLOW_S)
        self._run, self._name, self._seen = run, name, 0
        self.text = f"no metric {name!r} was logged to the attempt's MLflow run, or to one of the command's own"

    def _look(self) -> Iterable[float]:
        points = self._run.points(self._name)
        new, self._seen = points[self._seen :], max(self._seen, len(points))
        return new
