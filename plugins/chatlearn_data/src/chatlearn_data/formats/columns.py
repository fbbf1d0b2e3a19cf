"""Reads columns from rows, with clear error messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chatlearn_core.data.format import Message, Row
from chatlearn_core.exceptions import DataError


def required(row: Row, column: str) -> Any:
    """Return the value of ``column``; a dotted name reaches into objects.

    Raises:
        DataError: the row has no such column, or it is null.
    """
    value = optional(row, column)
    if value is None:
        state = "is null" if column in row else "is missing"
        raise DataError(f"column '{column}' {state}; the row has {', '.join(map(repr, row)) or 'no columns'}")
    return value


def optional(row: Row, column: str) -> Any:
    """Return the value of ``column``, None if it is missing; a dotted name reaches into objects."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def text(row: Row, column: str) -> str:
    """Return a required text column.

    Raises:
        DataError: it is missing, null or not text.
    """
    return _as_text(required(row, column), column)


def optional_text(row: Row, column: str) -> str | None:
    """Return an optional text column.

    Raises:
        DataError: it is present but not text.
    """
    value = optional(row, column)
    return None if value is None else _as_text(value, column)


def identifier(row: Row, column: str) -> str | None:
    """Return an optional id column, text or number.

    Raises:
        DataError: it is present but empty, or neither text nor a whole number.
    """
    value = optional(row, column)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"column '{column}' must be text or a whole number, not {value!r:.60}")
    return str(value)


def prompt(row: Row, column: str) -> str | Sequence[Message]:
    """Return a prompt: text or a list of chat messages (which the pipeline checks).

    Raises:
        DataError: it is missing, or neither.
    """
    value = required(row, column)
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value):
        return [_without_nulls(message) for message in value]
    raise DataError(f"column '{column}' must be text or a list of messages, not {value!r:.60}")


def tools(row: Row, column: str = "tools") -> tuple[Any, ...]:
    """Return the functions that the assistant may call, for the chat template: a list, or the JSON of one.

    Raises:
        DataError: it is present but neither.
    """
    value = optional(row, column)
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise DataError(f"column '{column}' must be a list of functions or its JSON, not {value!r:.60}") from None
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(x, Mapping) for x in value):
        raise DataError(f"column '{column}' must be a list of functions or its JSON, not {value!r:.60}")
    return tuple(_without_any_nulls(tool) for tool in value)


def first_answer(row: Row, columns: Iterable[str]) -> Any:
    """Return the first of ``columns`` with an answer; None if there is none. Blank text does not count."""
    for column in columns:
        value = optional(row, column)
        if value is not None and not (isinstance(value, str) and not value.strip()):
            return value
    return None


def rest(row: Row, used: Iterable[str]) -> dict[str, Any]:
    """Return the columns that are not ``used``."""
    return {column: value for column, value in row.items() if column not in set(used)}


def _without_nulls(message: Message) -> Message:
    """Remove null values: Parquet gives every message every key that any message has."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _without_any_nulls(value: Any) -> Any:
    """Remove null values at any depth: Parquet gives every object every key that any object has."""
    if isinstance(value, Mapping):
        return {key: _without_any_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_any_nulls(item) for item in value]
    return value


def _as_text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"column '{column}' must be text, not {type(value).__name__}: {value!r:.60}")
    return value
