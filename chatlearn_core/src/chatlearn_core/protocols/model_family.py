"""Facts that the core needs about a model without loading it: its tokenizer, prompt format and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from chatlearn_core.protocols.lifecycle import ModelSource
from chatlearn_core.protocols.prompt_renderer import ControlTokenPolicy, PromptRenderer


@dataclass(slots=True, frozen=True)
class ModelFacts:
    """Facts read from a model's configuration, without its weights."""

    model_type: str
    """The family by its transformers name: ``qwen3``, ``llama``."""
    max_length: int
    """Longest sequence, tokens."""
    vocab_size: int
    snapshot: str | None = None
    """Of a hub id: directory with the files of the commit it names now; None if weights are not on this machine."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Content of the language model's configuration, for ``TrainerSpec.check_model``."""


class ModelFamily(Protocol):
    """Reads one kind of model directory. Built as ``factory(options)``."""

    def model_type(self, source: ModelSource) -> str:
        """The type that the model's configuration names, also one that this family cannot read: the family that reads
        model directories in general is asked, to find the one that declares the type.

        Called: when a configuration is validated; in the driver; once per model.

        Raises:
            ModelError: no readable model configuration there.
        """

    def load_tokenizer(self, source: ModelSource) -> Any:
        """Load a tokenizer with the interface of ``data.Tokenizer``; Hugging Face tokenizers have it.

        Called: when the data are read, or a role asks for it; in the driver, and each worker of a reward or
        environment; once per process.

        Raises:
            ModelError: there is no tokenizer, or it does not belong to the model; names both.
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
        """A renderer that turns conversations into tokens for the family's models. For tokenizers with a chat template,
        ``chatlearn_chat.ChatTemplateRenderer`` is one.

        Called: when the data are read, or a role asks for it; in the driver, and each worker of a reward; once per
        process.

        Args:
            tokenizer: from ``load_tokenizer``.
            apply_chat_template: whether to apply the tokenizer's chat template, if it has one, to prompts.
            system_prompt: inserted before conversations that have none.
            control_tokens: treatment of control tokens spelled out in the data.
            max_tokens: a text that certainly has more tokens may be refused without tokenising it.

        Raises:
            ModelError: the tokenizer's template cannot be used.
        """

    def facts(self, source: ModelSource) -> ModelFacts:
        """Raises ModelError if the directory has no readable model configuration.

        Called: when a configuration is validated; in the driver; once per model.
        """
