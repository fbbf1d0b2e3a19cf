"""What the core needs to know about a model without holding it: its tokenizer and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from chatlearn_core.protocols.lifecycle import ModelSource


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

    def load_tokenizer(self, source: ModelSource) -> Any:
        """A tokenizer as ``data.Tokenizer`` describes it; Hugging Face's are.

        Raises:
            ModelError: no tokenizer there, or one that does not belong to the model; names both.
        """

    def facts(self, source: ModelSource) -> ModelFacts:
        """Raises ModelError: no readable model configuration there."""
