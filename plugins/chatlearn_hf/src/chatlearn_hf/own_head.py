"""Computes logits from hidden states with the model's own code, including its scales, soft caps and biases.

Architectures differ in the last step: Gemma caps the logits, Granite and Cohere scale them, MiniCPM scales the hidden
states first. Instead of listing architectures, this module runs the ``forward`` of the model's own class with a trunk
that returns the given hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from chatlearn_core.exceptions import ModelError


def own_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return a function from last hidden states [N, H] to logits [N, V]; gradients reach the head's parameters.

    Raises:
        ModelError: the class does not separate trunk and head.
    """
    trunk_name(model)
    if not isinstance(model.get_output_embeddings(), nn.Module):  # type: ignore[no-untyped-call]  # transformers does not annotate it
        raise ModelError(f"{type(model).__name__} has no language-model head")
    return partial(_logits, model)


def trunk_name(model: PreTrainedModel) -> str:
    """Return the name of the submodule that computes hidden states from tokens.

    Raises:
        ModelError: no submodule does, or several might.
    """
    if model.base_model_prefix in model._modules:
        return model.base_model_prefix
    trunks = [name for name, module in model.named_children() if isinstance(module, PreTrainedModel)]
    if len(trunks) != 1:
        raise ModelError(
            f"{type(model).__name__} does not separate its head from its trunk: exactly one submodule must be the"
            " trunk,"
            f" but the candidates are {', '.join(trunks) or 'none'}"
        )
    return trunks[0]


def trunk_of(model: PreTrainedModel) -> nn.Module:
    """Return the submodule that computes hidden states from tokens; raises like ``trunk_name``."""
    return model.get_submodule(trunk_name(model))


def _logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    # A second object with the same state, so that the model itself always keeps its trunk. It is created for each call,
    # so that it sees modules of the head that were wrapped or replaced in the meantime.
    name = trunk_name(model)
    twin = object.__new__(type(model))
    twin.__dict__.update(model.__dict__)
    states = _GivenStates(hidden.unsqueeze(0), model.get_submodule(name))
    twin.__dict__["_modules"] = {**model._modules, name: states}
    token_ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
    logits: Tensor = twin.forward(input_ids=token_ids, use_cache=False, return_dict=True).logits
    return logits.squeeze(0)


class _GivenStates(nn.Module):
    """A trunk that returns given hidden states; other attributes come from the real trunk."""

    def __init__(self, hidden: Tensor, trunk: nn.Module) -> None:
        super().__init__()
        # Bypass nn.Module: neither may become a submodule.
        object.__setattr__(self, "_hidden", hidden)
        object.__setattr__(self, "_trunk", trunk)

    def __getattr__(self, name: str) -> Any:
        # A decoder of an encoder-decoder is called through a wrapper.
        return self if name == "decoder" else getattr(self._trunk, name)

    def forward(self, *_: Any, **__: Any) -> _TrunkOutput:
        return _TrunkOutput(self._hidden)


class _TrunkOutput:
    """Hidden states, and None for every other field of a trunk's output."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]
