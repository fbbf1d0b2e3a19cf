"""Lower bound on the number of tokens of a text."""

from __future__ import annotations

from functools import cached_property

from chatlearn_core.data.tokenizer import Tokenizer


class ShortestEncoding:
    """Lower bound on the number of tokens of a text, from the longest entry of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _longest(self) -> int:
        """Longest vocabulary entry in characters. Entries that are not characters (bytes) are spelled with
        one or more.
        """
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def num_tokens(self, text: str) -> int:
        """Return the lower bound for a text, without tokenising it."""
        return -(-len(text) // self._longest)
