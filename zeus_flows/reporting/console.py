"""What `zeus-flows run` shows: a row per recurrence under a progress bar, then what was saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from zeus_flows.core.job import Job
from zeus_flows.core.power_profile import Gpu, Knob
from zeus_flows.core.reasons import ReasonKind
from zeus_flows.core.records import Decision, EnergySource, in_parts
from zeus_flows.core.rollout import why_in_force
from zeus_flows.core.savings import Savings
from zeus_flows.ledger.mlflow.attempts import Progress as AttemptsRead
from zeus_flows.ledger.mlflow.attempts import untold
from zeus_flows.recurrence.loop import Recurrence
from zeus_flows.reporting.savings import savings_sentences, savings_table
from zeus_flows.reporting.text import cost_text, describe_arm, joules, seconds, setting_text

_SETTINGS = {Knob.POWER_LIMIT: ("limit", 6), Knob.CLOCKS: ("clock", 8)}
_BEFORE, _AFTER = (("#", 4), ("batch size", 12)), (("ETA", 8), ("TTA", 8), ("cost", 8), ("target", 7))
_WIDE = 120


def progress_bar(console: Console) -> Progress:
    """Return a bar with the current task, its progress and its duration. It disappears at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


@contextmanager
def reading_bar() -> Iterator[AttemptsRead]:
    """Show how far reading a whole history is, where somebody looks on; yield what is to be told of it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield untold
        return
    with progress_bar(console) as bar:
        task = bar.add_task("reading attempts", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class RunView:
    """Shows recurrences as they end.

    Args:
        console: Where to.
        job: Whose cost is shown.
        total: How many recurrences will run.
        energy_source: Simulated energy is marked wherever it is shown.
        knob: What is tuned.
    """

    def __init__(
        self,
        console: Console,
        job: Job,
        *,
        total: int,
        energy_source: EnergySource,
        knob: Knob = Knob.POWER_LIMIT,
    ) -> None:
        self._console, self._job = console, job
        self._columns = (*_BEFORE, _SETTINGS[knob], *_AFTER)
        self._simulated = energy_source is EnergySource.SIMULATED
        self._in_seconds = job.in_seconds or energy_source is EnergySource.NONE  # no sensor, no joules
        self._progress = progress_bar(console)
        self._task = self._progress.add_task("starting Prefect and MLflow", total=total)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the progress bar until the block ends."""
        self._show(*(Text(name, style="bold") for name, _ in self._columns), why="why this batch size", style="bold")
        with self._progress:
            yield

    def recurrence(self, done: Recurrence) -> None:
        """Show a recurrence that has ended: the sums over its attempts, and why the last one was chosen."""
        self._progress.update(self._task, advance=1, description="recurrences")
        if done.skipped and done.check is not None:
            blanks = [""] * (len(self._columns) - 2)
            self._show(str(done.number), *blanks, Text("skipped", style="cyan"), why=done.check.text)
            return
        attempt, last = done.attempts[-1]
        self._show(
            str(done.number),
            "→".join(in_parts(observation) for _, observation in done.attempts),
            setting_text(last.setting, last.knob),
            "" if self._in_seconds else joules(done.energy_j + done.host_energy_j),
            seconds(done.time_s),
            cost_text(self._job, done.cost_j(self._job)),
            Text("reached", style="green") if done.converged else Text("missed", style="red"),
            why=attempt.decision.reason.text,
        )

    def _show(self, *cells: str | Text, why: str, style: str = "dim") -> None:
        """Print a row; the reason has a column of its own where the terminal is wide, else the line below."""
        wide = self._console.width >= _WIDE
        row = Table.grid(padding=(0, 1))
        for _, width in self._columns:
            row.add_column(width=width)
        row.add_column(ratio=1)
        row.add_row(*cells, Text(why, style=style) if wide else "")
        self._console.print(row)
        if not wide:
            self._console.print(Padding(Text(why, style=style), (0, 0, 0, self._columns[0][1] + 1)))

    def summary(self, saved: Savings | None) -> None:
        """Show what was saved against the default, so far and from now on, and what is in no saving.

        Args:
            saved: The savings; None while nothing was observed.
        """
        self._console.print()
        if saved is None:
            self._console.print("What was saved is not known yet: nothing was observed.")
            return
        if (table := savings_table(saved)) is not None:
            self._console.print(table)
        for sentence in savings_sentences(saved):
            self._console.print(sentence, highlight=False)
        if self._simulated and not self._in_seconds:
            self._console.print(
                "[yellow]Simulated energy:[/] the training was real, the joules come from a model of the GPU."
            )

    def say(self, text: str) -> None:
        """Show a sentence."""
        self._console.print(f"\n{text}", highlight=False)

    def where_to_look(self, url: str, command: str | None) -> None:
        """Say how to see the runs in MLflow."""
        if command:
            self._console.print(f"\nTo look at the runs:  {command}\nthen open             {url}", soft_wrap=True)
        else:
            self._console.print(f"\nThe runs are at {url}", soft_wrap=True)


def show_decision(
    console: Console, job: Job, decision: Decision, *, gpu: Gpu, observations: int, gated: bool = False
) -> None:
    """Show a decision and the beliefs behind it; `gated` where a drift gate will be asked before."""
    console.print(
        f"{job.name} on {gpu.key}: recurrence {decision.recurrence} would train at batch size "
        f"[bold]{decision.batch_size}[/], by {decision.policy} on {observations} "
        f"observation{'' if observations == 1 else 's'}:\n"
        f"  {decision.reason.text}"
    )
    if decision.reason.kind is not ReasonKind.MODE:  # which says so
        console.print(f"The mode is {job.mode}, {why_in_force(job)}.")
    table = Table("batch size", "what is known", "expected cost", "drawn")
    for arm in decision.reason.arms:
        table.add_row(
            str(arm.batch_size),
            describe_arm(arm),
            "" if arm.expected_cost_j is None else cost_text(job, arm.expected_cost_j),
            "" if arm.sampled_cost_j is None else cost_text(job, arm.sampled_cost_j),
            style="bold" if arm.batch_size == decision.batch_size else "",
        )
    if decision.reason.arms:
        console.print(table)
    if gated:
        console.print("The drift gate is asked first, and may skip it; it was not asked now.")
    console.print("Nothing was written.")
