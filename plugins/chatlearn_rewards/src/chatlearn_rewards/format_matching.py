"""The work of reward ``format``'s processes: only killing one ends a regular expression that backtracks forever."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence


def build_matcher(pattern: str, match: str, flags: Sequence[str]) -> Callable[[str], bool]:
    """A function of a completion that says whether it matches."""
    combined = re.NOFLAG
    for flag in flags:
        combined |= re.RegexFlag[flag.upper()]
    compiled = re.compile(pattern, combined)
    matcher = compiled.fullmatch if match == "full" else compiled.search
    return lambda text: matcher(text) is not None
