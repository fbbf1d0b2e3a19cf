"""The model family ``acme``: what a model directory says without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.exceptions import ModelError
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.model_family import ModelFacts
from chatlearn_core.protocols.prompt_renderer import ControlTokenPolicy

from acme_plugin.options import AcmeOptions
from acme_plugin.tokenizer import CONTROL, AcmeTokenizer

CONFIG_FILE = "config.json"
CHARACTERS_FILE = "characters.json"


class AcmeFamily:
    """Implements ``chatlearn_core.protocols.model_family.ModelFamily``."""

    def __init__(self, options: AcmeOptions) -> None:
        self.options = options

    def model_type(self, source: ModelSource) -> str:
        """``model_type`` of ``config.json``.

        Raises:
            ModelError: there is no readable configuration, or it names no type.
        """
        return str(_field(source.path, "model_type", str))

    def facts(self, source: ModelSource) -> ModelFacts:
        """Type, longest sequence and vocabulary.

        Raises:
            ModelError: there is no readable configuration, or it lacks one of them.
        """
        return ModelFacts(
            model_type=_field(source.path, "model_type", str),
            max_length=_field(source.path, "max_length", int),
            vocab_size=_field(source.path, "vocab_size", int),
            config=_read(source.path, CONFIG_FILE, dict),
        )

    def load_tokenizer(self, source: ModelSource) -> AcmeTokenizer:
        """Load the tokenizer.

        Raises:
            ModelError: there is none, or it has more tokens than the model.
        """
        vocab_size = _field(source.path, "vocab_size", int)
        characters = _read(source.tokenizer_path, CHARACTERS_FILE, list)
        tokens = len(CONTROL) + len(characters)
        if tokens > vocab_size:
            raise ModelError(
                f"the tokenizer in {source.tokenizer_path} has {tokens} tokens, the model in {source.path} "
                f"{vocab_size}: they do not belong together. Correct model.tokenizer"
            )
        return AcmeTokenizer(characters)

    def renderer(
        self,
        tokenizer: AcmeTokenizer,
        *,
        apply_chat_template: bool = True,
        system_prompt: str | None = None,
        control_tokens: ControlTokenPolicy = "text",
        max_tokens: int | None = None,
    ) -> ChatTemplateRenderer:
        """A renderer that uses the tokenizer's chat template."""
        return ChatTemplateRenderer(
            tokenizer, apply_chat_template, system_prompt, control_tokens=control_tokens, max_tokens=max_tokens
        )


def _field(path: str, name: str, kind: type) -> Any:
    """A field of ``config.json``."""
    value = _read(path, CONFIG_FILE, dict).get(name)
    if not isinstance(value, kind) or not value:
        raise ModelError(f"{Path(path) / CONFIG_FILE} says {name}: {value!r}; it must be a {kind.__name__}")
    return value


def _read(path: str, name: str, kind: type) -> Any:
    """The content of a JSON file of a model directory."""
    file = Path(path) / name
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}; export the model again") from error
    if not isinstance(content, kind):
        raise ModelError(f"{file} holds a {type(content).__name__}, not a {kind.__name__}; export the model again")
    return content
