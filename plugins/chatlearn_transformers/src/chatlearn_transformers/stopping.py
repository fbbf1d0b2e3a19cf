"""Detects the end of a completion: end-of-sequence tokens, stop tokens, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import ModelError

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to text, including special tokens."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Result of a byte-level tokenizer for the first bytes of an incomplete character."""


def end_of_sequence_ids(model_config: Any, generation_config: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Collect the end-of-sequence ids of generation config, model config and tokenizer.

    Raises:
        ModelError: an id is outside the model's vocabulary (the tokenizer belongs to another model).
    """
    found: set[int] = set()
    for source, value in (
        ("generation_config.json: eos_token_id", getattr(generation_config, "eos_token_id", None)),
        ("config.json: eos_token_id", getattr(model_config, "eos_token_id", None)),
        ("tokenizer: eos_token_id", getattr(tokenizer, "eos_token_id", None)),
    ):
        if value is None:
            continue
        for token_id in value if isinstance(value, (list, tuple)) else (value,):
            if not 0 <= int(token_id) < vocab_size:
                raise ModelError(
                    f"{source} is {token_id}, outside the model's vocabulary of {vocab_size} tokens; "
                    "use the tokenizer that belongs to the model"
                )
            found.add(int(token_id))
    return frozenset(found)


def token_table(token_ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return [V] bool: whether each token is one of ``token_ids``."""
    table = np.zeros(vocab_size, dtype=np.bool_)
    table[list(token_ids)] = True
    return table


class StopStrings:
    """Watches one completion for stop strings, token by token.

    It checks only the text that a new token adds, together with the preceding text in which a match could begin. Text
    is decoded in a window, because a token may decode differently after another one (leading spaces, the bytes of one
    character spread over tokens).
    """

    __slots__ = ("_committed", "_decode", "_longest", "_stops", "_tail", "_window")

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._longest = max(len(stop) for stop in self._stops)
        self._decode = decode
        self._window: list[int] = []
        self._committed = 0
        """Number of tokens in the window whose text is already in the tail."""
        self._tail = ""

    def feed(self, token_id: int) -> bool:
        """Add the next token. Returns True if a stop string is now complete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        added = text[len(self._decode(self._window[: self._committed])) :]
        seen = self._tail + added
        if any(stop in seen for stop in self._stops):
            return True
        if added and not added.endswith(_INCOMPLETE):
            self._tail = seen[-(self._longest - 1) :] if self._longest > 1 else ""
            self._window = self._window[self._committed :]
            self._committed = len(self._window)
        return False
