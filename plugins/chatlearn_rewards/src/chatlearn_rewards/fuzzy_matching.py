"""Compares texts in the worker processes of reward ``fuzzy_match``: ``difflib`` takes quadratic time, or more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher


def build_comparer() -> Callable[[tuple[str, Sequence[str]]], float]:
    """Return a function of a text and its references that returns the highest ``SequenceMatcher`` ratio, 0 to 1."""

    def compare(payload: tuple[str, Sequence[str]]) -> float:
        text, wanted = payload
        return max(SequenceMatcher(None, one, text, autojunk=False).ratio() for one in wanted)

    return compare
