"""Sources of randomness that a model has only in training: dropout, dropped layers, router noise.

Reinforcement learning compares logprobs of an update with logprobs computed before it. With dropout they differ for the
same weights, so importance ratios of an on-policy update are not 1, and clipping drops tokens needlessly. Training
therefore computes as in evaluation, unless noise is requested.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

_NOISE_NAMES = ("drop", "jitter")
"""Parts of names of noise settings, in configurations and modules."""
_OTHER_HEAD_NAMES = ("classifier", "summary", "qa_")
"""Parts of names of settings that belong to heads which are not trained here."""


def configured_noise(config: Any) -> dict[str, float]:
    """Return the noise settings of a model's configuration with their values."""
    return {
        name: float(value)
        for name, value in sorted(config.get_text_config().to_dict().items())
        if _is_noise(name) and isinstance(value, int | float) and value > 0
    }


def start_training(model: nn.Module, *, noise: bool) -> None:
    """Put a model into the mode for forward and backward passes.

    Args:
        model: the model, with or without adapters.
        noise: whether to apply all noise that its configuration requests. Otherwise it computes exactly as in
            evaluation,
            except for the dropout of adapters, which is a separate setting, and still recomputes layers in the backward
            pass if that is enabled.
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
                elif setting == "config" and (noisy := configured_noise(value)):  # Falcon reads it in its forward pass
                    quiet = copy.copy(value)
                    for name in noisy:
                        asked: Any = getattr(quiet, name, 0.0)
                        setattr(quiet, name, type(asked)(0))
                    module.config = quiet


def _is_noise(name: str) -> bool:
    return any(word in name for word in _NOISE_NAMES) and not any(word in name for word in _OTHER_HEAD_NAMES)
