"""The interface that the core requires of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the core calls, so that such a tokenizer can be passed unchanged.

    The core imports no tokenizer library; the assembly of a run loads the tokenizer and passes it in.
    """

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a completion; None if the tokenizer has no such token."""

    @property
    def chat_template(self) -> Any:
        """The chat template; None if messages cannot be rendered."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Id -> added token: its text (``str``), whether it is ``special``, and whether it takes the space before
        (``lstrip``) and after (``rstrip``) it.
        """

    def get_vocab(self) -> Mapping[str, int]:
        """Every token and its id."""

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]:
        """Ids of ``text``. ``add_special_tokens`` adds the tokens that the tokenizer puts around plain text;
        ``split_special_tokens`` treats special tokens spelled out in the text as ordinary text.
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ``token_ids``."""

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """Text of the messages; the core always passes ``tokenize=False``, and ``tools`` only if there are some.

        With ``add_generation_prompt`` the text ends where the assistant's turn begins.
        """
