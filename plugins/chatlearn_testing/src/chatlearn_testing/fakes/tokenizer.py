"""A character tokenizer with readable token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EOS = 1
BOS = 2


@dataclass(slots=True, frozen=True)
class AddedToken:
    """A special token with the attributes that tokenizer libraries give it."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False

    def __str__(self) -> str:
        return self.content


class CharacterTokenizer:
    """One token per character; encoding plain text adds a beginning-of-sequence token."""

    eos_token_id: int | None = EOS
    control_token: str | None = None
    """Spells the end-of-sequence token."""

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return {} if self.control_token is None else {EOS: AddedToken(self.control_token)}

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(128)}

    def __init__(self, chat_template: str | None = "roles") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]:
        if self.control_token is not None and not split_special_tokens:
            text = text.replace(self.control_token, chr(EOS))
        return ([BOS] if add_special_tokens else []) + [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join("</s>" if token == EOS else chr(token) for token in token_ids)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        if any(message["role"] == "narrator" for message in conversation):
            raise ValueError("unknown role narrator")
        turns = "".join(f"[{message['role']}]{message['content']}" for message in conversation)
        return turns + ("[assistant]" if add_generation_prompt else "")
