"""The model family ``transformers``: tokenizer and limits of a model directory, without its weights."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.exceptions import ModelError
from chatlearn_core.protocols import ModelSource
from chatlearn_core.protocols.model_family import ModelFacts
from chatlearn_core.protocols.prompt_renderer import ControlTokenPolicy
from chatlearn_hf.model_directory import (
    check_model_directory,
    check_tokenizer_fits,
    hub_snapshot,
    load_config,
    load_tokenizer,
    read_config_file,
)
from chatlearn_hf.model_directory import max_length as config_max_length
from chatlearn_hf.options import TransformersFamilyOptions


class TransformersFamily:
    """Reads Hugging Face model directories."""

    def __init__(self, options: TransformersFamilyOptions) -> None:
        self.options = options

    def model_type(self, source: ModelSource) -> str:
        """``model_type`` of ``config.json``, which transformers need not know; of a hub id, what transformers says.

        Raises:
            ModelError: no readable configuration there, or one that names no type.
        """
        directory = Path(source.path).expanduser()
        if not directory.is_dir():
            check_model_directory(source.path)
            return str(load_config(source.path, trust_remote_code=source.trust_remote_code).model_type)
        model_type = read_config_file(directory).get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise ModelError(f"the configuration of {source.path} says model_type: {model_type!r}, which names no type")
        return model_type

    def load_tokenizer(self, source: ModelSource) -> PreTrainedTokenizerBase:
        """Load the tokenizer and check it against the model's vocabulary.

        Raises:
            ModelError: there is no tokenizer, or it does not belong to the model.
        """
        tokenizer = load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code)
        config = load_config(source.path, trust_remote_code=source.trust_remote_code)
        check_tokenizer_fits(tokenizer, config, source.path)
        return tokenizer

    def renderer(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        apply_chat_template: bool = True,
        system_prompt: str | None = None,
        control_tokens: ControlTokenPolicy = "text",
        max_tokens: int | None = None,
    ) -> ChatTemplateRenderer:
        """Return a renderer that uses the tokenizer's chat template."""
        return ChatTemplateRenderer(
            tokenizer,  # type: ignore[arg-type]  # its keyword arguments are wider
            apply_chat_template,
            system_prompt,
            control_tokens=control_tokens,
            max_tokens=max_tokens,
        )

    def facts(self, source: ModelSource) -> ModelFacts:
        """Return model type, longest sequence and vocabulary size.

        Raises:
            ModelError: the directory is unusable.
        """
        check_model_directory(source.path, tokenizer_path=source.tokenizer_path)
        config = load_config(source.path, trust_remote_code=source.trust_remote_code)
        length = config_max_length(config)
        if length is None and source.max_length is None:
            raise ModelError(
                f"the configuration of {source.path} does not state a maximum sequence length: set model.max_length"
            )
        vocab_size = getattr(config.get_text_config(), "vocab_size", None)
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ModelError(
                f"the configuration of {source.path} ({config.model_type}) has no vocab_size: is it a language model?"
            )
        snapshot = hub_snapshot(source.path)
        return ModelFacts(
            model_type=config.model_type,
            max_length=length or source.max_length or 0,
            vocab_size=vocab_size,
            snapshot=None if snapshot is None else str(snapshot),
            config=config.get_text_config().to_dict(),
        )
