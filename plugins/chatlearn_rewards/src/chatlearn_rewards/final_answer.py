"""Finds the final answer of a completion, in one pass over any text."""

from __future__ import annotations

import re
from typing import NamedTuple

BOX_TOKENS = re.compile(
    r"\\(?:f?boxed|fbox|framebox)\s*\{|\\boxed\s*([0-9A-Za-z])(?![0-9A-Za-z.,])|\\.|[{}]", re.DOTALL
)
OPEN_TAG, CLOSE_TAG = "<answer>", "</answer>"


class FinalAnswer(NamedTuple):
    """An answer and the text that leads to it."""

    text: str
    before: str
    """The last ``CONTEXT_CHARACTERS`` characters before the answer, or fewer."""


CONTEXT_CHARACTERS = 80


def last_boxed(text: str) -> FinalAnswer | None:
    """What the last complete ``\\boxed{}`` (or ``\\fbox{}``) holds, braces matched; None without one."""
    best: tuple[int, int, int] | None = None
    open_braces: list[tuple[int, int] | None] = []
    for token in BOX_TOKENS.finditer(text):
        written = token[0]
        if token[1] is not None:
            span = (token.start(), token.start(1), token.end(1))
            best = span if best is None else max(best, span)
        elif written[0] == "\\":
            if written[-1] == "{" and len(written) > 2:
                open_braces.append((token.start(), token.end()))
        elif written == "{":
            open_braces.append(None)
        elif open_braces:
            opened = open_braces.pop()
            if opened is not None and (best is None or opened[0] > best[0]):
                best = (*opened, token.start())
    if best is None:
        return None
    start, first, last = best
    return FinalAnswer(text[first:last], text[max(0, start - CONTEXT_CHARACTERS) : start])


def has_open_box(text: str) -> bool:
    """Whether a ``\\boxed{`` begins and no box is complete."""
    return last_boxed(text) is None and any(len(token[0]) > 2 for token in BOX_TOKENS.finditer(text))


def last_tagged(text: str) -> FinalAnswer | None:
    """What the last ``<answer>...</answer>`` holds; None without one."""
    end = text.rfind(CLOSE_TAG)
    start = text.rfind(OPEN_TAG, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    return FinalAnswer(text[start + len(OPEN_TAG) : end], text[max(0, start - CONTEXT_CHARACTERS) : start])
