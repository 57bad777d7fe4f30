"""What files say about deployments: one for each job or experiment, with all that it pins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.file import load_experiment
from zeus_flows.job_file import load_job
from zeus_flows.job_sections.gpu_section import SimulatedGpu
from zeus_flows.masking import without_secrets
from zeus_flows.orchestration.pinned import digest_of
from zeus_flows.orchestration.slots import TAG
from zeus_flows.settings import Settings

_SQLITE: Final = "sqlite:///"


@dataclass(frozen=True, slots=True)
class Deployable:
    """A file as a deployment: which flow, under which name, with which parameters.

    Attributes:
        path: The file, as it was typed.
        flow: The flow's name, `recurrence` or `capriccio`; `zeus_flows.orchestration.deployed` has both.
        name: The job's or the experiment's.
        parameters: What every run gets.
        free: Those of its parameters, beside the pinned ones, that a caller may state.
        limit: How many of its runs may go on at once; None: any number.
        tags: What it and its runs are found by.
        about: What people read of it.
    """

    path: Path
    flow: str
    name: str
    parameters: dict[str, Any]
    free: tuple[str, ...]
    limit: int | None
    tags: tuple[str, ...]
    about: str

    @property
    def full_name(self) -> str:
        """What Prefect's commands call it."""
        return f"{self.flow}/{self.name}"


@dataclass(frozen=True, slots=True)
class Pins:
    """What a deployment is to pin beside its file.

    Attributes:
        folder: Where runs work, on the workers' machines.
        tracking_uri: Where MLflow runs go; None: as the file or the environment says.
        simulate: A simulated GPU, whatever the job files say.
    """

    folder: Path | None = None
    tracking_uri: str | None = None
    simulate: SimulatedGpu | None = None


def files_of(path: Path) -> list[Path]:
    """Return a file, or the YAML files of a folder.

    Raises:
        ConfigError: the folder holds none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml") and file.is_file())
    if not found:
        raise ConfigError(f"{path}: this folder has no job file (*.yaml)\n  `zeus-flows init` writes one to start from")
    return found


def read_deployables(paths: Sequence[Path], pins: Pins, settings: Settings) -> list[Deployable]:
    """Return a deployment for each file.

    Raises:
        ConfigError: files are wrong, or two of them have one name; the text names all of them.
    """
    found, wrong = list[Deployable](), list[str]()
    for path in paths:
        try:
            found.append(_read(path, pins, settings))
        except ConfigError as error:
            wrong.append(str(error))
    homes = defaultdict(list)
    for deployable in found:
        homes[deployable.full_name].append(str(deployable.path))
    wrong += [
        f"{', '.join(places)}: have one name, {full_name.partition('/')[2]}; a job has one file"
        for full_name, places in homes.items()
        if len(places) > 1
    ]
    if wrong:
        raise ConfigError("\n".join(wrong) + ("\nnothing was deployed" if len(paths) > 1 else ""))
    return found


def _read(path: Path, pins: Pins, settings: Settings) -> Deployable:
    folder = pins.folder or Path.cwd()
    pinned: dict[str, Any] = {"folder": str(folder)}
    if _is_experiment(path):
        experiment = load_experiment(path)
        uri = settings.tracking(pins.tracking_uri, experiment.tracking_uri)
        pinned |= {"experiment_file": _place(path), **_pin(path, uri, folder)}
        tags, about = (TAG, f"experiment:{experiment.name}"), _about("The drift experiment", experiment.name, path)
        return Deployable(path, "capriccio", experiment.name, pinned, (), 1, tags, about)
    job = load_job(path)
    uri = settings.tracking(pins.tracking_uri, job.tracking_uri)
    pinned |= {"job_file": _place(path), **_pin(path, uri, folder), "simulate": pins.simulate}
    tags, about = (TAG, f"job:{job.name}"), _about("One recurrence of the job", job.name, path)
    return Deployable(path, "recurrence", job.name, pinned, ("seed", "mode"), 1, tags, about)


def _about(what: str, name: str, path: Path) -> str:
    return (
        f"{what} {name}, as {path.name} says. Made by `zeus-flows deploy`: change the file and deploy it again. "
        "Callers of runs can change nothing that is pinned."
    )


def _is_experiment(path: Path) -> bool:
    """Whether a file is an experiment's; what cannot be read is left to whoever reads job files to complain about."""
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False
    return isinstance(read, dict) and "slices" in read


def _place(path: Path) -> str:
    """Return where a run finds a file: from its folder, where the file is below the one that we are in."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _pin(path: Path, uri: str, folder: Path) -> dict[str, str]:
    return {"digest": digest_of(path.read_bytes()), "tracking_uri": without_secrets(_from(folder, uri))}


def _from(folder: Path, uri: str) -> str:
    """Return a tracking URI that means the same wherever a run begins.

    >>> _from(Path("/srv"), "sqlite:///mlflow.db"), _from(Path("/srv"), "sqlite:////data/mlflow.db")
    ('sqlite:////srv/mlflow.db', 'sqlite:////data/mlflow.db')
    """
    return f"{_SQLITE}{folder / uri.removeprefix(_SQLITE)}" if uri.startswith(_SQLITE) else uri
