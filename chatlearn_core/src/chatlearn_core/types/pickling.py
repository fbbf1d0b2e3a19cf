"""Faster pickling, by field position, for records that are sent in large numbers."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def pickled_by_position(cls: type[T]) -> type[T]:
    """Class decorator: pickle a dataclass object as its class and its field values in order.

    The pickling built into ``dataclass(slots=True, frozen=True)`` runs Python code for every field and takes ten times
    as long: seconds in the driver for a step of a hundred thousand samples.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # the caller's dataclass
    values = attrgetter(*names)

    def by_position(self: Any) -> tuple[Any, ...]:
        return (cls, values(self)) if len(names) > 1 else (cls, (values(self),))

    cls.__reduce__ = by_position  # type: ignore[method-assign]  # replacing it is this function's purpose
    return cls
