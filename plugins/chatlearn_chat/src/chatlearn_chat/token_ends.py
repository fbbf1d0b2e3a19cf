"""Where the tokens of a text end in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What a tokenizer makes of bytes that are no whole character, or none yet."""


def decoded_lengths(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool) -> tuple[str, list[int]]:
    """The text of ``ids`` and, for each token, the length of the text that is complete with it.

    Tokens are decoded behind the few before them, so that spaces and characters of several tokens come out as in the
    whole text, in time proportional to the number of tokens.
    """
    text, lengths = "", []
    start = read = 0  # decoded so far: up to `read`; decoding begins at `start`
    before = ""
    for index in range(len(ids)):
        now = _decode(tokenizer, ids[start : index + 1], skip_special_tokens)
        if not now.endswith(UNFINISHED) or index + 1 == len(ids):
            text += now[len(before) :]
            start, read = read, index + 1
            before = _decode(tokenizer, ids[start:read], skip_special_tokens)
        lengths.append(len(text))
    return text, lengths


def _decode(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool) -> str:
    more = {"clean_up_tokenization_spaces": False} if hasattr(tokenizer, "clean_up_tokenization_spaces") else {}
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, **more))
