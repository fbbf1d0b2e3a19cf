"""The work of reward ``fuzzy_match``'s processes: ``difflib`` takes quadratic time, or worse, on long texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher


def build_comparer() -> Callable[[tuple[str, Sequence[str]]], float]:
    """A function of a text and the texts that it may resemble: the highest ratio of ``SequenceMatcher``, 0 to 1."""

    def compare(payload: tuple[str, Sequence[str]]) -> float:
        text, wanted = payload
        return max(SequenceMatcher(None, one, text, autojunk=False).ratio() for one in wanted)

    return compare
