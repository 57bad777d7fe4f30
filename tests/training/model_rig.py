"""Recurrences that take no time and keep a model, for tests of what becomes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mlflow import MlflowClient

from tests.builders import JOB
from tests.ledger.brief import BriefTrainer, opened
from zeus_flows.core.gate import Question
from zeus_flows.core.job import Job
from zeus_flows.core.promotion import Bar
from zeus_flows.core.records import Decision, Observation, Outcome
from zeus_flows.ledger.durable import DurableLedger
from zeus_flows.ledger.mlflow.address import ledger_key
from zeus_flows.ledger.mlflow.client import Store
from zeus_flows.ledger.mlflow.model_registry import ModelRegistry
from zeus_flows.recurrence.loop import Recurrence, run_recurrence
from zeus_flows.recurrence.steps import LocalSteps
from zeus_flows.training.evaluation import Evaluation
from zeus_flows.training.keeping import Keeper, Staging, open_model
from zeus_flows.training.promotion import Promoted, Promoter

NAME = "ranker"
BARS = (Bar("accuracy", lower_is_better=False, margin=0.01), Bar("recall", lower_is_better=False, margin=0.1))


class KeepingTrainer(BriefTrainer):
    """Keeps a file that says how good the model is."""

    def __init__(self, uri: str, folder: Path, scores: Mapping[str, float], *outcomes: Outcome) -> None:
        super().__init__(*outcomes)
        self._uri, self._folder, self._scores = uri, folder, scores

    def train(self, job: Job, decision: Decision, *args: Any, attempt_id: str = "", **named: Any) -> Observation:
        observed = super().train(job, decision, *args, attempt_id=attempt_id, **named)
        keeper = Keeper(self._folder / "state" / "models", lambda: ledger_key(self._uri, job.name), attempt_id)
        file = self._folder / "weights.bin"
        file.write_bytes(b"weights")
        keeper.keep(file, dict(self._scores))
        keeper.close(converged=observed.converged)
        return observed


@dataclass
class ModelRig:
    """A job with a registered model, on a database of its own.

    Attributes:
        uri: Where MLflow is.
        folder: The state directory's parent: a machine.
        asked: What the evaluation was asked.
    """

    uri: str
    folder: Path
    job: Job = JOB
    name: str = NAME
    evaluate: Callable[[Question], object] | None = None
    among: int = 3
    asked: list[Question] = field(default_factory=list)

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.uri)

    def recur(self, accuracy: float, *outcomes: Outcome, recall: float = 0.9) -> Recurrence:
        """Run a recurrence whose model is that good; its model waits to be sent."""
        with opened(self.uri, self.folder, self.job) as ledger:
            scores = {"accuracy": accuracy, "recall": recall}
            trainer = KeepingTrainer(self.uri, self.folder, scores, *outcomes)
            return run_recurrence(self.job, LocalSteps(self.job, ledger, trainer))

    def scores(self, question: Question) -> object:
        """Evaluate as a job would: by what is in the model's files."""
        self.asked.append(question)
        return self.evaluate(question) if self.evaluate else dict(open_model(question.model_uri).about)

    @contextmanager
    def promoter(self, *, evaluates: bool = True) -> Iterator[Promoter]:
        with opened(self.uri, self.folder, self.job) as ledger:
            yield self.promoter_of(ledger, evaluates=evaluates)

    def promoter_of(self, ledger: DurableLedger, *, evaluates: bool = True) -> Promoter:
        return Promoter(
            self.job,
            ModelRegistry(Store(self.uri), self.job.name, self.name),
            Staging(self.folder / "state" / "models"),
            ledger,
            Evaluation(self.scores, BARS, self.among, tracking_uri=self.uri) if evaluates else None,
        )

    def make_pass(self, *, evaluates: bool = True) -> Promoted:
        with self.promoter(evaluates=evaluates) as promoter:
            return promoter.make_pass()

    def aliases(self) -> dict[str, int]:
        return {k: int(v) for k, v in self.client.get_registered_model(self.name).aliases.items()}

    def versions(self) -> dict[int, dict[str, str]]:
        """Return every version's tags by its number."""
        found = self.client.search_model_versions(f"name = '{self.name}'")
        return {int(version.version): dict(version.tags) for version in found}


def keep_twice_and_die(folder: Path) -> None:
    """Keep the model of an attempt that reached the target, and of one under way (in a process of its own)."""
    done, running = (Keeper(folder / "models", lambda: "ledger", "attempt") for _ in range(2))
    for own in (done, running):
        own.keep({"a": torch.zeros(1)}, {})
    done.close(converged=True)
    os.kill(os.getpid(), signal.SIGKILL)
