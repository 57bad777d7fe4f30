"""YAML files that people write: read into a pydantic model, with file and line in every error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from zeus_flows.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


class Section(BaseModel):
    """A part of a file: unknown keys are errors, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Document(Generic[M]):
    """A file that was read: what it says, and where it says it."""

    model: M
    source: str
    node: yaml.Node

    def at(self, *loc: int | str) -> str:
        """Return file and line of a key, or of the deepest part of its path that the file has."""
        return f"{self.source}:{_line_of(self.node, loc)}"


@dataclass(frozen=True, slots=True)
class Kind(Generic[M]):
    """A kind of file.

    Attributes:
        model: What it is read into.
        name: What errors call it, such as `job file`.
        start: What to do where there is none, such as which command writes one.
        examples: What a key that is missing may look like, by its dotted path.
    """

    model: type[M]
    name: str
    start: str
    examples: Mapping[str, str]

    def load(self, path: Path) -> Document[M]:
        """Return what a file says.

        Raises:
            ConfigError: it cannot be read or is wrong; the text names the file, the line, what is wrong and what
                would be right.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file\n  {self.start}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        return self.parse(text, source=str(path))

    def parse(self, text: str, *, source: str) -> Document[M]:
        """Return what YAML text says; `source` is what errors call it."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            data = yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{source}:{line}: not valid YAML: {error.problem}") from None
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise ConfigError(f"{source}:1: not valid YAML: {error}") from None
        if node is None or not isinstance(data, dict):
            raise ConfigError(f"{source}:1: this {self.name} is no mapping such as `name: my-name`; {self.start}")
        _no_key_twice(node, source)
        try:
            return Document(self.model.model_validate(data), source, node)
        except ValidationError as error:
            problems = error.errors(include_url=False)
            lines = [f"{source}:{_line_of(node, problem['loc'])}: {self._explain(problem)}" for problem in problems]
            raise ConfigError("\n".join(lines)) from None

    def _explain(self, problem: Any) -> str:
        loc = [str(part) for part in problem["loc"] if not str(part).startswith(("literal", "list", "["))]
        where = ".".join(loc) or self.name
        match problem["type"]:
            case "missing":
                example = self.examples.get(where)
                return f"{where} is missing" + (f"; for instance `{loc[-1]}: {example}`" if example else "")
            case "extra_forbidden":
                known = _fields_beside(self.model, loc)
                close = difflib.get_close_matches(loc[-1], known, n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(sorted(known))}"
                return f"{where} is not a key of this {self.name}; {hint}"
            case "string_pattern_mismatch" if where in self.examples:
                return f"{where} must look like '{self.examples[where]}', not {problem['input']!r}"
            case _:
                message = str(problem["msg"]).removeprefix("Value error, ")
                given = "" if problem["loc"] == () else f" (given: {problem['input']!r})"
                return f"{where}: {message[0].lower()}{message[1:]}{given}"


def one_of(value: str, allowed: Sequence[str]) -> str:
    """Return a value that is allowed.

    Raises:
        ValueError: it is not; the text says what is, and what was probably meant.
    """
    if value not in allowed:
        close = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"'{value}' is not one of {', '.join(allowed)}{hint}")
    return value


def _line_of(node: yaml.Node, loc: tuple[int | str, ...]) -> int:
    line = node.start_mark.line + 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == str(part)), None)
            if found is None:
                continue
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line


def _no_key_twice(node: yaml.Node, source: str) -> None:
    """Raise where a mapping has a key twice: YAML would silently take the last."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise ConfigError(f"{source}:{key.start_mark.line + 1}: {key.value} is there twice; keep one")
            seen.add(key.value)
            _no_key_twice(value, source)


def _fields_beside(model: type[BaseModel], loc: list[str]) -> list[str]:
    for part in loc[:-1]:
        field = model.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
