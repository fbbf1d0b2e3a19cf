"""Values that no setting of any plugin can use: infinite numbers, NaN, and texts with a NUL character."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from chatlearn_config.problems import KeyPath, Problem


def unusable_values(value: Any, path: KeyPath = ()) -> Iterator[Problem]:
    """A problem for each value at and below ``value`` that no setting can use.

    JSON has no infinity and no NaN, comparisons with NaN are false, and both propagate through sums: their effect would
    show in the middle of a run, if at all. Every system refuses a file name with NUL.
    """
    if isinstance(value, float) and not math.isfinite(value):
        yield Problem(
            path, "must be a finite number", value, "for 'no limit' leave the setting out, or see its default"
        )
    elif isinstance(value, str) and "\0" in value:
        yield Problem(path, "must not hold a NUL character", value, "remove \\0")
    elif isinstance(value, dict):
        for key, child in value.items():
            if isinstance(key, str) and "\0" in key:
                yield Problem((*path, key), "a key must not hold a NUL character", remedy="rename it")
            yield from unusable_values(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from unusable_values(child, (*path, index))
