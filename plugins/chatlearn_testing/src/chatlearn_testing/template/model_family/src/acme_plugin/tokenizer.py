"""The tokenizer of acme models: one token per character, and control tokens for turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chatlearn_core.exceptions import DataError

END = "<|end|>"
CONTROL = (END, "<|system|>", "<|user|>", "<|assistant|>")
"""Spelling of the control tokens, whose ids are 0, 1, ..."""


@dataclass(frozen=True)
class ControlToken:
    """A control token, with the attributes that tokenizer libraries give one."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False

    def __str__(self) -> str:
        return self.content


class AcmeTokenizer:
    """Implements ``chatlearn_core.data.Tokenizer``.

    Args:
        characters: those that have a token, in the order of their ids, which follow those of the control tokens.
    """

    eos_token_id = CONTROL.index(END)
    chat_template = "{role}{content}<|end|>"
    """What ``apply_chat_template`` writes for each message."""

    def __init__(self, characters: Sequence[str]) -> None:
        self._texts = (*CONTROL, *characters)
        self._ids = {text: token for token, text in enumerate(self._texts)}
        self._control = re.compile("(" + "|".join(map(re.escape, CONTROL)) + ")")

    @property
    def added_tokens_decoder(self) -> Mapping[int, ControlToken]:
        """Id -> control token."""
        return {token: ControlToken(text) for token, text in enumerate(CONTROL)}

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def encode(self, text: str, *, add_special_tokens: bool = False, split_special_tokens: bool = False) -> list[int]:
        """Encode a text; ``split_special_tokens`` takes spelled control tokens as characters.

        Raises:
            DataError: a character has no token.
        """
        parts = list(text) if split_special_tokens else self._parts(text)
        unknown = [part for part in parts if part not in self._ids]
        if unknown:
            raise DataError(f"{unknown[0]!r} has no token; this model has {len(self._texts)} tokens")
        return [self._ids[part] for part in parts]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        first = len(CONTROL) if skip_special_tokens else 0
        return "".join(self._texts[token] for token in token_ids if token >= first)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The text of a conversation. Raises: ValueError: there are tools, or a message has another role."""
        if tools:
            raise ValueError("acme models take no tools")
        roles = {message["role"] for message in conversation}
        if strange := roles - {text.strip("<|>") for text in CONTROL[1:]}:
            raise ValueError(f"acme models know no role {min(strange)!r}")
        turns = "".join(f"<|{message['role']}|>{message['content']}{END}" for message in conversation)
        return turns + ("<|assistant|>" if add_generation_prompt else "")

    def _parts(self, text: str) -> list[str]:
        """Control tokens, and the characters between them."""
        pieces = self._control.split(text)
        return [part for piece in pieces for part in ([piece] if piece in CONTROL else piece)]
