"""What a callback costs in a framework's training loop: a step with it against the bare framework's.

    pip install '.[huggingface,lightning]'
    python benchmarks/forms.py [--quick] [--json]

Hugging Face's `Trainer` and Lightning's train a model of one number whose forward pass takes 10 ms, on the emulated
NVML of `tests/gpu/nvml_emulator`, where setting a limit takes 15 ms: while seven power limits are profiled, and after.
Our callback is there for 50 steps and away for 50 in turns, within one training, so that other work on the machine does
not blur the comparison; while it is away, the session's clock stands still. Only what is spent outside of the 10 ms is
compared, by the clock and by the process's CPU time. A ratio is (10 ms + outside with us) / (10 ms + outside without);
a round is 50 steps of each.

Goal: at most 1.01, over all steps while limits are profiled (few rounds change a limit, and those are what it costs),
and in the median round after that. The worst round stands beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from loop import STEP_S, emulated_gpus, spin

from tests.builders import decision
from tests.training.rig import job_file
from zeus_flows import Session
from zeus_flows.gpu.simulated import Load

BLOCK = 50
GOAL = 1.01
SAMPLES = 1_000_000

Spent = tuple[float, float]


@dataclass
class Figure:
    """A ratio by clock or by CPU time: the median round's, or all steps'; and the worst round's."""

    what: str
    value: float
    worst: float
    rounds: int
    goal: float = GOAL

    @property
    def good(self) -> bool:
        """Whether the goal is met."""
        return self.value <= self.goal


class Enough(Exception):
    """Enough steps were made."""


class Watched:
    """What is spent outside of the 10 ms of each step, with our callback and without.

    Args:
        rounds: How many rounds to make once limits are profiled.

    Attributes:
        callbacks: The framework's list of them.
        ours: Our callback.
        profiled: Returns whether all limits are.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.callbacks: list[Any] = []
        self.ours: Any = None
        self.profiled: Callable[[], bool] = lambda: False
        self._pairs: dict[bool, list[dict[bool, list[Spent]]]] = {False: [], True: []}
        self._after = False
        self._step_ended: Spent | None = None
        self._away_since: float | None = None
        self._away_s = 0.0

    def clock(self) -> float:
        """Return seconds, without those for which our callback was away."""
        return (time.monotonic() if self._away_since is None else self._away_since) - self._away_s

    def step(self) -> None:
        """Take 10 ms; note what was spent since the last step, and whether the callback was there."""
        now = (time.perf_counter(), time.process_time())
        if self._step_ended is not None:
            self._note((now[0] - self._step_ended[0], now[1] - self._step_ended[1]))
        spin(STEP_S)
        self._step_ended = (time.perf_counter(), time.process_time())

    def figures(self, name: str) -> list[Figure]:
        """Return the ratios by clock and by CPU time."""
        found = []
        for which, unit in enumerate(("clock", "CPU")):
            for after, phase in ((False, "profiling"), (True, "after that")):
                pairs = [(_mean(pair[True], which), _mean(pair[False], which)) for pair in self._pairs[after]]
                ratios = [_ratio(with_us, without) for with_us, without in pairs]
                with_us, without = (statistics.fmean(side) for side in zip(*pairs, strict=True))
                value = statistics.median(ratios) if after else _ratio(with_us, without)
                what = f"{name}, {1e3 * (STEP_S + without):.1f} ms a step by the {unit}, {phase}"
                found.append(Figure(what, value, max(ratios), len(ratios)))
        return found

    def _note(self, spent: Spent) -> None:
        there = self.ours in self.callbacks
        if there and (not self._pairs[self._after] or self._pairs[self._after][-1][False]):
            self._after = self.profiled()
            self._pairs[self._after].append({True: [], False: []})
        block = self._pairs[self._after][-1][there]
        block.append(spent)
        if len(block) < BLOCK:
            return
        if there:
            self.callbacks.remove(self.ours)
            self._away_since = time.monotonic()
        else:
            if len(self._pairs[True]) == self._rounds:
                raise Enough
            assert self._away_since is not None
            self._away_s += time.monotonic() - self._away_since
            self._away_since = None
            self.callbacks.append(self.ours)
        self._step_ended = None


def _mean(block: list[Spent], which: int) -> float:
    return statistics.fmean(spent[which] for spent in block)


def _ratio(with_us: float, without: float) -> float:
    return (STEP_S + with_us) / (STEP_S + without)


class OneNumber(torch.nn.Module):
    """A model of one number, whose forward pass takes 10 ms."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.number = torch.nn.Parameter(torch.zeros(1))
        self._watched = [watched]

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        """Return a loss."""
        self._watched[0].step()
        return {"loss": (self.number * x).mean()}


class Ones(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A million ones."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(1)}


def huggingface(watched: Watched, session: Session, folder: str) -> None:
    """Train with Hugging Face's Trainer."""
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers.utils import logging

    from zeus_flows import ZeusTrainerCallback

    logging.set_verbosity_error()
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=1,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    watched.ours = ZeusTrainerCallback(session)
    trainer = Trainer(
        OneNumber(watched), arguments, train_dataset=Ones(), eval_dataset=Ones(), callbacks=[watched.ours]
    )
    trainer.remove_callback(PrinterCallback)
    watched.callbacks = trainer.callback_handler.callbacks
    trainer.train()


def lightnings(watched: Watched, session: Session, folder: str) -> None:
    """Train with Lightning's Trainer."""
    import logging
    import warnings

    import lightning
    from torch.utils.data import DataLoader

    from zeus_flows import ZeusLightningCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*|pytorch_lightning.*")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = OneNumber(watched)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(batch["x"])["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    watched.ours = ZeusLightningCallback(session)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watched.ours],
    )
    watched.callbacks = trainer.callbacks
    trainer.fit(Module(), DataLoader(Ones(), batch_size=1))


FORMS: dict[str, Callable[[Watched, Session, str], None]] = {"Hugging Face": huggingface, "Lightning": lightnings}


def measure(name: str, rounds: int) -> list[Figure]:
    file = job_file(max_epochs=1, batch_sizes=[1], default_batch_size=1, power_limit={"profile_all_limits": True})
    watched = Watched(rounds)
    with (
        tempfile.TemporaryDirectory() as folder,
        emulated_gpus(Path(folder), virtual=False, clock=watched.clock, NVMLEMU_SET_MS="15") as (gpus, emulator),
    ):
        emulator.load(Load(30.0, 238.0, active=0.92, clock_bound=0.3))
        session = Session(file, file.core(), decision(1, batch_size=1), gpus)
        watched.profiled = lambda: session._tuner.settled_w is not None
        try:
            FORMS[name](watched, session, folder)
        except Enough:
            session.close()
            return watched.figures(name)
    raise AssertionError("a million steps were not enough")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = [figure for name in FORMS for figure in measure(name, 10 if options.quick else 40)]
    if options.json:
        print(json.dumps([asdict(figure) | {"good": figure.good} for figure in figures], indent=2))
    else:
        for figure in figures:
            mark = "ok" if figure.good else "MISSED"
            worst = f"worst of {figure.rounds} rounds {figure.worst:.4f}"
            print(f"{figure.what:58} {figure.value:8.5f}  {worst:32} goal <= {figure.goal:g}  {mark}")
    return 0 if all(figure.good for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
