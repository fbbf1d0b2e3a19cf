"""What the core needs to know about a model without holding it: its tokenizer, its prompts and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from chatlearn_core.protocols.lifecycle import ModelSource
from chatlearn_core.protocols.prompt_renderer import ControlTokenPolicy, PromptRenderer


@dataclass(slots=True, frozen=True)
class ModelFacts:
    """Read from a model's configuration, without its weights."""

    model_type: str
    """The family as transformers names it: ``qwen3``, ``llama``."""
    max_length: int
    """Longest sequence, tokens."""
    vocab_size: int


class ModelFamily(Protocol):
    """Built as ``factory(options)``; knows one kind of model directory."""

    def model_type(self, source: ModelSource) -> str:
        """The type that the model's configuration names, also one that this family cannot read: the family that reads
        model directories in general is asked, to find the one that declares the type.

        Raises:
            ModelError: no readable model configuration there.
        """

    def load_tokenizer(self, source: ModelSource) -> Any:
        """A tokenizer as ``data.Tokenizer`` describes it; Hugging Face's are.

        Raises:
            ModelError: no tokenizer there, or one that does not belong to the model; names both.
        """

    def renderer(
        self,
        tokenizer: Any,
        *,
        apply_chat_template: bool = True,
        system_prompt: str | None = None,
        control_tokens: ControlTokenPolicy = "text",
        max_tokens: int | None = None,
    ) -> PromptRenderer:
        """What turns conversations into tokens of the family's models. ``chatlearn_chat.ChatTemplateRenderer`` does it
        for tokenizers with a chat template.

        Args:
            tokenizer: from ``load_tokenizer``.
            apply_chat_template: whether prompts go through the tokenizer's chat template, if it has one.
            system_prompt: put before conversations that have none.
            control_tokens: what becomes of control tokens that the data spell.
            max_tokens: texts that certainly have more tokens need not be tokenised.

        Raises:
            ModelError: the tokenizer's template cannot be used.
        """

    def facts(self, source: ModelSource) -> ModelFacts:
        """Raises ModelError: no readable model configuration there."""
