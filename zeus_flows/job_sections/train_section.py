"""How a job is trained: a function, or a command with what it prints."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from zeus_flows.job_sections.wording import FUNCTION_PATTERN, PLACEHOLDERS, a_pattern, filled
from zeus_flows.yaml_file import Section


class MetricSource(Section):
    """Where a command's metric is found, one of three; each value ends an epoch.

    `pattern` is searched in its output and has one group; `file` has a JSON object a line, with the metric as `key`; a
    metric called `mlflow` is logged by the command to its MLflow run.
    """

    pattern: str | None = None
    file: str | None = None
    key: str | None = None
    mlflow: str | None = None

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, value: str | None) -> str | None:
        return None if value is None else a_pattern(value, groups=(1,))

    @model_validator(mode="after")
    def _is_one(self) -> MetricSource:
        if sum(source is not None for source in (self.pattern, self.file, self.mlflow)) != 1:
            raise ValueError("needs one of pattern, file and mlflow, such as {pattern: 'val_acc=([0-9.]+)'}")
        if (self.file is None) != (self.key is None):
            raise ValueError("file and key go together, such as {file: metrics.jsonl, key: val_acc}")
        return self


class ProgressSource(Section):
    """How a command's output tells of steps within an epoch, where nothing else does.

    The pattern's group is a running count of steps or samples, of the epoch or of all; without it a match is a step.
    """

    pattern: str
    unit: Literal["steps", "samples"] = "steps"

    @field_validator("pattern")
    @classmethod
    def _has_a_group_at_most(cls, value: str) -> str:
        return a_pattern(value, groups=(0, 1))


class TrainSection(Section):
    """The training: a function, as `module:function`, and what it is called with; or a command.

    `retries` is how often a training that broke is tried again from its last checkpoint; without one it is not.
    """

    function: str | None = Field(default=None, pattern=FUNCTION_PATTERN)
    parameters: dict[str, Any] = Field(default_factory=dict)
    retries: int = Field(default=2, ge=0, le=1_000)
    command: list[str] | None = Field(default=None, min_length=1)
    folder: str = "."
    environment: dict[str, str] = Field(default_factory=dict)
    metric: MetricSource | None = None
    progress: ProgressSource | None = None
    samples_per_epoch: int | None = Field(default=None, ge=1, le=10**15)
    torchrun: bool = True
    grace_seconds: float = Field(default=10.0, ge=0)

    @field_validator("command", mode="before")
    @classmethod
    def _words_are_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("must be a list of words, such as [python, train.py, '{batch_size}']: there is no shell")
        return [str(word) if isinstance(word, int | float) else word for word in value] if value else value

    @field_validator("command")
    @classmethod
    def _placeholders_are_known(cls, value: list[str] | None) -> list[str] | None:
        for word in value or ():
            filled(word, dict.fromkeys(PLACEHOLDERS, ""))
        return value

    @field_validator("environment", mode="before")
    @classmethod
    def _values_are_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in value.items()}

    @field_validator("environment")
    @classmethod
    def _placeholders_are_known_there(cls, value: dict[str, str]) -> dict[str, str]:
        for text in value.values():
            filled(text, dict.fromkeys(PLACEHOLDERS, ""))
        return value

    @model_validator(mode="after")
    def _is_one_form(self) -> TrainSection:
        if (self.function is None) == (self.command is None):
            raise ValueError("needs a function or a command, such as {function: my_package.my_module:train}")
        if self.command is not None:
            if self.metric is None:
                raise ValueError("a command needs a metric, such as {pattern: 'val_acc=([0-9.]+)'}")
            if self.parameters:
                raise ValueError("parameters are for a function; a command has its words and its environment")
        else:
            own = {"folder", "environment", "metric", "progress", "samples_per_epoch", "grace_seconds"}
            if stray := sorted(own & self.model_fields_set):
                raise ValueError(f"{', '.join(stray)}: only for a command")
        return self

    @property
    def uses_batch_size(self) -> bool:
        """Whether the batch size reaches the training."""
        return self.command is None or bool(self._names & {"batch_size", "batch_size_per_gpu"}) or self.accumulates

    @property
    def accumulates(self) -> bool:
        """Whether a batch that is taken in parts reaches the training; a function has to ask for it."""
        micro = {"micro_batch_size", "micro_batch_size_per_gpu"}
        told = ({"batch_size", "batch_size_per_gpu"}, micro, {"accumulation_steps"})
        return self.command is None or sum(bool(self._names & names) for names in told) >= 2

    @property
    def _names(self) -> set[str]:
        """The names in braces that a command has."""
        texts = (*(self.command or ()), *self.environment.values())
        return {name for text in texts for name in re.findall(r"\{(\w+)\}", text)}
