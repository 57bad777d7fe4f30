"""Frozen dataclasses to plain JSON values and back, by their type hints: the one way to write and read them.

A member of a union says which one it is: it has a class variable `tag`, which is written as `kind`. Fields that are
missing get their defaults, so that a later version reads what an earlier one wrote; a class variable `formerly` has the
names that fields had in it.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_NONE: Final[Mapping[str, str]] = {}

#: What the tag of a union's member is written as.
TAG: Final = "kind"


# -- writing ---------------------------------------------------------------------------------------------------------


def jsonable(record: Any) -> Any:
    """Return a record as plain JSON values, field by field, for stores and `--json`."""
    if isinstance(record, StrEnum):
        return record.value
    if hasattr(record, "__dataclass_fields__"):
        return _tag(record) | {name: jsonable(getattr(record, name)) for name in _names(record.__class__)}
    if isinstance(record, Mapping):
        return {str(k): jsonable(v) for k, v in record.items()}
    if isinstance(record, (tuple, list)):
        return [jsonable(v) for v in record]
    return record


def compact(record: Any) -> Any:
    """Return a record as `jsonable` does, without the fields that have their default, and with short numbers."""
    if hasattr(record, "__dataclass_fields__"):
        stated = {f.name: value for f in fields(record) if (value := getattr(record, f.name)) != _default(f)}
        return _tag(record) | {name: compact(value) for name, value in stated.items()}
    if isinstance(record, Mapping):
        return {str(k): compact(v) for k, v in record.items()}
    if isinstance(record, (tuple, list)):
        return [compact(v) for v in record]
    return short(record) if isinstance(record, float) else jsonable(record)


def short(value: float) -> float | str:
    """Return a number as JSON has it: whole ones without a point; those that JSON lacks as a word that `float` reads.

    >>> short(250.0), short(0.5), short(float("inf"))
    (250, 0.5, 'inf')
    """
    if not math.isfinite(value):
        return str(value)
    return int(value) if value == int(value) and abs(value) < 1e15 else value


def to_text(record: Any) -> str:
    """Return a record as JSON text."""
    return plain_text(jsonable(record))


def plain_text(plain: Any, *, allow_nan: bool = True) -> str:
    r"""Return plain JSON values as text, as short as it can be and fit for any store.

    >>> plain_text({"name": "é", "half": "\ud800"})
    '{"name":"é","half":"\\ud800"}'

    Raises:
        ValueError: a number is not finite, where that is not allowed.
    """
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"), allow_nan=allow_nan)
    return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair becomes JSON's escape of it


def _tag(record: Any) -> dict[str, Any]:
    tag = getattr(record, "tag", None)
    return {} if tag is None else {TAG: tag}


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


# -- reading ---------------------------------------------------------------------------------------------------------


def from_text(kind: type[T], text: str) -> T:
    """Return what `to_text` wrote.

    Raises:
        AttributeError, TypeError, ValueError, LookupError: the text does not fit.
    """
    return from_plain(kind, json.loads(text))


def from_plain(kind: type[T], data: Any) -> T:
    """Return a dataclass of type `kind` from what `jsonable` or `compact` made of one.

    Raises:
        AttributeError, TypeError, ValueError, LookupError: the data does not fit.
    """
    result: T = _build(kind, data)
    return result


def _build(kind: Any, data: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if data is None else _build(_member(arguments, data), data)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_build(arguments[0], item) for item in data)
        return tuple(_build(a, item) for a, item in zip(arguments, data, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {_build(arguments[0], k): _build(arguments[1], v) for k, v in data.items()}
    if hasattr(kind, "__dataclass_fields__"):
        hints, former = _hints(kind), getattr(kind, "formerly", _NONE)
        read = {name: name if name in data else former.get(name, name) for name in _names(kind)}
        return kind(**{name: _build(hints[name], data[key]) for name, key in read.items() if key in data})
    if isinstance(kind, type) and issubclass(kind, (Enum, bool, int, float, str)):
        return kind(data)
    raise TypeError(f"cannot read a {kind} from JSON")


def _member(arguments: tuple[Any, ...], data: Any) -> Any:
    """Return which of a union's types data is of: the only one beside None, or the one whose tag it has."""
    members = [a for a in arguments if a is not type(None)]
    if len(members) == 1:
        return members[0]
    return {getattr(member, "tag", None): member for member in members}[data[TAG]]


@lru_cache(maxsize=256)
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@lru_cache(maxsize=256)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
