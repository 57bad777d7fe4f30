"""Starts a training command so that it dies with us, and counts its steps where it is Python with torch.

This file runs in the command's own interpreter, which need not have zeus_flows: only the standard library is
imported, and it is started by its path.

    python launcher.py --exec PROGRAM [ARGUMENT ...]       any program
    python launcher.py SCRIPT.py [ARGUMENT ...]            a Python script
    python launcher.py -m MODULE [ARGUMENT ...]            a Python module

A step is a call of an optimizer's `step()`: torch tells of each through a global hook, whatever the loop looks like, so
that gradient accumulation counts as one. A step that a gradient scaler leaves out because of an infinity is one too. A
loop with several optimizers is told by the steps of the one that stepped first, and that is said; where that one is
gone, or leaves the steps to another for good, the other's count.

Each step is one byte, STEP, written to where the command's output goes, so that steps and lines stay in order. Another,
PASS, says that the loader which the steps came from begins anew.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import signal
import sys
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

STEP = b"\x1e"
PASS = b"\x1f"
#: The process that waits for this one; where it is gone already, there is nobody to train for.
PARENT = "ZEUS_FLOWS_PARENT"
_PR_SET_PDEATHSIG = 1
#: Steps of other optimizers after which the counted one has left off for good; a critic may be far ahead for a while.
_LEFT_OFF = 200


def _nothing() -> None:
    """Stand for what was not seen yet, as a weak reference to what is gone does."""


class StepCounter:
    """Counts the steps of the optimizer that steps first, in the process that it was made in."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        self._pid = os.getpid()
        self._tells = os.environ.get("RANK", "0") == "0"  # of several ranks the first tells
        self._counted: Any = _nothing
        self._loader: Any = _nothing
        self._others = 0
        self._several = False
        self.count = 0

    def stepped(self, optimizer: object, *_: object) -> None:
        """Note a step of an optimizer."""
        counted = self._counted()
        if counted is not optimizer:
            if counted is not None and self._others < _LEFT_OFF:
                self._others += 1
                if not self._several:
                    self._several = True
                    print("zeus_flows: several optimizers step here; the steps of the first are counted", flush=True)  # noqa: T201
                return
            self._counted = weakref.ref(optimizer)
        self._others = 0
        if self._tells and os.getpid() == self._pid:
            self.count += 1
            os.write(self._out, STEP)

    def counts(self, optimizer: object) -> bool:
        """Return whether an optimizer is the one whose steps are counted."""
        return self._counted() is optimizer

    def began(self, loader: object) -> None:
        """Note that a loader is gone through; what the first step came from is the training's."""
        if not self.count:
            self._loader = weakref.ref(loader)
        elif self._loader() is loader and self._tells and os.getpid() == self._pid:
            os.write(self._out, PASS)

    def watch(self, torch_optim: ModuleType) -> None:
        """Be told of every step, now that `torch.optim` is imported."""
        register = getattr(sys.modules["torch.optim.optimizer"], "register_optimizer_step_post_hook", None)
        if register is None:
            print("zeus_flows: this torch cannot tell of steps; power limits are tried one per epoch", flush=True)  # noqa: T201
            return
        register(self.stepped)

    def watch_scaler(self, module: ModuleType) -> None:
        """Count the steps that a gradient scaler leaves out, too."""
        scaler: Any = module.GradScaler
        step = scaler.step

        def counted(self_: object, optimizer: object, *args: object, **kwargs: object) -> object:
            before = self.count
            result = step(self_, optimizer, *args, **kwargs)
            if self.count == before and self.counts(optimizer):
                self.stepped(optimizer)
            return result

        scaler.step = counted

    def watch_loader(self, module: ModuleType) -> None:
        """Be told when a loader is gone through."""
        loader: Any = module.DataLoader
        iterate = loader.__iter__

        def watched(self_: object) -> object:
            self.began(self_)
            return iterate(self_)

        loader.__iter__ = watched


def leave_the_run(fluent: ModuleType) -> None:
    """Let a script that names an experiment have runs of its own: MLflow would refuse to go on with ours there."""
    fluent_: Any = fluent
    set_experiment = fluent_.set_experiment

    def without_the_run(*args: object, **kwargs: object) -> object:
        os.environ.pop("MLFLOW_RUN_ID", None)
        return set_experiment(*args, **kwargs)

    fluent_.set_experiment = without_the_run


class _After(importlib.abc.MetaPathFinder):
    """Calls a function with a module once it has been imported."""

    def __init__(self, name: str, call: Any) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._call(module)

        loader.exec_module = exec_module
        return spec


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the process that started this one ends; Linux only."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.environ.pop(PARENT, str(os.getppid())) != str(os.getppid()):
        sys.exit("zeus_flows: whoever started this is gone")


def main(words: list[str]) -> None:
    """Run the command that the words are."""
    die_with_parent()
    if words[0] == "--exec":
        os.execvp(words[1], words[1:])  # noqa: S606
    steps = StepCounter()
    sys.meta_path.insert(0, _After("torch.optim", steps.watch))
    sys.meta_path.insert(0, _After("torch.amp.grad_scaler", steps.watch_scaler))
    sys.meta_path.insert(0, _After("torch.utils.data.dataloader", steps.watch_loader))
    sys.meta_path.insert(0, _After("mlflow.tracking.fluent", leave_the_run))
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()  # noqa: PTH109
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # noqa: PTH100, PTH120
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
