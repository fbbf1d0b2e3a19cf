"""The family of bigram models: prompts are text of a few letters, one token per letter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from chatlearn_core.exceptions import DataError, ModelError
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.model_family import ModelFacts
from chatlearn_core.protocols.prompt_renderer import ControlTokenPolicy, RenderedDemonstration, RenderedPrompt
from chatlearn_testing.fakes.bigram import CONFIG_FILE, END_OF_SEQUENCE, MAX_LENGTH
from chatlearn_testing.fakes.options import FakeOptions

FIRST_LETTER = "`"
"""Character of token 0, the end of the sequence; the following characters are tokens 1, 2, ..., so ``a`` is token 1."""


@dataclass(slots=True, frozen=True)
class LetterTokenizer:
    """Token t is the t-th character from ``FIRST_LETTER`` on."""

    vocab_size: int
    eos_token_id: int = END_OF_SEQUENCE
    chat_template: Any = None

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        return {}

    def get_vocab(self) -> dict[str, int]:
        return {chr(ord(FIRST_LETTER) + token): token for token in range(self.vocab_size)}

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Encode text. Raises: DataError: a character has no token."""
        tokens = [ord(letter) - ord(FIRST_LETTER) for letter in text]
        for letter, token in zip(text, tokens, strict=True):
            if not 0 <= token < self.vocab_size:
                last = chr(ord(FIRST_LETTER) + self.vocab_size - 1)
                raise DataError(f"{letter!r} has no token; this model has the characters {FIRST_LETTER!r} to {last!r}")
        return tokens

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = (t for t in token_ids if not (skip_special_tokens and t == END_OF_SEQUENCE))
        return "".join(chr(ord(FIRST_LETTER) + int(token)) for token in shown)

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> str:
        raise DataError("a bigram model has no chat template: give prompts as text")


@dataclass(slots=True, frozen=True)
class LetterRenderer:
    """Renders text unchanged."""

    tokenizer: LetterTokenizer
    control_tokens: ControlTokenPolicy = "text"
    end_of_turn_id: Literal[None] = None

    def spelled_control_tokens(self, *texts: Any) -> tuple[str, ...]:
        return ()

    def prompt(self, prompt: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> RenderedPrompt:
        return RenderedPrompt(_text(prompt), self._tokens(prompt), ())

    def demonstration(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        completion: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        imitates_prompt: bool = False,
    ) -> RenderedDemonstration:
        tokens = np.append(self._tokens(completion), END_OF_SEQUENCE)
        return RenderedDemonstration(self.prompt(prompt), tokens, np.ones(len(tokens), np.bool_))

    def _tokens(self, content: str | Sequence[Mapping[str, Any]]) -> Any:
        tokens = self.tokenizer.encode(_text(content))
        if not tokens:
            raise DataError("the prompt is empty")
        return np.array(tokens, np.int64)


class BigramFamily:
    """Implements ``chatlearn_core.protocols.model_family.ModelFamily``."""

    def __init__(self, options: FakeOptions) -> None:
        self.options = options

    def model_type(self, source: ModelSource) -> str:
        """The type that the configuration names. Raises: ModelError: there is no readable configuration."""
        return str(_read(source, "model_type"))

    def facts(self, source: ModelSource) -> ModelFacts:
        """Raises: ModelError: there is no readable configuration of a bigram model."""
        return ModelFacts("bigram", MAX_LENGTH, int(_read(source, "vocab_size")))

    def load_tokenizer(self, source: ModelSource) -> LetterTokenizer:
        return LetterTokenizer(self.facts(source).vocab_size)

    def renderer(
        self,
        tokenizer: LetterTokenizer,
        *,
        apply_chat_template: bool = True,
        system_prompt: str | None = None,
        control_tokens: ControlTokenPolicy = "text",
        max_tokens: int | None = None,
    ) -> LetterRenderer:
        return LetterRenderer(tokenizer, control_tokens)


def _read(source: ModelSource, name: str) -> Any:
    file = Path(source.path) / CONFIG_FILE
    try:
        return json.loads(file.read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} is not that of a bigram model ({error!r}); build_bigram_model writes one") from error


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if not isinstance(content, str):
        raise DataError("a bigram model has no chat template: give prompts as text")
    return content
