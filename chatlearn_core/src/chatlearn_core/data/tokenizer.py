"""What the core asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the core calls, so that one can be passed as it is.

    The core imports no tokenizer library; whoever builds a run loads the tokenizer and hands it in.
    """

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a completion; None if the tokenizer has no such token."""

    @property
    def chat_template(self) -> Any:
        """The chat template; None if messages cannot be rendered."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of ``text``. ``add_special_tokens`` puts around it what the tokenizer puts around plain text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ``token_ids``."""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Text of the messages; the core always passes ``tokenize=False``.

        ``add_generation_prompt`` ends it where the assistant's turn begins.
        """
