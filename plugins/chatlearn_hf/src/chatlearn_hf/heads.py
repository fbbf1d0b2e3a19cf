"""Models with a head: language model, value (critic), reward.

Value and reward models are transformers' own classes with one label, so their checkpoints are ordinary ones: the trunk
under ``model.`` and the head under ``score.``. A value model is a token classifier, a reward model a sequence
classifier; each loads from a language model's directory (the head is new), from its own, or from the other's (a critic
that starts from a reward model).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from chatlearn_core.protocols import Head
from chatlearn_hf.model_directory import load_pretrained

HEAD_CLASSES: dict[Head, Any] = {
    "lm": AutoModelForCausalLM,
    "value": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}
HEAD_PARAMETERS = ("score.weight", "score.bias")


def load_model(
    path: str,
    head: Head = "lm",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attention: str = "varlen",
    seed: int = 0,
    trust_remote_code: bool = False,
    **extra: Any,
) -> PreTrainedModel:
    """Load a model with ``head``, in evaluation mode.

    A head that is missing in the directory is drawn from N(0, 1 / (H + 1)) [2009.01325], keyed only by ``seed``; its
    bias is 0.

    Args:
        path: model directory or hub id of a language model, or of a model with such a head.
        head: ``lm``, ``value`` or ``reward``.
        dtype: dtype of the parameters.
        device: device of the parameters.
        attention: ``varlen``, ``sdpa``, ``eager``.
        seed: seed of a new head.
        trust_remote_code: run modelling code from the model directory.
        **extra: further arguments of ``from_pretrained``.

    Raises:
        ModelError: the directory is unusable, or its architecture has no class with that head.
    """
    model, new = load_pretrained(
        HEAD_CLASSES[head],
        path,
        dtype=dtype,
        device=device,
        attention=attention,
        may_be_missing=() if head == "lm" else HEAD_PARAMETERS,
        trust_remote_code=trust_remote_code,
        **(extra if head == "lm" else extra | {"num_labels": 1}),
    )
    if new:
        _draw_head(model, new, seed)
    return model


def drawn_head(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Draw a new head by parameter name: N(0, 1 / (H + 1)) [2009.01325] and bias 0, keyed only by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.zeros(shapes[name]) for name in sorted(shapes)}
    for name, values in drawn.items():
        if name.endswith("weight"):
            values.normal_(0.0, (values.shape[-1] + 1) ** -0.5, generator=generator)
    return drawn


def _draw_head(model: PreTrainedModel, new: frozenset[str], seed: int) -> None:
    shapes = {name: tuple(model.get_parameter(name).shape) for name in new}
    for name, values in drawn_head(shapes, seed).items():
        with torch.no_grad():
            model.get_parameter(name).copy_(values)
