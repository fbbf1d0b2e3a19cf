"""What makes a model compute otherwise while it trains than while it evaluates: dropout, dropped layers, router noise.

Reinforcement learning compares logprobs of an update with logprobs that were computed before it. With dropout they
differ for the same weights, so importance ratios of an on-policy update are not 1 and clipping drops tokens for
nothing. Training therefore computes as evaluating does, unless noise is asked for.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

_WORDS = ("drop", "jitter")
"""Parts of the names of configuration fields and settings of modules that are such noise."""
_OF_OTHER_HEADS = ("classifier", "summary", "qa_")
"""Parts of the names of those that belong to heads which are not trained here."""


def configured_noise(config: Any) -> dict[str, float]:
    """The fields of a model's configuration that ask for noise, and how much."""
    return {
        name: float(value)
        for name, value in sorted(config.get_text_config().to_dict().items())
        if _is_noise(name) and isinstance(value, int | float) and value > 0
    }


def start_training(model: nn.Module, *, noise: bool) -> None:
    """Put a model into the mode for forward and backward passes.

    Args:
        model: the model, with adapters or without.
        noise: everything its configuration asks for. Otherwise it computes exactly what it does while evaluating,
            but for the dropout of adapters, which is a setting of its own, and still recomputes layers in the backward
            pass where that is on.
    """
    if noise:
        model.train()
        return
    model.eval()
    for name, module in model.named_modules():
        if name.endswith("lora_dropout"):
            module.train()
        elif isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            # transformers recomputes a layer only in training mode; its submodules stay as they are.
            module.training = True
            for setting, value in list(vars(module).items()):
                if _is_noise(setting) and isinstance(value, float):
                    setattr(module, setting, 0.0)
                elif setting == "config" and (noisy := configured_noise(value)):  # Falcon reads it as it computes
                    quiet = copy.copy(value)
                    for name in noisy:
                        asked: Any = getattr(quiet, name, 0.0)
                        setattr(quiet, name, type(asked)(0))
                    module.config = quiet


def _is_noise(name: str) -> bool:
    return any(word in name for word in _WORDS) and not any(word in name for word in _OF_OTHER_HEADS)
