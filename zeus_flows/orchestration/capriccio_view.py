"""What `zeus-flows capriccio` shows while it runs."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console

from zeus_flows.experiments.capriccio.contenders import Experiment
from zeus_flows.experiments.capriccio.results import SliceOutcome
from zeus_flows.experiments.capriccio.slices import Slice
from zeus_flows.reporting.console import progress_bar
from zeus_flows.reporting.text import joules


class ExperimentView(Protocol):
    """Is told how an experiment goes."""

    def reading(self, share: float) -> None:
        """So much of the data has been read, 0 to 1."""

    def opened(self, experiment: Experiment) -> None:
        """Data and slices are known."""

    def training(self, what: str) -> Callable[[int, int], None]:
        """Return what to tell how many training runs are there, and of how many."""

    def slice(self, part: Slice, outcomes: dict[str, SliceOutcome]) -> None:
        """A slice has ended."""

    def say(self, text: str) -> None:
        """Something else begins."""


class Silent:
    """Shows nothing."""

    def reading(self, share: float) -> None:
        """Show nothing."""

    def opened(self, experiment: Experiment) -> None:
        """Show nothing."""

    def training(self, what: str) -> Callable[[int, int], None]:
        """Return a function that shows nothing."""
        return lambda _done, _all: None

    def slice(self, part: Slice, outcomes: dict[str, SliceOutcome]) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""


class ConsoleView:
    """Shows a row per slice above a progress bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = progress_bar(console)
        self._task = self._progress.add_task("starting", total=None)
        self._total = 0
        self._contenders: tuple[str, ...] = ()

    def __enter__(self) -> ConsoleView:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def reading(self, share: float) -> None:
        """Move the bar while the data are read, in per cent."""
        self._progress.update(self._task, description="reading the data", completed=round(100 * share), total=100)

    def opened(self, experiment: Experiment) -> None:
        """Show what was read, and how far an earlier process got."""
        dataset, self._total = experiment.curves.trainer.dataset, len(experiment.slices)
        self._contenders = tuple(experiment.file.contenders)
        self._console.print(
            f"{experiment.file.name}: {len(dataset):,} rows of {dataset.name}, {self._total} slices from "
            f"{experiment.slices[0].day} to {experiment.slices[-1].day}; {', '.join(experiment.file.contenders)}"
        )
        bad = dataset.malformed
        if bad.bad:
            lines = ", ".join(str(line) for line, _ in bad.first)
            more = " ..." if bad.bad > len(bad.first) else ""
            self._console.print(f"[yellow]{bad.bad:,} malformed lines were left out:[/] {lines}{more}")
        done = min(contender.done for contender in experiment.contenders)
        if done:
            self._console.print(f"taking up after slice {done}")

    def training(self, what: str) -> Callable[[int, int], None]:
        """Return what moves the progress bar."""

        def progress(done: int, total: int) -> None:
            self._progress.update(self._task, description=f"training {what}", completed=done, total=total)

        return progress

    def slice(self, part: Slice, outcomes: dict[str, SliceOutcome]) -> None:
        """Show a slice's batch sizes and costs."""
        cells = "  ".join(f"{name} {_outcome(outcomes.get(name))}" for name in self._contenders)
        self._console.print(f"{part.number:>4} {part.day}  {cells}", highlight=False, soft_wrap=True)
        self._progress.update(self._task, description="slices", completed=part.number, total=self._total)

    def say(self, text: str) -> None:
        """Show what begins."""
        self._progress.update(self._task, description=text, completed=0, total=None)


def _outcome(outcome: SliceOutcome | None) -> str:
    """Return what a contender made of a slice; None where its gate skipped it."""
    if outcome is None:
        return "skipped"
    missed = "" if outcome.converged else ", missed"
    return f"{'→'.join(map(str, outcome.batch_sizes))} ({joules(outcome.cost_j)}{missed})"
