"""`ZeusTrainerCallback`: a session for the `Trainer` of Hugging Face's transformers.

    def train(session):
        arguments = TrainingArguments(
            "out",
            eval_strategy="epoch",
            per_device_train_batch_size=session.batch_size,
            learning_rate=session.learning_rate,
        )
        Trainer(model, arguments, ..., callbacks=[ZeusTrainerCallback()]).train()

An epoch ends with the last that belongs to it: its steps, its evaluation, its checkpoint.
"""

from __future__ import annotations

import logging
from typing import Any

from zeus_flows.errors import ConfigError, TrainingError
from zeus_flows.training.forms.events import EventLoop, check_batch_size, session_of
from zeus_flows.training.session import Session
from zeus_flows.training.training_loop import samples_in

try:
    from transformers import TrainerCallback
except ImportError:
    raise ConfigError("ZeusTrainerCallback needs transformers: pip install 'zeus-flows[huggingface]'") from None

log = logging.getLogger(__name__)


class ZeusTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Measures a `Trainer`'s steps, tunes the power limit meanwhile, reports the metric and stops when it is time.

    The metric is the evaluation's: `accuracy` in the job file is `eval_accuracy` here. The number of epochs is the
    job's. It belongs last in the list of callbacks. Outside of a job it does nothing.

    Args:
        session: The attempt's; None: that of the train function that runs now.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session_of(self, session)
        self._loop: EventLoop | None = None
        self._ending = False

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the Trainer go on for as long as the job may: its schedule of learning rates depends on that."""
        if self._session is None or args.max_steps > 0 or args.num_train_epochs == self._session.max_epochs:
            return
        log.info("num_train_epochs is the job's max_epochs: %d", self._session.max_epochs)
        args.num_train_epochs = self._session.max_epochs

    def on_train_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any) -> None:
        """Begin the attempt's loop, if the Trainer is set up as the job decided."""
        session = self._session
        if session is None:
            return
        if args.auto_find_batch_size:
            raise TrainingError("leave auto_find_batch_size out: the job decides the batch size, and learns what fits")
        micro, accumulated = int(args.train_batch_size), int(args.gradient_accumulation_steps)
        check_batch_size(
            session,
            micro=micro,
            accumulated=accumulated,
            processes=int(args.world_size),
            write="give TrainingArguments per_device_train_batch_size=session.batch_size, "
            "divided by gradient_accumulation_steps and the number of GPUs that this process sees",
        )
        samples = samples_in(train_dataloader, micro)
        if samples and state.num_train_epochs < session.max_epochs:
            raise TrainingError(
                f"the Trainer would end after {state.num_train_epochs} epochs, and the job's max_epochs is "
                f"{session.max_epochs}: give TrainingArguments num_train_epochs=session.max_epochs, and no max_steps"
            )
        self._loop = EventLoop(session, samples=samples, batch_size=micro * accumulated)
        control.should_training_stop = self._loop.stops

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an epoch."""
        self._ending = False
        if self._loop is not None:
            self._loop.begin_epoch()
            self._look(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an optimizer step."""
        if self._loop is not None:
            self._loop.step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an evaluation, where one is due."""
        if self._loop is not None and control.should_evaluate:
            self._loop.begin_evaluation()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin an evaluation that was not announced."""
        if self._loop is not None:
            self._loop.begin_evaluation()

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: dict[str, float], **_: Any) -> None:
        """End an evaluation and report its metric."""
        if self._loop is None or self._session is None:
            return
        name = self._session.target.metric
        found = self._loop.end_evaluation(metrics, name, f"eval_{name}")
        if found and self._ending and not control.should_save:
            self._loop.end_epoch()
        self._look(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End an epoch's steps. An evaluation and a checkpoint that are due belong to the epoch, too."""
        if self._loop is None:
            return
        self._loop.end_steps()
        self._ending = True
        if control.should_evaluate:
            self._loop.begin_evaluation()
        elif not control.should_save:
            self._loop.end_epoch(evaluates=args.eval_strategy != "no")
            self._look(control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End an epoch, where its checkpoint was the last thing to do."""
        if self._loop is not None and self._ending:
            self._loop.end_epoch(evaluates=args.eval_strategy != "no")
            self._look(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the attempt's loop."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.end()

    def _look(self, control: Any) -> None:
        """Let the Trainer stop, where the session says so."""
        if self._loop is not None and self._loop.stops:
            control.should_training_stop = True
