"""Logits from hidden states by the model's own code: scales, soft caps and biases as its architecture has them.

What stands between the last hidden state and the logits differs: Gemma caps the logits, Granite and Cohere scale them,
MiniCPM scales the hidden states before. Instead of a list of architectures, the ``forward`` of the model's own class
runs with a trunk that answers with the hidden states it is given.
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
    """A function from last hidden states [N, H] to the model's logits [N, V], with gradients for the head's parameters.

    Raises:
        ModelError: the class does not keep trunk and head apart.
    """
    trunk_name(model)
    if not isinstance(model.get_output_embeddings(), nn.Module):  # type: ignore[no-untyped-call]  # transformers does not annotate it
        raise ModelError(f"{type(model).__name__} has no language-model head")
    return partial(_logits, model)


def trunk_name(model: PreTrainedModel) -> str:
    """The name of the submodule that computes hidden states from tokens.

    Raises:
        ModelError: no submodule does, or it cannot be told which.
    """
    if model.base_model_prefix in model._modules:
        return model.base_model_prefix
    trunks = [name for name, module in model.named_children() if isinstance(module, PreTrainedModel)]
    if len(trunks) != 1:
        raise ModelError(
            f"{type(model).__name__} does not keep its head apart from its trunk: of its submodules"
            f" {', '.join(trunks) or 'none'} could be the trunk, and there must be one"
        )
    return trunks[0]


def trunk_of(model: PreTrainedModel) -> nn.Module:
    """The submodule that computes hidden states from tokens; raises as ``trunk_name`` does."""
    return model.get_submodule(trunk_name(model))


def _logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    # A second object with the same state, so that the model itself is never without its trunk. Made at each call: what
    # wraps or replaces the head's modules in between is seen.
    name = trunk_name(model)
    twin = object.__new__(type(model))
    twin.__dict__.update(model.__dict__)
    states = _GivenStates(hidden.unsqueeze(0), model.get_submodule(name))
    twin.__dict__["_modules"] = {**model._modules, name: states}
    token_ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
    logits: Tensor = twin.forward(input_ids=token_ids, use_cache=False, return_dict=True).logits
    return logits.squeeze(0)


class _GivenStates(nn.Module):
    """A trunk that has already computed. What else a class reads from its trunk is the real one's."""

    def __init__(self, hidden: Tensor, trunk: nn.Module) -> None:
        super().__init__()
        # Neither is a submodule of this one.
        object.__setattr__(self, "_hidden", hidden)
        object.__setattr__(self, "_trunk", trunk)

    def __getattr__(self, name: str) -> Any:
        # A decoder taken from an encoder-decoder is called inside a wrapper.
        return self if name == "decoder" else getattr(self._trunk, name)

    def forward(self, *_: Any, **__: Any) -> _TrunkOutput:
        return _TrunkOutput(self._hidden)


class _TrunkOutput:
    """Hidden states, and None for whatever else a class asks of its trunk's output."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]
