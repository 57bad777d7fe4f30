"""The experiment file: which data, which slices, which model, which job, and which policies side by side."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from zeus_flows.errors import ConfigError
from zeus_flows.experiments.capriccio.bert import require, weights_digest
from zeus_flows.experiments.capriccio.dataset_files import (
    READING,
    Progress,
    read_csv,
    read_flights,
    read_parquet,
    read_sentiment140,
)
from zeus_flows.experiments.capriccio.datasets import Dataset
from zeus_flows.experiments.capriccio.models import ModelSection, Scores
from zeus_flows.experiments.capriccio.rows import TableLayout
from zeus_flows.experiments.capriccio.slices import Slice, SliceWindow, cut, sizes
from zeus_flows.experiments.flights.data import require_data
from zeus_flows.job_file import JobFile, parse_job
from zeus_flows.job_sections.wording import NAME_PATTERN
from zeus_flows.yaml_file import Document, Kind, Section

TRAIN_FUNCTION = "zeus_flows.experiments.capriccio.curves:train"
NOT_THEIRS = ("name", "train", "tracking_uri", "version")  # keys that neither `job` nor a contender may have


class DataSection(Section):
    """Where the rows come from; `capriccio.dataset_files` says what each kind is."""

    kind: Literal["sentiment140", "csv", "parquet", "flights"]
    path: Path | None = None
    malformed: float = Field(default=0.01, ge=0, le=1)
    time: str | None = None
    label: str | None = None
    positive: str | None = None
    text: str | None = None
    numbers: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    time_format: str | None = None
    encoding: str = "utf-8"

    @model_validator(mode="after")
    def _is_whole(self) -> DataSection:
        if self.kind != "flights" and self.path is None:
            raise ValueError("path is missing: where is the file?")
        if self.kind in ("csv", "parquet"):
            if self.time is None or self.label is None:
                raise ValueError("time and label must name columns")
            if (self.text is None) == (not self.numbers and not self.categories):
                raise ValueError("name either a text column, or numbers and categories")
        return self

    def read(self, *, keep_text: bool, progress: Progress | None = None) -> Dataset:
        """Return the dataset."""
        progress = progress or READING.get()
        if self.kind == "flights":
            return read_flights()
        assert self.path is not None
        if self.kind == "sentiment140":
            return read_sentiment140(self.path, most_malformed=self.malformed, keep_text=keep_text, progress=progress)
        assert self.time is not None
        assert self.label is not None
        layout = TableLayout(
            self.time, self.label, self.text, self.numbers, self.categories, self.positive, self.time_format
        )
        if self.kind == "csv":
            return read_csv(
                self.path,
                layout,
                most_malformed=self.malformed,
                keep_text=keep_text,
                encoding=self.encoding,
                progress=progress,
            )
        return read_parquet(self.path, layout, most_malformed=self.malformed, keep_text=keep_text, progress=progress)


class SlicesSection(Section):
    """How slices are cut (`SliceWindow`), and what of them is trained on."""

    rows: int | None = Field(default=None, gt=0)
    fraction: float | None = Field(default=None, gt=0, le=1)
    days: int | None = Field(default=None, gt=0)
    stride_days: int = Field(default=1, gt=0)
    start: date | None = None
    empty: Literal["repeat", "skip"] = "repeat"
    most: int | None = Field(default=None, gt=0)
    validation: float = Field(default=0.2, gt=0, lt=1)
    train_rows: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _has_one_window(self) -> SlicesSection:
        if sum(x is not None for x in (self.rows, self.fraction, self.days)) != 1:
            raise ValueError("give the window in exactly one of rows, fraction and days")
        return self

    def window(self) -> SliceWindow:
        """Return how slices are cut."""
        return SliceWindow(self.rows, self.fraction, self.days, self.stride_days, self.start, self.empty, self.most)


class Contender(BaseModel):
    """A policy that runs beside others on the same slices and seeds; any other key is one of a job file.

    `gate` skips a slice on which the newest model still meets the target (see `capriccio_gate`).
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    policy: str
    gate: bool = False

    def job_keys(self) -> dict[str, Any]:
        """Return what it changes in the job."""
        return self.model_dump(exclude={"gate"})


class ScienceSection(Section):
    """What is measured beside the recurrences, where the GPU is simulated.

    Attributes:
        seeds: Training runs of every batch size on every slice; recurrences draw from the same.
        replays: Times the whole experiment is replayed in memory, for intervals; 0: none.
        placebo: Whether to do it all again with time shuffled.
        workers: Processes that train.
    """

    seeds: int = Field(default=3, ge=1)
    replays: int = Field(default=20, ge=0)
    placebo: bool = True
    workers: int = Field(default=2, ge=1)


class ExperimentFile(Section):
    """An experiment as its user writes it."""

    name: str
    data: DataSection
    slices: SlicesSection
    model: ModelSection
    job: dict[str, Any]
    contenders: dict[Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")], Contender] = Field(min_length=1)
    science: ScienceSection = ScienceSection()
    tracking_uri: str | None = Field(default=None, repr=False)

    @field_validator("name")
    @classmethod
    def _name_is_plain(cls, value: str) -> str:
        if not re.fullmatch(NAME_PATTERN, value) or len(value) > 40:
            raise ValueError("must be 1 to 40 letters, digits, '_', '.' or '-', and start with a letter or digit")
        return value

    @property
    def simulated(self) -> bool:
        """Whether energy is simulated: then training can be looked up, and repeated at will."""
        return str(self.job.get("device", "auto")).startswith("simulated-")

    def digest(self, dataset: Dataset) -> str:
        """Return a hash of everything that recurrences depend on, the contenders apart."""
        parts = self.model_dump(mode="json", include={"slices", "model", "job"}) | {"seeds": self.science.seeds}
        parts["model"].pop("directory")  # wherever it is, what counts is what is in it
        if self.model.kind == "bert":
            parts["model"]["weights"] = weights_digest(require(self.model.directory))
        return hashlib.sha256(json.dumps([dataset.digest, parts], sort_keys=True).encode()).hexdigest()[:16]

    def job_file(self, contender: str, *, version: str = "1", parameters: Mapping[str, str] | None = None) -> JobFile:
        """Return the job of one contender.

        Args:
            contender: Which.
            version: Part of the fingerprint: other data must not continue a history.
            parameters: What the train function is called with.

        Raises:
            ConfigError: `job` is wrong, or this contender's part.
        """
        theirs = self.contenders[contender]
        fields = (
            self.job
            | theirs.job_keys()
            | {
                "name": f"{self.name}.{contender}",
                "version": version,
                "train": {"function": TRAIN_FUNCTION, "parameters": dict(parameters or {})},
            }
        )
        return parse_job(json.dumps(fields, default=str), source="job")

    def cut(self, dataset: Dataset) -> tuple[Slice, ...]:
        """Return the dataset's slices."""
        return cut(dataset, self.slices.window())

    def sizes(self, slices: tuple[Slice, ...]) -> tuple[int, int]:
        """Return how many rows of a slice are trained and validated on."""
        return sizes(slices, validation=self.slices.validation, most_rows=self.slices.train_rows)


_FILE = Kind(
    ExperimentFile,
    name="experiment file",
    start="deployments/experiments has some to start from",
    examples={"name": "my-experiment"},
)


def load_experiment(path: Path, *, data: Path | None = None) -> ExperimentFile:
    """Return the experiment that a file describes.

    Args:
        path: The file; paths in it are relative to its directory.
        data: The data file, whatever the experiment file says.

    Raises:
        ConfigError: the file cannot be read or is wrong; the text names the file, the line and what is wrong.
    """
    read = _FILE.load(path)
    experiment = _checked(read)
    if experiment.data.kind == "flights":
        try:
            require_data()
        except ConfigError as error:
            raise ConfigError(f"{read.at('data', 'kind')}: {error}") from None
    directory = _beside(path, experiment.model.directory)
    if experiment.model.kind == "bert":
        try:
            require(directory)
        except ConfigError as error:
            raise ConfigError(f"{read.at('model', 'directory')}: {error}") from None
    stated = data if data is not None else _beside(path, experiment.data.path)
    return experiment.model_copy(
        update={
            "data": experiment.data.model_copy(update={"path": stated}),
            "model": experiment.model.model_copy(update={"directory": directory}),
        }
    )


def parse_experiment(text: str, *, source: str = "experiment file") -> ExperimentFile:
    """Return the experiment that YAML text describes; `source` is what errors call it."""
    return _checked(_FILE.parse(text, source=source))


def _checked(read: Document[ExperimentFile]) -> ExperimentFile:
    """Return the experiment, or raise where `job` or a contender is no valid part of a job file."""
    experiment = read.model
    parts: dict[tuple[str, ...], dict[str, Any]] = {("job",): experiment.job}
    parts |= {("contenders", name): theirs.job_keys() for name, theirs in experiment.contenders.items()}
    for where, part in parts.items():
        for key in NOT_THEIRS:
            if key in part:
                raise ConfigError(f"{read.at(*where, key)}: {key} is the experiment's own; leave it out")
    for name, theirs in experiment.contenders.items():
        try:
            job = experiment.job_file(name)
        except ConfigError as error:
            what = str(error).splitlines()[0].partition(": ")[2]
            field = re.split(r"[ :.]", what, maxsplit=1)[0]
            at = ("contenders", name, field) if field in theirs.job_keys() else ("job", field)
            raise ConfigError(f"{read.at(*at)}: {'.'.join(at[:-1])}.{what}") from None
        if theirs.gate and not experiment.simulated:
            where_gate = read.at("contenders", name, "gate")
            raise ConfigError(f"{where_gate}: contenders.{name}.gate needs a simulated GPU: models are made again")
        if job.target.metric not in Scores._fields:
            where_metric = read.at("job", "target", "metric")
            raise ConfigError(f"{where_metric}: job.target.metric must be one of {', '.join(Scores._fields)}")
    return experiment


def _beside(file: Path, path: Path | None) -> Path | None:
    return None if path is None else file.parent / path
