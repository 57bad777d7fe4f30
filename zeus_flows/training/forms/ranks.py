"""A data-parallel train function: torchrun starts a rank for each GPU, and the session here follows rank 0."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeus_flows.core.records import Outcome
from zeus_flows.errors import TrainingError
from zeus_flows.job_sections.train_section import TrainSection
from zeus_flows.settings import environment_of_child
from zeus_flows.training.forms import launcher, rank_session
from zeus_flows.training.forms.child import Child, Told, new_mark
from zeus_flows.training.forms.command import raise_failure, torchrun
from zeus_flows.training.forms.rank_session import FOLDER, TOLD, AttemptOfRanks, answer_file, kept_folder
from zeus_flows.training.session import Session

#: How long ranks may take to end once rank 0's train function has returned, and after SIGTERM.
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class RankedFunction:
    """A train function that runs on several GPUs.

    Attributes:
        train: What the job file says of it.
        gpus: How many ranks.
        function: The function, as found here.
    """

    train: TrainSection
    gpus: int
    function: Callable[..., object]

    def __call__(self, session: Session) -> None:
        """Train one attempt.

        Raises:
            CommandFailed: a rank broke; the arm is not blamed.
            CommandOutOfMemory: a rank ran out of GPU memory.
        """
        assert self.train.function is not None
        task = AttemptOfRanks(
            function=self.train.function,
            parameters=self.train.parameters,
            batch_size=session.batch_size,
            micro_batch_size=session.micro_batch_size,
            accumulate=session.parts(heeded=True).wanted,
            learning_rate=session.learning_rate,
            recurrence=session.recurrence,
            attempt=session.attempt,
            seed=session.seed,
            max_epochs=session.max_epochs,
            target=session.target.model_dump(mode="json"),
        )
        with tempfile.TemporaryDirectory(prefix="zeus-flows-") as scratch:
            folder = Path(scratch)
            (folder / "task.json").write_text(json.dumps(asdict(task)))
            with Child(
                [sys.executable, launcher.__file__, "--exec", *torchrun(self.gpus), "-m", rank_session.__name__],
                folder=Path.cwd(),
                environment=environment_of_child({FOLDER: str(folder)}),
                mark=new_mark(),
                output=folder / "output.txt",
                grace_s=_GRACE_S,
            ) as child:
                self._follow(session, child, folder)
            if (kept := kept_folder(folder)).exists():
                session.keep(kept)

    def _follow(self, session: Session, child: Child, folder: Path) -> None:
        events = _told(child)
        ended = 0
        for epoch in session.epochs():
            _answer(folder, epoch - 1, "go")
            if not _epoch(session, events):
                raise_failure(child, "the ranks")
                raise TrainingError("the train function left session.epochs() by itself")
            ended = epoch
        outcome = session.outcome
        assert outcome is not None or session.converged
        _answer(folder, ended, outcome or Outcome.CONVERGED)
        returned_s = None
        for event in events:  # the ranks publish their model, and end
            if isinstance(event, list) and event[0] == "returned":
                returned_s = time.monotonic()
            elif returned_s is not None and time.monotonic() > returned_s + _GRACE_S:  # a thread they left, maybe
                return
        raise_failure(child, "the ranks")


def _epoch(session: Session, events: Iterator[list[Any] | Told | None]) -> bool:
    """Follow one epoch to its end; return whether it came to one."""
    more = False
    with ExitStack() as evaluation:
        for event in events:
            if event is Told.STEP:
                more = more and session.stepped()
                continue
            match event:
                case ["steps", samples]:
                    session.begin_steps(samples or 0)
                    more = True
                case ["steps end", _]:
                    more = False
                case ["evaluation", _]:
                    evaluation.enter_context(session.evaluation())
                case ["evaluation end", _]:
                    evaluation.close()
                case ["epoch", value]:
                    if value is not None:
                        session.report_metric(value)
                    return True
    return False


def _told(child: Child) -> Iterator[list[Any] | Told | None]:
    """Yield what rank 0 tells the session, and None now and then; what is printed for people is passed over."""
    for event in child.read():
        if event is Told.STEP or event is None:
            yield event
        elif isinstance(event, str) and event.startswith(TOLD):
            yield json.loads(event.removeprefix(TOLD))


def _answer(folder: Path, epoch: int, text: str) -> None:
    """Say what comes after an epoch, whole or not at all: ranks read it as soon as it is there."""
    draft = folder / "draft"
    draft.write_text(text)
    draft.replace(answer_file(folder, epoch))
