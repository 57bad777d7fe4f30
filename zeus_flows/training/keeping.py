"""The model that an attempt keeps: staged on this machine while it trains, sent to MLflow once it reached the target.

def train(session):
    ...
    session.keep(model, hidden=64)          # weights without pickle, and what is needed to build the model again

def evaluate(question):
    kept = open_model(question.model_uri)
    model = build(hidden=kept.about["hidden"])
    kept.load_into(model)
    return accuracy(model, ...)

What is staged survives a killed process: whoever comes next on this machine sends it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from zeus_flows.core.json import from_text, to_text
from zeus_flows.errors import TrainingError
from zeus_flows.private_files import private_folder
from zeus_flows.process_lock import ProcessLock

log = logging.getLogger(__name__)

#: Files of a kept model.
WEIGHTS: Final = "model.safetensors"
ABOUT: Final = "about.json"


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A model whose attempt reached the target, on its way to MLflow.

    Attributes:
        ledger: The ledger's key: which store, which job.
        attempt: What the ledger calls the attempt.
        model_id: The logged model that was begun for it; empty before.
    """

    ledger: str
    attempt: str
    model_id: str = ""


class Keeper:
    """Stages one attempt's model. The newest one that is kept counts, and only where the attempt reaches the target.

    Args:
        root: The folder for all staged models of this machine.
        ledger: Returns the ledger's key.
        attempt: What the ledger calls the attempt.
    """

    def __init__(self, root: Path, ledger: Callable[[], str], attempt: str) -> None:
        self._root, self._ledger, self._attempt = root, ledger, attempt
        self._place: _Place | None = None

    @property
    def holds(self) -> bool:
        """Whether a model was kept."""
        return self._place is not None and self._place.model.exists()

    @property
    def folder(self) -> Path:
        """Where another process of this attempt may stage its model, with `stage`."""
        return self._own().model

    def keep(self, model: object, about: Mapping[str, Any]) -> None:
        """Stage a model, in place of the one before.

        Raises:
            TrainingError: it cannot be kept.
        """
        stage(model, about, self._own().model)

    def close(self, *, converged: bool) -> None:
        """Let the model be sent where the attempt reached the target; else drop it."""
        place, self._place = self._place, None
        if place is None:
            return
        try:
            if converged and place.model.exists():
                place.write(StagedModel(self._ledger(), self._attempt))
            else:
                shutil.rmtree(place.folder, ignore_errors=True)
        except OSError as error:
            log.error("the model could not be kept: %s", error)
        finally:
            place.lock.release()

    def _own(self) -> _Place:
        while self._place is None:
            place = _Place(self._root / uuid.uuid4().hex)
            if place.lock.acquire() and place.folder.exists():  # else whoever sends models took it for a dead one's
                self._place = place
        return self._place


class _Place:
    """The folder of one staged model: the model, whose it is once that is sure, and who works on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self._file = folder, folder / "model", folder / "staged.json"
        self.lock = ProcessLock(folder / "lock")

    def write(self, staged: StagedModel) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_text(to_text(staged), encoding="utf-8")
        draft.replace(self._file)

    def read(self) -> StagedModel | None:
        try:
            return from_text(StagedModel, self._file.read_text(encoding="utf-8"))
        except (OSError, AttributeError, TypeError, ValueError, LookupError):
            return None


class Staging:
    """All staged models of this machine, for whoever sends them.

    Args:
        root: Their folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def any_of(self, ledger: str) -> bool:
        """Return whether a job has a model here that waits to be sent."""
        found = (_Place(folder).read() for folder in self._folders())
        return any(staged is not None and staged.ledger == ledger for staged in found)

    def take(self, ledger: str) -> Iterator[tuple[StagedModel, Path, _Sending]]:
        """Yield a job's staged models that nobody else works on; each is ours until the next is asked for.

        What a killed process left before its attempt was known to reach the target is removed.
        """
        for folder in self._folders():
            place = _Place(folder)
            try:
                if not place.lock.acquire():
                    continue
            except OSError:
                continue
            try:
                staged = place.read()
                if staged is None:
                    shutil.rmtree(folder, ignore_errors=True)
                elif staged.ledger == ledger:
                    yield staged, place.model, _Sending(place, staged)
            finally:
                place.lock.release()

    def _folders(self) -> list[Path]:
        return sorted(path for path in self._root.glob("*") if path.is_dir()) if self._root.is_dir() else []


@dataclass(frozen=True, slots=True)
class _Sending:
    """Remembers how far the sending of a staged model has come."""

    place: _Place
    staged: StagedModel

    def begun(self, model_id: str) -> None:
        """Remember the logged model, so that a second try goes on with it."""
        self.place.write(replace(self.staged, model_id=model_id))

    def over(self) -> None:
        """Remove what was sent."""
        shutil.rmtree(self.place.folder, ignore_errors=True)


# -- files -----------------------------------------------------------------------------------------------------------


def stage(model: object, about: Mapping[str, Any], folder: Path) -> None:
    """Write a model into a folder, whole or not at all.

    Args:
        model: A torch module, its weights by name, or the path of a file or folder.
        about: What is needed to build it again, as JSON has it.
        folder: Where to.

    Raises:
        TrainingError: it is something else, or there is no such path.
    """
    try:
        text = json.dumps(dict(about), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TrainingError(
            f"session.keep() takes numbers, texts, lists and dicts beside the model ({error})"
        ) from None
    private_folder(folder.parent)
    draft = folder.with_name(f"draft-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    try:
        if isinstance(model, str | os.PathLike):
            _copy(Path(model), draft)
        else:
            _write_weights(model, draft / WEIGHTS)
        if about:
            (draft / ABOUT).write_text(text, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _copy(path: Path, folder: Path) -> None:
    if not path.exists():
        raise TrainingError(f"session.keep(): there is no file or folder {path}")
    if path.is_dir():
        shutil.copytree(path, folder, dirs_exist_ok=True, symlinks=False)
    else:
        shutil.copy2(path, folder / path.name)


def _write_weights(model: object, file: Path) -> None:
    import torch
    from safetensors.torch import save_file, save_model

    if isinstance(model, torch.nn.Module):
        if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            model = model.module
        save_model(cast(torch.nn.Module, model), str(file))
    elif isinstance(model, Mapping) and model and all(isinstance(value, torch.Tensor) for value in model.values()):
        save_file({str(name): value.detach().cpu().contiguous().clone() for name, value in model.items()}, str(file))
    else:
        raise TrainingError(
            f"session.keep() takes a torch module, its weights by name, or a path, not a {type(model).__name__}; "
            "write what you have to a file, and keep that"
        )


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model that an attempt kept, on this machine.

    Attributes:
        folder: Its files.
        about: What was said about it when it was kept.
    """

    folder: Path
    about: Mapping[str, Any]

    def weights(self) -> dict[str, Any]:
        """Return the weights by name, on the CPU."""
        from safetensors.torch import load_file

        return dict(load_file(str(self.folder / WEIGHTS)))

    def load_into(self, model: Any) -> None:
        """Load the weights into a torch module that is built as the kept one was."""
        from safetensors.torch import load_model

        load_model(model, str(self.folder / WEIGHTS))


def open_model(uri: str) -> KeptModel:
    """Return a kept model by its address: `question.model_uri`, or `models:/ranker@champion`.

    Its files are copied to this machine unless they are there. Outside of a job MLFLOW_TRACKING_URI says where to look.
    """
    folder = Path(uri)
    if not folder.is_dir():
        from mlflow.artifacts import download_artifacts

        folder = Path(download_artifacts(uri))
    about = folder / ABOUT
    return KeptModel(folder, json.loads(about.read_text(encoding="utf-8")) if about.exists() else {})


@contextmanager
def tracking_at(tracking_uri: str | None) -> Iterator[None]:
    """Let MLflow's own functions look where the job's runs are, until the block ends."""
    if tracking_uri is None:
        yield
        return
    import mlflow

    before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None  # type: ignore[no-untyped-call]
    mlflow.set_tracking_uri(tracking_uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None: as it was
