"""Frozen dataclasses to plain JSON values and back, by their type hints."""

from __future__ import annotations

import types
from collections.abc import Mapping
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def jsonable(record: Any) -> Any:
    """Return a record as plain JSON values, field by field, for stores and `--json`."""
    if isinstance(record, StrEnum):
        return record.value
    if hasattr(record, "__dataclass_fields__"):
        return {name: jsonable(getattr(record, name)) for name in record.__dataclass_fields__}
    if isinstance(record, Mapping):
        return {str(k): jsonable(v) for k, v in record.items()}
    if isinstance(record, (tuple, list)):
        return [jsonable(v) for v in record]
    return record


def from_plain(kind: type[T], data: Any) -> T:
    """Return a dataclass of type `kind` from what `jsonable` made of one.

    Fields that are missing get their defaults, so that a later version reads what an earlier one wrote.

    Raises:
        TypeError, ValueError, KeyError: the data does not fit.
    """
    result: T = _build(kind, data)
    return result


def _build(kind: Any, data: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        return _build(next(a for a in arguments if a is not type(None)), data)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_build(arguments[0], item) for item in data)
        return tuple(_build(a, item) for a, item in zip(arguments, data, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {_build(arguments[0], k): _build(arguments[1], v) for k, v in data.items()}
    if hasattr(kind, "__dataclass_fields__"):
        hints = _hints(kind)
        return kind(**{name: _build(hints[name], data[name]) for name in kind.__dataclass_fields__ if name in data})
    if isinstance(kind, type) and issubclass(kind, (Enum, bool, int, float, str)):
        return kind(data)
    raise TypeError(f"cannot read a {kind} from JSON")


@lru_cache(maxsize=64)
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
