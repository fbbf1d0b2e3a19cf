"""How large a configuration becomes when its interpolations are replaced, known before any is.

A few lines that insert each other twice make a text of billions of characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from chatlearn_core.config.problems import KeyPath, Problem

MAX_TEXT = 10_000
"""Characters of a text that holds an interpolation: OmegaConf's parser takes seconds for a hundred thousand."""
MAX_SIZE = 200_000
"""Characters of all values that one setting becomes, and values it holds."""
REFERENCE_SIZE = 100
"""What an interpolation counts for, beside what it inserts: replacing it takes time."""
_REFERENCE = re.compile(r"\$\{(\.*)([^${}:]+)\}")


def too_large(values: Mapping[Any, Any]) -> Iterator[Problem]:
    """A problem for each text that is too long to be parsed, or that would become too large."""
    sizes = _Sizes(values)
    for path, text in _texts(values, ()):
        if "${" not in text:
            continue
        if len(text) > MAX_TEXT:
            rule = f"holds an interpolation and has {len(text)} characters; at most {MAX_TEXT} are parsed"
            yield Problem(path, rule, text, "put the long part into a setting of its own, or write \\${ for '${'")
        elif sizes.of(path, text) > MAX_SIZE:
            rule = f"would become longer than {MAX_SIZE} characters when its interpolations are replaced"
            yield Problem(path, rule, text, "insert less")


class _Sizes:
    """Sizes of settings with everything that they insert, each counted once."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._values = values
        self._known: dict[KeyPath, int] = {}
        self._open: set[KeyPath] = set()

    def of(self, path: KeyPath, value: Any) -> int:
        if path in self._open:
            return 0  # leads back to itself: refused when it is resolved
        if path not in self._known:
            self._open.add(path)
            self._known[path] = min(self._sum(path, value), MAX_SIZE + 1)
            self._open.discard(path)
        return self._known[path]

    def _sum(self, path: KeyPath, value: Any) -> int:
        if isinstance(value, Mapping):
            return 1 + sum(self.of((*path, key), child) for key, child in value.items())
        if isinstance(value, list):
            return 1 + sum(self.of((*path, index), child) for index, child in enumerate(value))
        if not isinstance(value, str):
            return 1
        inserted = (self._inserted(path, dots, name) for dots, name in _REFERENCE.findall(value))
        return len(value) + sum(REFERENCE_SIZE + size for size in inserted)

    def _inserted(self, path: KeyPath, dots: str, name: str) -> int:
        """The size of the setting that ``${..name}`` at ``path`` stands for; 0 where there is none."""
        target: KeyPath = path[: len(path) - len(dots)] if dots else ()
        found: Any = self._values
        for part in target:
            found = found[part]
        for word in re.split(r"[.\[\]]+", name.strip("]")):
            key: Any = word
            if isinstance(found, list) and word.isdecimal() and int(word) < len(found):
                key = int(word)
            elif not isinstance(found, Mapping) or word not in found:
                return 0
            found, target = found[key], (*target, key)
        return self.of(target, found)


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _texts(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _texts(child, (*path, index))
