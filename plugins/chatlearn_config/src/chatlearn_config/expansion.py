"""Computes the size of a configuration after interpolation, before any interpolation is replaced.

A few lines that each insert another one twice would make a text of billions of characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from chatlearn_config.problems import KeyPath, Problem

MAX_TEXT = 10_000
"""Maximum length of a text with an interpolation: OmegaConf's parser takes seconds for 100,000 characters."""
MAX_SIZE = 200_000
"""Maximum number of characters and values that one setting may expand to."""
REFERENCE_SIZE = 100
"""Cost of an interpolation in addition to the text it inserts, because replacing it takes time."""
_REFERENCE = re.compile(r"\$\{(\.*)([^${}:]+)\}")


def too_large(values: Mapping[Any, Any]) -> Iterator[Problem]:
    """A problem for each text that is too long to parse, or whose expansion would be too large."""
    sizes = _Sizes(values)
    for path, text in _texts(values, ()):
        if "${" not in text:
            continue
        if len(text) > MAX_TEXT:
            rule = f"holds an interpolation and has {len(text)} characters; at most {MAX_TEXT} are parsed"
            yield Problem(path, rule, text, "put the long part into a separate setting, or write \\${ for '${'")
        elif sizes.of(path, text) > MAX_SIZE:
            rule = f"would become longer than {MAX_SIZE} characters when its interpolations are replaced"
            yield Problem(path, rule, text, "insert less")


class _Sizes:
    """Expanded sizes of settings, each computed once."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self._values = values
        self._known: dict[KeyPath, int] = {}
        self._open: set[KeyPath] = set()

    def of(self, path: KeyPath, value: Any) -> int:
        if path in self._open:
            return 0  # a cycle: refused when it is resolved
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
        """The size of the setting that ``${..name}`` at ``path`` refers to; 0 if there is none."""
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
