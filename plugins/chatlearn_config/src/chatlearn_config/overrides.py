"""Overrides ``key=value`` and ``~key`` of a configuration file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from chatlearn_config.document import MAX_DEPTH, Document, DocumentError, NodeReader, compose
from chatlearn_config.problems import KeyPath, Mark, Marks, Problem, nearest, show_path, show_value

_BRACKET = re.compile(r"\[(\d+)\]")


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply ``key=value`` (set) and ``~key`` (delete) to the document, in order; errors become problems.

    Keys are dotted; list items are addressed by index, ``data.train.0.path`` or ``data.train[0].path``. The index after
    the last appends, and index 0 of a missing key creates a list. The value is YAML, so ``top_k=5`` is a number and
    ``name='5'`` is text; an empty value is null. A mapping or list replaces the old value.
    """
    for override in overrides:
        mark = Mark(f"override {show_value(override)}")
        try:
            if override.startswith("~"):
                _delete(document, _split(override[1:]))
            else:
                _set(document, override, mark)
        except _OverrideError as error:
            document.problems.append(Problem(error.path, error.rule, remedy=error.remedy, mark=mark))


class _OverrideError(Exception):
    def __init__(self, path: KeyPath, rule: str, remedy: str = "") -> None:
        super().__init__(rule)
        self.path, self.rule, self.remedy = path, rule, remedy


def _split(key: str) -> KeyPath:
    parts = _BRACKET.sub(r".\1", key.strip()).split(".")
    if not all(parts):
        raise _OverrideError((), f"{show_value(key)} is no dotted key", "write key=value, such as train.steps=10")
    if len(parts) > MAX_DEPTH:
        raise _OverrideError((), f"the key has {len(parts)} parts; a configuration is at most {MAX_DEPTH} levels deep")
    return tuple(parts)


def _set(document: Document, override: str, mark: Mark) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise _OverrideError((), "an override has no '='", "write key=value to set a key, ~key to delete it")
    path = _split(key)
    reader = NodeReader(Marks(mark.source))
    try:
        node = compose(text, "value")
        value = None if node is None else reader.read(node, ())
    except DocumentError as error:
        raise _OverrideError(path, f"the value cannot be read: {error}", "quote it") from error
    if reader.problems:
        raise _OverrideError(path, f"the value is not usable: {reader.problems[0].rule}")
    parent: Any = document.values
    real: KeyPath = ()
    for position, part in enumerate(path):
        last = position == len(path) - 1
        step = _step(parent, part, real, document.marks)
        real = (*real, step)
        present = step < len(parent) if isinstance(parent, list) and isinstance(step, int) else step in parent
        if last:
            if isinstance(parent, list) and not present:
                parent.append(value)
            else:
                parent[step] = value
        else:
            if not present or parent[step] is None:
                child: dict[Any, Any] | list[Any] = [] if path[position + 1] == "0" else {}
                if isinstance(parent, list) and not present:
                    parent.append(child)
                else:
                    parent[step] = child
                document.marks.by_path.setdefault(real, mark)
            parent = parent[step]
    document.marks.replace(real, {(*real, *below): mark for below in reader.marks.by_path})
    document.marks.by_path[real] = mark


def _step(parent: Any, part: str | int, so_far: KeyPath, marks: Marks) -> str | int:
    """The key or index that ``part`` denotes in ``parent``."""
    if isinstance(parent, dict):
        if part not in parent and isinstance(part, str) and part.isdecimal() and int(part) in parent:
            return int(part)
        return part
    if isinstance(parent, list):
        text = str(part)
        if not text.isdecimal() or int(text) > len(parent):
            raise _OverrideError(
                (*so_far, part),
                f"{show_path(so_far)} is a list of {len(parent)}: {text!r} is no index of it",
                f"use 0 to {len(parent)} (the last one appends)",
            )
        return int(text)
    raise _OverrideError(
        (*so_far, part),
        f"{show_path(so_far)} is {show_value(parent)} ({marks.locate(so_far)}), which has no keys below it",
        f"override {show_path(so_far)} itself with a mapping",
    )


def _delete(document: Document, path: KeyPath) -> None:
    parent: Any = document.values
    real: KeyPath = ()
    for part in path[:-1]:
        step = _step(parent, part, real, document.marks)
        _require(parent, step, real)
        parent, real = parent[step], (*real, step)
    step = _step(parent, path[-1], real, document.marks)
    _require(parent, step, real)
    del parent[step]
    document.marks.replace((*real, step), {})
    if isinstance(parent, list) and isinstance(step, int):
        _shift(document.marks, real, step)


def _require(parent: Any, step: str | int, so_far: KeyPath) -> None:
    present = step < len(parent) if isinstance(parent, list) and isinstance(step, int) else step in parent
    if not present:
        guess = nearest(str(step), _names(parent))
        raise _OverrideError(
            (*so_far, step), "there is no such key to delete", f"did you mean '{guess}'?" if guess else ""
        )


def _names(parent: Any) -> Iterable[str]:
    return (str(key) for key in parent) if isinstance(parent, dict) else ()


def _shift(marks: Marks, path: KeyPath, removed: int) -> None:
    """Shift the items after a deleted one, and their marks, by one."""
    depth = len(path)
    moved: dict[KeyPath, Mark] = {}
    for known in list(marks.by_path):
        index = known[depth] if len(known) > depth and known[:depth] == path else None
        if isinstance(index, int) and index > removed:
            moved[(*path, index - 1, *known[depth + 1 :])] = marks.by_path.pop(known)
    marks.by_path.update(moved)
