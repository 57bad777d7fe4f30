"""One training in four forms: a loop over the session, Hugging Face's Trainer, Lightning's, the paper's listing."""

from __future__ import annotations

import logging
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

from zeus_flows import Session, ZeusDataLoader, ZeusLightningCallback, ZeusTrainerCallback

for _name in ("lightning.pytorch", "lightning.fabric", "transformers"):
    logging.getLogger(_name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module=r"lightning.*|pytorch_lightning.*")


class Task:
    """What a training learns, breaks of, and finds when it evaluates: the same in all forms.

    Args:
        session: The attempt's.
        samples: Samples of the data set.
        epochs: How many evaluations the target takes, more or less.
        micro: Samples that fit a micro-batch; 0: as many as the job decided.
        every: Evaluate every so many optimizer steps; 0: after each epoch.
        hungry: More samples than this at once run out of memory.
        breaks: Break at this training batch.
        metrics: What evaluations find, instead of what they would.
        wait: Lets seconds pass: 0.1 for a sample, 7 for an evaluation.
        marks: Begins the name of a file that tells, in the second epoch, that this process trains; it goes on for ever.
    """

    def __init__(
        self,
        session: Session,
        *,
        samples: int = 200,
        epochs: float = 4.0,
        micro: int = 0,
        every: int = 0,
        hungry: int = 10**9,
        breaks: int = 0,
        metrics: tuple[float, ...] = (),
        wait: Callable[[float], object] = lambda _: None,
        marks: str = "",
    ) -> None:
        self.session, self.samples, self.every = session, samples, every
        self.micro = min(micro or session.micro_batch_size, session.micro_batch_size)
        self.accumulate = session.batch_size // self.micro
        noise = random.Random(session.seed).uniform(0.8, 1.2)
        self.needed = max(1, round(epochs * (0.7 + session.batch_size / 200) * noise))
        self._hungry, self._breaks, self._metrics = hungry, breaks, list(metrics)
        self.wait, self._marks = wait, marks
        self.seen: list[int] = []
        self.evaluations = 0
        TASKS.append(self)

    def learn(self, samples: int) -> None:
        """Train on a batch, or break of it."""
        self.seen.append(samples)
        self.wait(0.1 * samples)
        if self._marks:
            time.sleep(0.02)
            if self.evaluations:
                Path(f"{self._marks}-{os.getpid()}").touch()
        if self.micro > self._hungry:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if len(self.seen) == self._breaks:
            raise ZeroDivisionError("the user's bug")

    def evaluate(self) -> float:
        """Return how good the model is, in a number that 32 bits hold exactly."""
        self.evaluations += 1
        self.wait(7.0)
        if self._marks:
            return 0.0
        return self._metrics.pop(0) if self._metrics else (64 * self.evaluations // self.needed) / 64


#: Every task since a test last cleared it.
TASKS: list[Task] = []


def plain(session: Session, **options: Any) -> None:
    """Loop over the session."""
    loop(Task(session, **options))


def loop(task: Task, after_evaluation: Callable[[], object] = lambda: None) -> None:
    """Loop over a task's session."""
    session = task.session
    loader = DataLoader(TensorDataset(torch.zeros(task.samples, 4)), batch_size=session.batch_size)
    for _epoch in session.epochs():
        for number, (batch,) in enumerate(session.steps(loader), start=1):
            for part in batch.split(task.micro):
                task.learn(len(part))
            if task.every and number % task.every == 0:
                with session.evaluation():
                    found = task.evaluate()
                session.report_metric(found)
                after_evaluation()
                if session.outcome is not None:
                    break
        if not task.every:
            session.report_metric(task.evaluate())
            after_evaluation()


def listing(session: Session, **options: Any) -> None:
    """Train as the paper's Listing 1 does."""
    task = Task(session, **options)
    train_loader = ZeusDataLoader(TensorDataset(torch.zeros(task.samples, 4)), session.batch_size, session.max_epochs)
    eval_loader = ZeusDataLoader(TensorDataset(torch.zeros(8, 4)), 8)
    for _epoch in train_loader.epochs():
        for (batch,) in train_loader:
            task.learn(len(batch))
        for _ in eval_loader:
            pass
        train_loader.report_metric(task.evaluate())


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sentences of three tokens, each with a label."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([1, index % 7, 2]), "labels": torch.tensor(index % 2)}


class TinyBert(BertForSequenceClassification):  # type: ignore[misc]
    """A BERT with one layer, and a task."""

    def __init__(self, task: Task) -> None:
        config = BertConfig(
            vocab_size=8,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
            max_position_embeddings=4,
        )
        super().__init__(config)
        self.task = [task]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Tell the task, and go on as BERT does."""
        if self.training:
            self.task[0].learn(len(input_ids))
        return super().forward(input_ids, labels=labels)


def bert_trainer(task: Task, folder: str, *callbacks: Any, metric: str = "progress", **arguments: Any) -> Trainer:
    """Return a Trainer of a tiny BERT for a task."""
    session = task.session
    given: dict[str, Any] = {
        "per_device_train_batch_size": task.micro,
        "gradient_accumulation_steps": task.accumulate,
        "learning_rate": session.learning_rate,
        "eval_strategy": "steps" if task.every else "epoch",
        "eval_steps": task.every or None,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
    }
    eval_sets = arguments.pop("eval_sets", 1)
    trainer = Trainer(
        TinyBert(task),
        TrainingArguments(folder, **(given | arguments)),
        train_dataset=Sentences(task.samples),
        eval_dataset=Sentences(8) if eval_sets == 1 else {f"set{n}": Sentences(8) for n in range(eval_sets)},
        compute_metrics=lambda _: {metric: task.evaluate()},
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def huggingface(
    session: Session, *, metric: str = "progress", arguments: dict[str, Any] | None = None, **options: Any
) -> None:
    """Let Hugging Face's Trainer train."""
    task = Task(session, **options)
    with tempfile.TemporaryDirectory() as folder:
        bert_trainer(task, folder, ZeusTrainerCallback(), metric=metric, **(arguments or {})).train()


class LinearModule(lightning.LightningModule):  # type: ignore[misc]
    """One linear layer, and a task."""

    def __init__(self, task: Task, metric: str = "progress") -> None:
        super().__init__()
        self.task, self.metric = task, metric
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Tell the task, and return a loss."""
        self.task.learn(len(batch[0]))
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Look at a batch."""
        self.layer(batch[0])

    def on_validation_epoch_end(self) -> None:
        """Log what the task finds; not in the check before training, which would count."""
        if not self.trainer.sanity_checking:
            self.log(self.metric, self.task.evaluate())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what steps."""
        return torch.optim.SGD(self.parameters(), lr=self.task.session.learning_rate)


def fit(
    task: Task, *callbacks: Any, module: Any = None, trainer: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """Fit a linear module to a task; return Lightning's Trainer."""
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accumulate_grad_batches": task.accumulate,
        "val_check_interval": task.every * task.accumulate or None,
    }
    made = (trainer or lightning.Trainer)(callbacks=list(callbacks), **(given | options))
    loader = DataLoader(TensorDataset(torch.ones(task.samples, 4)), batch_size=task.micro)
    valid = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=8)
    made.fit(module or LinearModule(task), loader, valid)
    return made


def lightnings(
    session: Session, *, metric: str = "progress", trainer: dict[str, Any] | None = None, **options: Any
) -> None:
    """Let Lightning's Trainer train."""
    task = Task(session, **options)
    fit(task, ZeusLightningCallback(), module=LinearModule(task, metric), **(trainer or {}))
