"""YAML files that people write: read into a pydantic model, with file and line in every error.

Whatever a file holds, reading it takes little memory and an error is a few short lines: size, depth, the values that
aliases stand for and the length of a message are bounded.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from zeus_flows.core.text import one_line, shown
from zeus_flows.errors import ConfigError

LARGEST_KB = 256  # of a file
DEEPEST = 32  # levels of lists and mappings
MOST_VALUES = 10_000  # each alias counted as what it stands for, and ...
A_VALUE = 100  # ... so many characters of a text as one
MOST_PROBLEMS = 20  # told at once
LONGEST = 64  # characters of a key that may be a slip of the pen

M = TypeVar("M", bound=BaseModel)


class Section(BaseModel):
    """A part of a file: unknown keys and numbers without end are errors, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
            with path.open("rb") as file:
                content = file.read(1024 * LARGEST_KB + 1)
            text = content.decode(errors="strict" if len(content) <= 1024 * LARGEST_KB else "replace")
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file\n  {self.start}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        return self.parse(text, source=str(path))

    def parse(self, text: str, *, source: str) -> Document[M]:
        """Return what YAML text says; `source` is what errors call it."""
        if len(text) > 1024 * LARGEST_KB:
            raise ConfigError(f"{source}:1: more than {LARGEST_KB} kB; name a file of data by its path instead")
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if node is not None:
                _bounded(node, source)
                _no_key_twice(node, source)
            data = None if node is None else yaml.SafeLoader("").construct_document(node)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{source}:{line}: not valid YAML: {one_line(str(error.problem))}") from None
        except RecursionError:
            raise ConfigError(f"{source}:1: nested deeper than {DEEPEST} levels") from None
        except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{source}:1: not valid YAML: {one_line(str(error))}") from None
        if node is None or not isinstance(data, dict):
            raise ConfigError(f"{source}:1: this {self.name} is no mapping such as `name: my-name`; {self.start}")
        try:
            return Document(self.model.model_validate(data), source, node)
        except ValidationError as error:
            problems = error.errors(include_url=False)
        except RecursionError:
            raise ConfigError(f"{source}:1: something here is too deep or too long to be checked") from None
        told = problems[:MOST_PROBLEMS]
        lines = [f"{source}:{_line_of(node, problem['loc'])}: {self._explain(problem, node)}" for problem in told]
        more = [f"{source}: and {len(problems) - len(told)} more"] if len(problems) > len(told) else []
        raise ConfigError("\n".join(lines + more))

    def _explain(self, problem: Any, node: yaml.Node) -> str:
        loc = _keys(node, problem["loc"], but_last=problem["type"] in ("missing", "extra_forbidden"))
        where = one_line(".".join(loc) or self.name)
        match problem["type"]:
            case "missing":
                example = self.examples.get(where)
                return f"{where} is missing" + (f"; for instance `{loc[-1]}: {example}`" if example else "")
            case "extra_forbidden":
                known = _fields_beside(self.model, loc)
                close = difflib.get_close_matches(loc[-1][:LONGEST], known, n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(sorted(known))}"
                return f"{where} is not a key of this {self.name}; {hint}"
            case "model_type" | "model_attributes_type" if loc:
                known = _fields_beside(self.model, [*loc, ""])
                return f"{where} is a section with keys of its own ({', '.join(known)}), not {shown(problem['input'])}"
            case "string_pattern_mismatch" if where in self.examples:
                return f"{where} must look like '{self.examples[where]}', not {shown(problem['input'])}"
            case _:
                message = one_line(str(problem["msg"]).removeprefix("Value error, "))
                given = "" if problem["loc"] == () else f" (given: {shown(problem['input'])})"
                return f"{where}: {message[0].lower()}{message[1:]}{given}"


def one_of(value: str, allowed: Sequence[str]) -> str:
    """Return a value that is allowed.

    Raises:
        ValueError: it is not; the text says what is, and what was probably meant.
    """
    if value not in allowed:
        close = difflib.get_close_matches(value[:LONGEST], allowed, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"{shown(value)} is not one of {', '.join(allowed)}{hint}")
    return value


def _bounded(top: yaml.Node, source: str) -> None:
    """Raise where a file is deeper or stands for more values than any that is meant, or has what no text may have."""
    weights: dict[int, tuple[int, int]] = {}
    above: set[int] = set()

    def weigh(node: yaml.Node) -> tuple[int, int]:
        """Return how many values a node stands for, and how deep it is."""
        if id(node) in weights:
            return weights[id(node)]
        here = f"{source}:{node.start_mark.line + 1}"
        if id(node) in above:
            raise ConfigError(f"{here}: an alias stands for what it is part of")
        if isinstance(node, yaml.ScalarNode):
            if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in node.value):
                raise ConfigError(f"{here}: a character that no text may have: {shown(node.value)}")
            weights[id(node)] = 1 + len(node.value) // A_VALUE, 0
            return weights[id(node)]
        above.add(id(node))
        pairs = isinstance(node, yaml.MappingNode)
        parts = [weigh(part) for item in node.value for part in (item if pairs else (item,))]
        above.discard(id(node))
        weight = 1 + sum(values for values, _ in parts), 1 + max((depth for _, depth in parts), default=0)
        if weight[0] > MOST_VALUES:
            raise ConfigError(f"{here}: more than {MOST_VALUES} values, with what aliases stand for")
        if weight[1] > DEEPEST:
            raise ConfigError(f"{here}: nested deeper than {DEEPEST} levels")
        weights[id(node)] = weight
        return weight

    weigh(top)


def _keys(node: yaml.Node, loc: tuple[int | str, ...], *, but_last: bool) -> list[str]:
    """Return the path of a problem as the file has it: without the alternatives of a type that pydantic names in it.

    Args:
        node: The file.
        loc: Pydantic's path.
        but_last: Whether the last part is a key, even if the file does not show it there.
    """
    keys = []
    for position, part in enumerate(loc):
        found = None
        if isinstance(node, yaml.MappingNode):
            found = next((value for key, value in node.value if key.value == str(part)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            found = node.value[part]
        if found is not None:
            node = found
        if found is not None or (but_last and position == len(loc) - 1):
            keys.append(str(part))
    return keys


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
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]  # a section may be optional
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not sections:
            return []
        model = sections[0]
    return list(model.model_fields)
