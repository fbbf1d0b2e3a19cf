"""Matches regular expressions in the worker processes of reward ``format``: only a kill ends endless backtracking."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence


def build_matcher(pattern: str, match: str, flags: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that checks whether a completion matches."""
    combined = re.NOFLAG
    for flag in flags:
        combined |= re.RegexFlag[flag.upper()]
    compiled = re.compile(pattern, combined)
    matcher = compiled.fullmatch if match == "full" else compiled.search
    return lambda text: matcher(text) is not None
