"""`ZeusLightningCallback`: a session for the `Trainer` of PyTorch Lightning.

    def train(session):
        loader = DataLoader(data, batch_size=session.batch_size)
        trainer = Trainer(callbacks=[ZeusLightningCallback()])
        trainer.fit(Model(session.learning_rate), loader, valid_loader)

Lightning saves checkpoints after an epoch's last event, so that their time is part of the next one.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

from zeus_flows.errors import ConfigError
from zeus_flows.training.forms.events import EventLoop, check_batch_size, session_of
from zeus_flows.training.session import Session
from zeus_flows.training.training_loop import samples_in

#: Lightning under the name that the training has imported it by: some versions tell the two apart.
_OTHER_NAME = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
try:
    Callback: Any = import_module("pytorch_lightning" if _OTHER_NAME else "lightning.pytorch").Callback
except ImportError:
    raise ConfigError("ZeusLightningCallback needs lightning: pip install 'zeus-flows[lightning]'") from None

log = logging.getLogger(__name__)


class ZeusLightningCallback(Callback):  # type: ignore[misc]
    """Measures a `Trainer`'s steps, tunes the power limit meanwhile, reports the metric and stops when it is time.

    The metric is one that the module logs in validation, else one that it logs for whole epochs of training. The
    number of epochs is the job's. Outside of a job it does nothing.

    Args:
        session: The attempt's; None: that of the train function that runs now.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session_of(self, session)
        self._loop: EventLoop | None = None
        self._from_validation = False
        self._before: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the Trainer go on for as long as the job may."""
        if self._session is not None and stage == "fit" and trainer.max_epochs != self._session.max_epochs:
            log.info("max_epochs is the job's: %d", self._session.max_epochs)
            trainer.fit_loop.max_epochs = self._session.max_epochs

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the attempt's loop, if the Trainer is set up as the job decided."""
        session = self._session
        if session is None:
            return
        loader, accumulated = trainer.train_dataloader, int(trainer.accumulate_grad_batches)
        micro = _batch_size(loader) or session.batch_size // accumulated or 1
        if pl_module.automatic_optimization:  # else the module itself says how many batches a step takes
            check_batch_size(
                session,
                micro=micro,
                accumulated=accumulated,
                processes=int(trainer.world_size),
                write="give the training DataLoader batch_size=session.batch_size, "
                "divided by the Trainer's accumulate_grad_batches",
            )
        batches = trainer.num_training_batches
        known = [n for n in (samples_in(loader, micro), 0 if batches == float("inf") else batches * micro) if n]
        self._loop = EventLoop(session, samples=min(known, default=0), batch_size=micro * accumulated)
        trainer.should_stop = trainer.should_stop or self._loop.stops

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an epoch."""
        if self._loop is not None:
            self._loop.begin_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin an optimizer step, which several batches may share."""
        if self._loop is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            self._loop.step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an evaluation."""
        if self._loop is not None and not trainer.sanity_checking:
            self._before = dict(_metrics(trainer))
            self._loop.begin_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End an evaluation and report its metric."""
        if self._loop is None or self._session is None or trainer.sanity_checking:
            return
        before, self._before = self._before, {}  # what is there still was logged earlier, in training say
        found = {name: _number(value) for name, value in _metrics(trainer) if value is not before.get(name)}
        if self._loop.end_evaluation(found, self._session.target.metric):
            self._from_validation = True
        self._look(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End an epoch; report a metric that the module logs in training."""
        if self._loop is None or self._session is None:
            return
        self._loop.end_steps()
        if not self._from_validation:  # else it is there still, from an earlier epoch's
            logged = {name: _number(value) for name, value in _metrics(trainer)}
            self._loop.report(logged, self._session.target.metric)
        self._loop.end_epoch(evaluates=trainer.enable_validation)
        self._look(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the attempt's loop."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.end()

    def _look(self, trainer: Any) -> None:
        """Let the Trainer stop, where the session says so."""
        if self._loop is not None and self._loop.stops:
            trainer.should_stop = True


def _batch_size(loader: Any) -> int:
    """Return the batch size that a loader states; 0 where it states none, or where there are several loaders."""
    for what in (loader, getattr(loader, "batch_sampler", None)):
        stated = getattr(what, "batch_size", None)
        if isinstance(stated, int) and stated > 0:
            return stated
    return 0


def _metrics(trainer: Any) -> list[tuple[str, Any]]:
    """Return what the module has logged: names and tensors."""
    return list(trainer.callback_metrics.items())


def _number(value: Any) -> float:
    """Return a logged value. Lightning keeps 32 bits of it: 0.9 is 0.9 again here, and reaches a target of 0.9."""
    return float(str(value.cpu().numpy()))
