"""Prepares a loaded model for a trainer: adapters, recomputation, packed forward passes, and its noise in the log."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from chatlearn_core.protocols import Head
from chatlearn_hf.lora import LoraSettings, add_adapters
from chatlearn_hf.packed_forward import PackedModel
from chatlearn_hf.training_noise import configured_noise

logger = logging.getLogger(__name__)


def training_model(
    model: PreTrainedModel,
    head: Head,
    *,
    trainable: bool,
    lora: LoraSettings | None,
    gradient_checkpointing: bool,
    logits_chunk_tokens: int | None,
    distribution: str,
) -> PackedModel:
    """Wrap a model for a trainer. Only parameters that training changes require gradients; ``meta`` models work.

    Args:
        model: from ``load_model`` or ``build_on_meta``.
        head: the model's head.
        trainable: whether the role learns.
        lora: adapters to inject; their values are not set here.
        gradient_checkpointing: whether to recompute each layer in the backward pass.
        logits_chunk_tokens: see ``PackedModel``.
        distribution: the trainer's, whose extra ``lora`` an error names.
    """
    model.requires_grad_(trainable)
    if lora is not None:
        add_adapters(model, lora, distribution)
        if not trainable:
            model.requires_grad_(False)
    if gradient_checkpointing and trainable:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return PackedModel(model, head, logits_chunk_tokens)


def log_noise(model: PreTrainedModel, role: str, path: str, *, dropout: bool, lora_dropout: float) -> None:
    """Log the noise of the model's configuration that training leaves out, and the noise that it applies.

    Args:
        model: the model.
        role: for the message.
        path: of the model, for the message.
        dropout: whether training applies the configured noise.
        lora_dropout: dropout of the adapters.
    """
    configured = [f"{name} {value:g}" for name, value in configured_noise(model.config).items()]
    applied = configured if dropout else []
    if lora_dropout:
        applied = [*applied, f"lora.dropout {lora_dropout:g}"]
    if configured and not dropout:
        logger.warning(
            "roles.%s trains without the noise that %s requests in its config.json (%s); set options.dropout to true"
            " to apply it",
            role,
            path,
            ", ".join(configured),
        )
    if applied:
        logger.warning(
            "roles.%s trains with noise (%s): an update computes other logprobs than those computed before it, so"
            " importance ratios of an on-policy update are not 1",
            role,
            ", ".join(applied),
        )
