"""What becomes of a job's models: the gate before training, the registered model and its promotion."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from zeus_flows.job_sections.wording import FUNCTION_PATTERN, PLACEHOLDERS, filled, plain_name
from zeus_flows.yaml_file import Section


class GateSection(Section):
    """The drift gate: a function, as `module:function`, that evaluates the newest model on the new slice.

    Where that meets the target nothing is trained, unless the model is `max_age` recurrences old.
    """

    function: str = Field(pattern=FUNCTION_PATTERN)
    parameters: dict[str, Any] = Field(default_factory=dict)
    max_age: int | None = Field(default=None, ge=1, le=10**9)


class Guard(Section):
    """A metric in which a new model may not be worse than the best by more than the margin."""

    better: Literal["higher", "lower"]
    margin: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class PromoteSection(Section):
    """When a new model becomes champion: it is held against the last few, on the new slice.

    They are evaluated by the gate's function, or by one of its own; without either the newest model is champion.
    """

    margin: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    guards: dict[str, Guard] = Field(default_factory=dict)
    champions: int = Field(default=3, ge=1, le=20)
    function: str | None = Field(default=None, pattern=FUNCTION_PATTERN)
    parameters: dict[str, Any] = Field(default_factory=dict)


class RegisteredSection(Section):
    """The registered model that an attempt's kept model becomes a version of; `path` is what a command leaves."""

    name: str
    path: str | None = None
    promote: PromoteSection = PromoteSection()

    @field_validator("name")
    @classmethod
    def _is_plain(cls, value: str) -> str:
        return plain_name(value)

    @field_validator("path")
    @classmethod
    def _placeholders_are_known(cls, value: str | None) -> str | None:
        if value is not None:
            filled(value, dict.fromkeys(PLACEHOLDERS, ""))
        return value
