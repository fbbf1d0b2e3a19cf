"""A language model small enough to be checked by hand: the next token depends only on the last one.

A model directory holds ``config.json`` and ``model.safetensors`` with ``transition.weight`` [V, V] and ``unigram.bias``
[V]; the logits after token t are row t of the first plus the second, so logprobs and gradients have a closed form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from chatlearn_core.exceptions import ModelError
from chatlearn_core.types import TensorSpec, WeightManifest

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
TRANSITION, UNIGRAM = "transition.weight", "unigram.bias"
END_OF_SEQUENCE = 0
MAX_LENGTH = 256


class BigramModel(torch.nn.Module):
    """``forward(token_ids [T]) -> logits [T, V]``."""

    def __init__(self, transition: Tensor, unigram: Tensor) -> None:
        super().__init__()
        self.transition = torch.nn.ParameterDict({"weight": torch.nn.Parameter(transition)})
        self.unigram = torch.nn.ParameterDict({"bias": torch.nn.Parameter(unigram)})

    def forward(self, token_ids: Tensor) -> Tensor:
        return bigram_logits(self.transition["weight"], self.unigram["bias"], token_ids)


def bigram_logits(transition: Tensor, unigram: Tensor, token_ids: Tensor) -> Tensor:
    """Compute the [T, V] logits of the token that follows each of ``token_ids``."""
    return transition[token_ids] + unigram


def build_bigram_model(directory: Path, *, vocab_size: int = 32, seed: int = 0) -> Path:
    """Write a random float32 model directory and return it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        TRANSITION: torch.randn(vocab_size, vocab_size, generator=generator),
        UNIGRAM: torch.randn(vocab_size, generator=generator) * 0.3,
    }
    write_bigram_model(directory, tensors)
    return directory


def write_bigram_model(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, directory / WEIGHTS_FILE)
    config = {"model_type": "bigram", "vocab_size": tensors[UNIGRAM].shape[0], "eos_token_id": END_OF_SEQUENCE}
    (directory / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")


def read_bigram_tensors(directory: Path) -> dict[str, Tensor]:
    """Read the tensors of a model directory by name.

    Raises:
        ModelError: there is no readable model.
    """
    file = directory / WEIGHTS_FILE
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({error}); build_bigram_model writes one") from error
    if tensors.keys() != {TRANSITION, UNIGRAM}:
        raise ModelError(f"{file} has the tensors {sorted(tensors)}; a bigram model has {TRANSITION} and {UNIGRAM}")
    return tensors


def load_bigram_model(directory: Path) -> BigramModel:
    """Return the model as a plain module, the reference to which the conformance suites compare the fakes."""
    tensors = read_bigram_tensors(directory)
    return BigramModel(tensors[TRANSITION], tensors[UNIGRAM])


def bigram_manifest(tensors: Mapping[str, Tensor]) -> WeightManifest:
    """Build the manifest of these tensors."""
    return WeightManifest(
        {
            name: TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        }
    )
