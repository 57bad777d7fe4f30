"""A training command as it is: started for each attempt, read while it trains, stopped where it does not pay.

    train:
      command: [python, train.py, --batch-size, "{batch_size}", --lr, "{learning_rate}"]
      metric: {pattern: 'val_acc=([0-9.]+)'}

Energy is measured from outside. Each value of the metric ends an epoch. Steps are told by the launcher, in Python with
torch, or by a progress pattern, or else by the period that the GPUs show (`iterations.py`). Where there is none either,
an epoch is one step, and one setting of the knob is tried per epoch.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zeus_flows.errors import CommandFailed, CommandOutOfMemory, ConfigError
from zeus_flows.job_file import JobFile
from zeus_flows.job_sections.train_section import TrainSection
from zeus_flows.job_sections.wording import filled
from zeus_flows.masking import remember, secrets_of
from zeus_flows.settings import environment_of_child
from zeus_flows.training.forms import launcher
from zeus_flows.training.forms.child import Child, Told, new_mark
from zeus_flows.training.forms.iterations import IterationWatch, can_watch
from zeus_flows.training.forms.metric_source import MetricReader, as_number, metric_reader
from zeus_flows.training.session import Session

if TYPE_CHECKING:
    from zeus_flows.gpu.group import Gpus
    from zeus_flows.training.forms.script_runs import AttemptRun

log = logging.getLogger(__name__)

#: Epochs' worth of steps after which a metric that never came is given up on.
PATIENCE: Final = 3
#: Times that the training's loader begins anew after which it is, where nobody stated how long an epoch is: a script
#: may evaluate every few epochs.
PASSES: Final = 10
#: Seconds without a metric after which that is said, while nothing tells of epochs.
SAID_AFTER_S: Final = 300.0
#: Lines of output that an error shows.
SHOWN: Final = 12
_PYTHON: Final = re.compile(r"python([23](\.\d+)?)?(\.exe)?")
_OUT_OF_MEMORY: Final = re.compile(
    r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED"
)
#: Where torchrun begins to tell at length that a rank broke: the rank itself said why before.
_OF_TORCHRUN: Final = re.compile(r"^[WE]\d{4} \d\d:\d\d:|torch/distributed/(run|launcher|elastic)")


@dataclass(frozen=True, slots=True)
class Command:
    """A job's command, found and ready to be started.

    Attributes:
        train: What the job file says of it.
        folder: Where it runs.
        program: What is started, resolved; the words after it are the job file's.
        gpus: GPUs that it trains on: torchrun starts a Python program once for each.
        model: Where it leaves its model, by the job file; None: nowhere.
    """

    train: TrainSection
    folder: Path
    program: str
    gpus: int = 1
    model: str | None = None

    def __call__(
        self,
        session: Session,
        *,
        run: AttemptRun | None = None,
        keep: Path | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        """Train one attempt.

        Args:
            session: Says what to train and when to stop.
            run: The attempt's run in MLflow; None where it has none.
            keep: Where its checkpoints go while it trains; None: to a folder that goes with it.
            gpus: What shows its iterations where nothing tells of steps; None: nothing does.

        Raises:
            CommandFailed: it ended with an error, or its metric never came; the arm is not blamed.
            CommandOutOfMemory: its output says that the GPU's memory did not suffice.
        """
        mark = new_mark()
        with tempfile.TemporaryDirectory(prefix="zeus-flows-") as scratch:
            output, began = Path(scratch) / "output.txt", Path(scratch) / "began"
            began.touch()
            values = placeholders(session, keep or Path(scratch), self.gpus)
            remember(*secrets_of(self.train.environment.items()))
            environment = environment_of_child(
                {name: filled(text, values) for name, text in self.train.environment.items()}
                | ({} if run is None else run.environment())
            )
            reader = metric_reader(self.train.metric, self.folder, run)
            child = Child(
                self._argv([filled(word, values) for word in (self.train.command or [])[1:]]),
                folder=self.folder,
                environment=environment,
                mark=mark,
                output=output,
                grace_s=self.train.grace_seconds,
            )
            try:
                with child, self._watch(gpus) as watch:
                    self._follow(session, child, reader, watch)
                if self.model is not None and session.converged:
                    self._keep(session, self.folder / filled(self.model, values), began.stat().st_mtime)
            finally:
                if run is not None:
                    run.keep(output)
                    run.link()

    def _watch(self, gpus: Gpus | None) -> AbstractContextManager[IterationWatch | None]:
        """Return what counts iterations where nothing will tell of steps, perhaps."""
        if gpus is None or self.train.progress is not None or not can_watch(gpus):
            return nullcontext()
        return IterationWatch(gpus)

    def _keep(self, session: Session, path: Path, began_s: float) -> None:
        """Keep the model that the command left, unless it is an older one's."""
        files = [path, *path.rglob("*")] if path.exists() else []
        if any(file.is_file() and file.stat().st_mtime >= began_s for file in files):
            session.keep(path)

    def _argv(self, words: list[str]) -> list[str]:
        """Return what is started: the launcher, which starts the command."""
        own = str(Path(launcher.__file__).resolve())
        if not _PYTHON.fullmatch(Path(self.program).name):
            return [sys.executable, own, "--exec", self.program, *words]
        flags = _flags(words)
        if flags == len(words) or words[flags] in ("-c", "-"):
            return [sys.executable, own, "--exec", self.program, *words]
        if self.gpus > 1:
            ranks = torchrun(self.gpus)[1:]
            return [sys.executable, own, "--exec", self.program, *words[:flags], *ranks, own, *words[flags:]]
        return [self.program, *words[:flags], own, *words[flags:]]

    @property
    def script(self) -> str | None:
        """The Python file that is run; None where there is none, or its name is not known yet."""
        words = (self.train.command or [])[1:]
        flags = _flags(words)
        if not _PYTHON.fullmatch(Path(self.program).name) or flags == len(words):
            return None
        return None if words[flags] in ("-m", "-c", "-") or "{" in words[flags] else words[flags]

    def _follow(
        self, session: Session, child: Child, reader: MetricReader, watch: IterationWatch | None = None
    ) -> None:
        """Turn what the command says into the session's epochs, steps and metrics."""
        events = self._events(session, child, watch)
        patience = _Patience(child, reader, self.train.samples_per_epoch or 0)
        for _ in session.epochs():
            value = self._epoch(session, events, reader, patience, watch)
            if value is None:
                self._ended(session, child, reader)
                return
            session.report_metric(value)
            if watch is not None and not watch.found and not watch.why_not:
                watch.give_up("none stood out in the first epoch, and an epoch is a step")

    def _epoch(
        self,
        session: Session,
        events: Iterator[int | Told | str | None],
        reader: MetricReader,
        patience: _Patience,
        watch: IterationWatch | None,
    ) -> float | None:
        """Follow one epoch to its metric; None where the command ended before it."""
        length = self.train.samples_per_epoch or 0
        session.begin_steps(length if watch is None or not watch.found else 0)
        more, samples = True, 0
        for event in events:
            if isinstance(event, int):
                samples += event
                more = more and session.stepped(event)
                patience.stepped(samples)
            elif isinstance(event, Told):
                patience.passed()
            elif (value := reader.value(event)) is not None:
                if watch is not None and samples and (left := watch.rest(session.batch_size)):
                    samples += left
                    more = more and session.stepped(left)
                if not samples:
                    session.stepped(length or 1)
                return value
            else:
                patience.waited()
        value = reader.value(None, last=True)
        if value is not None and not samples:
            session.stepped(length or 1)
        return value

    def _events(
        self, session: Session, child: Child, watch: IterationWatch | None
    ) -> Iterator[int | Told | str | None]:
        """Yield the samples of each step, lines, where a pass over the data begins, and None now and then."""
        progress, counted = self.train.progress, 0
        pattern = None if progress is None else re.compile(progress.pattern)
        tells = False
        for event in child.read():
            if event is Told.STEP:
                if watch is not None and not tells:
                    watch.close()
                tells = True
                if pattern is None:
                    yield session.batch_size
                continue
            if watch is not None and not tells and (samples := watch.passed(session.batch_size)):
                yield samples
            yield event
            if isinstance(event, Told):
                continue
            match = None if pattern is None or event is None else pattern.search(event)
            if progress is None or match is None:
                continue
            now = counted + 1
            if match.groups() and (number := as_number(match[1])) is not None:
                now = round(number)
            told = now - counted if now > counted else now
            if now < counted:
                yield Told.PASS
            counted = now
            if told > 0:
                yield told * (session.batch_size if progress.unit == "steps" else 1)

    def _ended(self, session: Session, child: Child, reader: MetricReader) -> None:
        """Say how an attempt went whose command ended by itself."""
        raise_failure(child, "the command")
        if not reader.found:
            raise CommandFailed(f"the command ended, and its metric never came: {reader.text}; {_said(child)}")
        epochs = f"{reader.found} epoch{'' if reader.found == 1 else 's'}"
        session.ended_by_itself(f"the command ended by itself after {epochs}, before the target was reached")


class _Patience:
    """Gives up on a metric that never comes, within the first epochs where it can be told how long those are.

    Args:
        child: What prints.
        reader: What looks for the metric.
        length: Samples per epoch; 0 where nobody stated them.
    """

    def __init__(self, child: Child, reader: MetricReader, length: int) -> None:
        self._child, self._reader, self._length = child, reader, length
        self._passes, self._began_s, self._said = 0, time.monotonic(), False

    def stepped(self, samples: int) -> None:
        """Look after a step, with so many samples in the epoch."""
        if self._length and not self._reader.found and samples > PATIENCE * self._length:
            raise self._gave_up(f"in {PATIENCE} epochs")

    def passed(self) -> None:
        """Look where the data are gone through again."""
        self._passes += 1
        if not self._length and not self._reader.found and self._passes >= PASSES:
            raise self._gave_up(f"in {PASSES} passes over the data")

    def waited(self) -> None:
        """Say, once, that the metric is long in coming."""
        if not self._said and not self._reader.found and time.monotonic() - self._began_s > SAID_AFTER_S:
            self._said = True
            log.warning("no metric in %.0f s: %s; %s", SAID_AFTER_S, self._reader.text, _said(self._child))

    def _gave_up(self, when: str) -> CommandFailed:
        return CommandFailed(f"the metric did not come {when}: {self._reader.text}; {_said(self._child)}")


def raise_failure(child: Child, who: str) -> None:
    """Raise what a process ended with, where that is an error.

    Raises:
        CommandFailed: it ended with another exit code than 0, or by a signal.
        CommandOutOfMemory: its last lines say that the GPU's memory did not suffice.
    """
    code = child.exit_code or 0
    if code and any(_OUT_OF_MEMORY.search(line) for line in child.last_lines):
        raise CommandOutOfMemory(f"{who} ran out of GPU memory (exit code {code})")
    if code:
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        raise CommandFailed(f"{who} ended {how}; {_said(child)}")


def _said(child: Child) -> str:
    lines = [line for line in child.last_lines if line.strip()]
    summary = next((i for i, line in enumerate(lines) if _OF_TORCHRUN.search(line)), 0)
    lines = lines[: summary or None][-SHOWN:]
    return "\n".join(("the last lines:", *(f"  {line[:200]}" for line in lines))) if lines else "nothing was printed"


def torchrun(gpus: int) -> list[str]:
    """Return the words that start a Python program once for each GPU."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]


def placeholders(session: Session, folder: Path, gpus: int = 1) -> dict[str, object]:
    """Return what the names in braces stand for; `job_file.PLACEHOLDERS` lists them."""
    return {
        "accumulation_steps": session.accumulation_steps,
        "attempt": session.attempt,
        "batch_size": session.batch_size,
        "batch_size_per_gpu": session.batch_size // gpus,
        "checkpoint_folder": folder,
        "gpus": gpus,
        "learning_rate": f"{session.learning_rate:g}",
        "micro_batch_size": session.micro_batch_size,
        "micro_batch_size_per_gpu": session.micro_batch_size // gpus,
        "max_epochs": session.max_epochs,
        "recurrence": session.recurrence,
        "seed": session.seed,
        "target": f"{session.target.value:g}",
    }


def find_command(job_file: JobFile) -> Command:
    """Return the command that a job file names.

    Raises:
        ConfigError: its folder or its program is not there.
    """
    train = job_file.train
    assert train.command is not None
    folder = Path(train.folder).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"train.folder: there is no folder {folder}")
    wanted = train.command[0]
    if wanted in ("python", "python3"):  # the one that runs us: its packages are those that were installed beside us
        program: str | None = sys.executable
    elif "/" in wanted:
        program = shutil.which(str(folder / Path(wanted).expanduser()))
    else:
        program = shutil.which(wanted, path=environment_of_child(train.environment).get("PATH"))
    if program is None:
        raise ConfigError(f"train.command: there is no program {wanted!r}; name its path, or install it")
    gpus = job_file.gpus if train.torchrun and job_file.gpus else 1
    command = Command(train, folder, program, gpus, job_file.model.path if job_file.model is not None else None)
    script = command.script
    if script is not None and not (folder / script).is_file():
        raise ConfigError(f"train.command: there is no file {script} in {folder}; say where it is with train.folder")
    return command


def _flags(words: list[str]) -> int:
    """Return how many of an interpreter's words come before what it is to run.

    >>> _flags(["-u", "-X", "dev", "train.py", "-v"])
    3
    """
    flags = 0
    while flags < len(words) and words[flags].startswith("-") and words[flags] not in ("-m", "-c", "-"):
        flags += 2 if words[flags] in ("-X", "-W") else 1
    return min(flags, len(words))
