"""The model: the next token depends on the last one alone.

A model directory holds ``config.json`` and ``model.safetensors`` with ``transition.weight`` [V, V] and ``unigram.bias``
[V]; the logits after token t are row t of the first plus the second. Put your model in its place: the trainer asks only
for ``forward`` and for parameters whose names are checkpoint names.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from chatlearn_core.exceptions import ModelError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"


class BigramModel(nn.Module):
    """``forward(token_ids [T]) -> logits [T, V]``."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.transition = nn.Embedding(vocab_size, vocab_size)
        self.unigram = nn.ParameterDict({"bias": torch.zeros(vocab_size)})

    def forward(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.transition(token_ids) + self.unigram["bias"]
        return logits


def load_model(directory: Path) -> BigramModel:
    """Read a model directory.

    Raises:
        ModelError: there is no such model; names the file.
    """
    file = directory / WEIGHTS_FILE
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file} cannot be read: {error}. Set model.path to the directory of a bigram model"
        ) from error
    bias = tensors.get("unigram.bias")
    model = BigramModel(0 if bias is None else len(bias))
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:  # torch's message names every tensor that is missing, unexpected or misshapen
        raise ModelError(f"{file} is not a bigram model: {error}") from error
    dtypes = {tensor.dtype for tensor in tensors.values()}
    return model.to(dtypes.pop()) if len(dtypes) == 1 else model


def save_model(model: BigramModel, directory: Path) -> None:
    """Write a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, directory / WEIGHTS_FILE)
    config = {"model_type": "bigram", "vocab_size": len(model.unigram["bias"])}
    (directory / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
