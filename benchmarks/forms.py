"""What a form costs in a training loop: a step through the launcher or a callback against the bare framework's.

    pip install '.[huggingface,lightning]'
    python benchmarks/forms.py [--quick] [--json]

A model of one number whose forward pass takes 10 ms is trained by Hugging Face's `Trainer`, by Lightning's, and by a
script that the launcher starts, on the emulated NVML of `tests/gpu/nvml_emulator`, where setting a limit takes 15 ms:
while seven power limits are profiled, and after. We are there for 50 steps and away for 50 in turns, within one
training, so that other work on the machine does not blur the comparison. Only what is spent outside of the 10 ms is
compared, by the clock and by CPU time; by the clock, steps in which the kernel gave the core to another program are
left out on both sides. The launcher's CPU time is the script's and that of the process that reads its steps. A ratio is
(10 ms + outside with us) / (10 ms + outside without); a round is 50 steps of each.

Goal: at most 1.01, over all steps while limits are profiled (few rounds change a limit, and those are what it costs),
and in the median round after that. The mean over all steps and the worst round stand beside it.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from loop import STEP_S, emulated_gpus, spin

from tests.builders import decision
from tests.training.rig import job_file
from zeus_flows import Session
from zeus_flows.gpu.simulated import Load
from zeus_flows.training.forms.child import output_log
from zeus_flows.training.forms.command import find_command

BLOCK = 50
GOAL = 1.01
SAMPLES = 1_000_000
#: What the emulated GPU carries: while we are away nothing, as its energy would seem to be that of half the time.
WORKS, RESTS = Load(30.0, 110.0, active=0.92, clock_bound=0.3), Load(30.0, 40.0, active=0.01, clock_bound=0.01)


class Spent(NamedTuple):
    """Seconds by the clock and of CPU time, and whether another program had the core meanwhile."""

    clock_s: float
    cpu_s: float
    disturbed: bool = False


#: What the steps of a round took, with us and without.
Round = dict[bool, list[Spent]]


@dataclass
class Figure:
    """A ratio by clock or by CPU time: the one that is held to the goal, that of all steps, and the worst round's."""

    what: str
    value: float
    mean: float
    worst: float
    rounds: int
    goal: float = GOAL

    @property
    def good(self) -> bool:
        """Whether the goal is met."""
        return self.value <= self.goal


def now() -> tuple[float, float, int]:
    """Return the clock, this process's CPU time, and how often this thread had to leave the core to another program."""
    return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def figures(name: str, rounds: dict[bool, list[Round]]) -> list[Figure]:
    """Return the ratios by clock and CPU time, of rounds while limits were profiled (False) and after that (True)."""
    found = []
    for which, unit in (("clock_s", "clock"), ("cpu_s", "CPU")):
        for after, phase in ((False, "profiling"), (True, "after that")):
            taken = [(_taken(pair[True], which), _taken(pair[False], which)) for pair in rounds[after]]
            pairs = [(statistics.fmean(a), statistics.fmean(b)) for a, b in taken if a and b]
            if not pairs:
                continue
            ratios = [_ratio(with_us, without) for with_us, without in pairs]
            with_us, without = (statistics.fmean(side) for side in zip(*pairs, strict=True))
            mean = _ratio(with_us, without)
            what = f"{name}, {1e3 * (STEP_S + without):.1f} ms a step by the {unit}, {phase}"
            found.append(Figure(what, statistics.median(ratios) if after else mean, mean, max(ratios), len(ratios)))
    return found


def _taken(block: list[Spent], which: str) -> list[float]:
    """Return what each step took; by the clock only those count in which nobody else had the core."""
    return [getattr(spent, which) for spent in block if which == "cpu_s" or not spent.disturbed]


def _ratio(with_us: float, without: float) -> float:
    return (STEP_S + with_us) / (STEP_S + without)


class Enough(Exception):
    """Enough steps were made."""


class Watched:
    """What is spent outside of the 10 ms of each step, with our callback and without.

    Args:
        rounds: How many rounds to make once limits are profiled.

    Attributes:
        rounds: What was found, while limits were profiled and after that.
        callbacks: The framework's list of them.
        ours: Our callback.
        profiled: Returns whether all limits are.
        carry: Lets the GPU work, or rest.
    """

    def __init__(self, rounds: int) -> None:
        self._wanted = rounds
        self.rounds: dict[bool, list[Round]] = {False: [], True: []}
        self.callbacks: list[Any] = []
        self.ours: Any = None
        self.profiled: Callable[[], bool] = lambda: False
        self.carry: Callable[[Load], object] = lambda _: None
        self._after = False
        self._step_ended: tuple[float, float, int] | None = None
        self._away_since: float | None = None
        self._away_s = 0.0

    def clock(self) -> float:
        """Return seconds, without those for which our callback was away."""
        return (time.monotonic() if self._away_since is None else self._away_since) - self._away_s

    def step(self) -> None:
        """Take 10 ms; note what was spent since the last step, and whether the callback was there."""
        at, before = now(), self._step_ended
        if before is not None:
            self._note(Spent(at[0] - before[0], at[1] - before[1], at[2] != before[2]))
        spin(STEP_S)
        self._step_ended = now()

    def _note(self, spent: Spent) -> None:
        there, rounds = self.ours in self.callbacks, self.rounds
        if there and (not rounds[self._after] or rounds[self._after][-1][False]):
            self._after = self.profiled()
            rounds[self._after].append({True: [], False: []})
        block = rounds[self._after][-1][there]
        block.append(spent)
        if len(block) < BLOCK:
            return
        if there:
            self.callbacks.remove(self.ours)
            self._away_since = time.monotonic()
            self.carry(RESTS)
        else:
            if len(rounds[True]) == self._wanted:
                raise Enough
            assert self._away_since is not None
            self.carry(WORKS)
            self._away_s += time.monotonic() - self._away_since
            self._away_since = None
            self.callbacks.append(self.ours)
        self._step_ended = None


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


#: Steps of torch with the launcher's hook and without. What they took goes to a file, and each block is announced.
SCRIPT = """
import json, resource, sys, time, torch
from torch.optim import optimizer as hooks
rounds, steps, step_s, found = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), []
torch.set_num_threads(1)
number, x = torch.nn.Parameter(torch.zeros(1)), torch.ones(1)
adam = torch.optim.AdamW([number], lr=1e-3)
ours = dict(hooks._global_optimizer_post_hooks)
assert ours, "the launcher is not there"

def now():
    return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw

def block():
    spent = []
    for _ in range(steps):
        end = time.perf_counter() + step_s
        while time.perf_counter() < end:
            pass
        before = now()
        adam.zero_grad()
        (number * x).mean().backward()
        adam.step()
        after = now()
        spent.append([after[0] - before[0], after[1] - before[1], after[2] != before[2]])
    return spent

for _ in range(rounds):
    for there in (True, False):
        hooks._global_optimizer_post_hooks.clear()
        hooks._global_optimizer_post_hooks.update(ours if there else {})
        print("with" if there else "without")
        found.append(block())
print("over")
json.dump(found, open(sys.argv[4], "w"))
print("metric=1")
"""


class Announced(logging.Handler):
    """Notes this process's CPU time, and whether limits are profiled, where a block is announced."""

    def __init__(self, profiled: Callable[[], bool]) -> None:
        super().__init__()
        self.profiled, self.at = profiled, list[tuple[float, bool]]()

    def emit(self, record: logging.LogRecord) -> None:
        """Note it."""
        if record.getMessage() in ("with", "without", "over"):
            self.at.append((time.process_time(), self.profiled()))


def launched(rounds: int) -> list[Figure]:
    """Return what a script's steps take through the launcher."""
    with (
        tempfile.TemporaryDirectory() as folder,
        emulated_gpus(Path(folder), virtual=False, NVMLEMU_SET_MS="15") as (gpus, emulator),
    ):
        emulator.load(WORKS)
        (Path(folder) / "train.py").write_text(SCRIPT)
        found = Path(folder) / "found.json"
        words = ["python", "train.py", str(rounds), str(BLOCK), str(STEP_S), str(found), "{batch_size}"]
        file = job_file(
            train={"command": words, "folder": folder, "metric": {"pattern": "metric=(.)"}, "samples_per_epoch": 10**6},
            **_ONE_BATCH_SIZE,
        )
        session = Session(file, file.core(), decision(1, batch_size=1), gpus)
        announced = Announced(lambda: session._tuner.settled is not None)
        output_log.addHandler(announced)
        output_log.setLevel(logging.INFO)
        output_log.propagate = False
        try:
            find_command(file)(session)
        finally:
            output_log.removeHandler(announced)
            session.close()
        blocks = [[Spent(*spent) for spent in block] for block in json.loads(found.read_text())]
    by_phase: dict[bool, list[Round]] = {False: [], True: []}
    for index, ((began_s, after), (ended_s, _)) in enumerate(zip(announced.at, announced.at[1:], strict=False)):
        reading_s = (ended_s - began_s) / BLOCK
        block = [spent._replace(cpu_s=spent.cpu_s + reading_s) for spent in blocks[index]]
        if index % 2 == 0:
            by_phase[after].append({True: block, False: []})
            both = by_phase[after][-1]
        else:
            both[False] = block
    return figures("Launcher", by_phase)


FORMS: dict[str, Callable[[Watched, Session, str], None]] = {"Hugging Face": huggingface, "Lightning": lightnings}
_ONE_BATCH_SIZE: dict[str, Any] = {
    "max_epochs": 1,
    "batch_sizes": [1],
    "default_batch_size": 1,
    "power_limit": {"profile_all_limits": True},
}


def called_back(name: str, rounds: int) -> list[Figure]:
    """Return what a framework's steps take with our callback."""
    file, watched = job_file(**_ONE_BATCH_SIZE), Watched(rounds)
    with (
        tempfile.TemporaryDirectory() as folder,
        emulated_gpus(Path(folder), virtual=False, clock=watched.clock, NVMLEMU_SET_MS="15") as (gpus, emulator),
    ):
        watched.carry = emulator.load
        emulator.load(WORKS)
        session = Session(file, file.core(), decision(1, batch_size=1), gpus)
        watched.profiled = lambda: session._tuner.settled is not None
        try:
            FORMS[name](watched, session, folder)
        except Enough:
            session.close()
            return figures(name, watched.rounds)
    raise AssertionError("a million steps were not enough")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 10 if options.quick else 40
    found = launched(2 * rounds + 50)
    found += [figure for name in FORMS for figure in called_back(name, rounds)]
    if options.json:
        print(json.dumps([asdict(figure) | {"good": figure.good} for figure in found], indent=2))
    else:
        for figure in found:
            mark = "ok" if figure.good else "MISSED"
            beside = f"mean {figure.mean:.5f}, worst of {figure.rounds} rounds {figure.worst:.4f}"
            print(f"{figure.what:58} {figure.value:8.5f}  {beside:46} goal <= {figure.goal:g}  {mark}")
    return 0 if all(figure.good for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
