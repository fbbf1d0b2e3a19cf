"""The model: the next token depends on the last one alone.

A model directory holds ``model.safetensors`` with ``transition.weight`` [V, V] and ``unigram.bias`` [V]; the logits
after token t are row t of the first plus the second. Put your engine in its place.
"""

from __future__ import annotations

from pathlib import Path

from chatlearn_core.exceptions import ModelError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
TRANSITION, UNIGRAM = "transition.weight", "unigram.bias"
END_OF_SEQUENCE = 0

Weights = dict[str, Tensor]
"""Checkpoint name -> tensor."""


def read_weights(directory: Path) -> Weights:
    """The tensors of a model directory.

    Raises:
        ModelError: there is no such model; names the file.
    """
    file = directory / WEIGHTS_FILE
    try:
        weights: Weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file} cannot be read: {error}. Set model.path to the directory of a bigram model"
        ) from error
    if weights.keys() != {TRANSITION, UNIGRAM}:
        raise ModelError(f"{file} holds {', '.join(sorted(weights))}; a bigram model has {TRANSITION} and {UNIGRAM}")
    return weights


def decode(token_ids: list[int]) -> str:
    """Decode tokens: one letter each, and nothing for the end of the sequence."""
    return "".join("" if token == END_OF_SEQUENCE else chr(ord("a") + (token - 1) % 26) for token in token_ids)
