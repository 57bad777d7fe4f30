"""A property that is computed once, on first access.

`functools.cached_property` takes a lock until Python 3.12, which costs more than most of what a decision computes.
Values here are functions of frozen records: should two threads compute one at once, they compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 - used like `property`
    """Compute a property on first access and keep it in the instance's `__dict__`.

    >>> class Circle:
    ...     @lazy
    ...     def area(self) -> float:
    ...         return 3.14
    >>> circle = Circle()
    >>> circle.area, vars(circle)
    (3.14, {'area': 3.14})
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self._name = compute, compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> lazy[T] | T:
        """Return the value; from now on it is found in the instance before this is asked."""
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
