"""Problems in settings: collected, located in file or override, and reported together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]
"""Path of a value: mapping keys and list indices from the top, such as ``("data", "train", 0, "path")``."""

_SYNONYMS = {"backend": ("format", "name"), "name": ("backend",)}
"""Keys that choose a plugin: ``backend`` in roles, ``format`` in datasets and ``name`` elsewhere."""
_LONGEST_VALUE = 100
"""Longer values are shortened in messages, which need not repeat a whole prompt."""


class _Unset:
    """Marks a problem without a value, because None is a value."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()


@dataclass(slots=True, frozen=True)
class Mark:
    """The place where a key was written: a line of the file, or a command-line override."""

    source: str
    line: int | None = None
    """1-based; None for an override."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(slots=True, frozen=True)
class Problem:
    """One broken rule."""

    path: KeyPath
    rule: str
    value: Any = UNSET
    remedy: str = ""
    """How to fix the problem; may have several lines."""
    related: tuple[tuple[KeyPath, Any], ...] = ()
    """The other settings involved in a conflict, with their values."""
    mark: Mark | None = None
    """Where the problem was written, if its path does not show it."""

    def paths(self) -> tuple[KeyPath, ...]:
        """The paths of all settings involved."""
        return (self.path, *(path for path, _ in self.related))


@dataclass(slots=True)
class Marks:
    """The places where keys were written."""

    source: str
    """The file's name as given, or ``<text>``."""
    by_path: dict[KeyPath, Mark] = field(default_factory=dict)

    def locate(self, path: KeyPath) -> Mark:
        """The mark of this key, or of the innermost enclosing key that is written."""
        for length in range(len(path), 0, -1):
            mark = self.by_path.get(path[:length])
            if mark is not None:
                return mark
        return self.by_path.get((), Mark(self.source))

    def is_written(self, path: KeyPath) -> bool:
        """Whether the key is written, rather than holding its default."""
        return path in self.by_path

    def replace(self, path: KeyPath, marks: Mapping[KeyPath, Mark]) -> None:
        """Replace all marks at and below ``path`` by ``marks``."""
        for known in [known for known in self.by_path if known[: len(path)] == path]:
            del self.by_path[known]
        self.by_path.update(marks)


def in_order(problems: Iterable[Problem], marks: Marks) -> tuple[Problem, ...]:
    """The problems by line of the file; those of overrides come last."""

    def order(problem: Problem) -> tuple[bool, int]:
        mark = problem.mark or marks.locate(problem.path)
        return mark.line is None, mark.line or 0

    return tuple(sorted(problems, key=order))


def show_path(path: KeyPath) -> str:
    """``roles.trainer.options.lr``; an unusual key is quoted, the top is ``(top level)``."""
    if not path:
        return "(top level)"
    return ".".join(str(part) if _is_plain(part) else repr(part) for part in path)


def _is_plain(part: str | int) -> bool:
    return isinstance(part, int) or part.isdecimal() or part.replace("-", "_").isidentifier()


def show_value(value: Any) -> str:
    """The value as Python shows it, shortened if it is long."""
    shown = repr(value)
    return shown if len(shown) <= _LONGEST_VALUE else f"{shown[: _LONGEST_VALUE - 3]}..."


def render(problem: Problem, marks: Marks) -> str:
    """The lines that describe a problem: place, key, rule, value; the other settings; the remedy."""
    first, *more = problem.rule.split("\n")
    value = "" if problem.value is UNSET else f" (got {show_value(problem.value)})"
    mark = problem.mark or marks.locate(problem.path)
    lines = [f"{mark}: {show_path(problem.path)}: {first}{value}", *(f"    {line}" for line in more)]
    for path, other in problem.related:
        place = str(marks.locate(path)) if marks.is_written(path) else "default"
        lines.append(f"    {show_path(path)} = {show_value(other)} ({place})")
    lines.extend(f"    {line}" for line in problem.remedy.split("\n") if line)
    return "\n".join(lines)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to a misspelled one, or None if no name is close."""
    names = list(valid)
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in names}
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), list(folded), n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def meant_key(key: str, valid: Sequence[str]) -> str | None:
    """The valid key that a wrong one stands for: another section's name for it, or else the nearest."""
    return next((other for other in _SYNONYMS.get(key, ()) if other in valid), None) or nearest(key, valid)


def unknown_key(path: KeyPath, value: Any, valid: Sequence[str], elsewhere: str = "") -> Problem:
    """The problem of an unknown key in a section.

    Args:
        path: The unknown key.
        value: What was written there.
        valid: The keys the section has.
        elsewhere: explanation used in place of a guess if the key is known to belong to another section.
    """
    guess = meant_key(str(path[-1]), valid)
    hint = elsewhere or (f"did you mean '{guess}'?" if guess else "")
    keys = f"valid keys: {', '.join(valid)}" if valid else "this section takes no keys"
    return Problem(path, "unknown key", value, remedy=f"{hint}\n{keys}")


def overlaps(path: KeyPath, other: KeyPath) -> bool:
    """Whether one path encloses the other, or both are the same."""
    shorter = min(len(path), len(other))
    return path[:shorter] == other[:shorter]
