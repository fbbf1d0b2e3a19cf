"""How few tokens a text can have."""

from __future__ import annotations

from functools import cached_property

from chatlearn_core.data.tokenizer import Tokenizer


class ShortestEncoding:
    """How few tokens a text can have: as many as tokens of the vocabulary's longest spelling would take."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _longest(self) -> int:
        """Characters. A vocabulary spells what is not a character of its own (a byte) with one or more."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def num_tokens(self, text: str) -> int:
        """At least so many; none of the text is tokenised."""
        return -(-len(text) // self._longest)
