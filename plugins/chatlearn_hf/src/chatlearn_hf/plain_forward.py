"""A model directory as transformers itself computes it: the reference for backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification


class PlainModel(torch.nn.Module):
    """``forward(token_ids [T]) -> logits [T, V]`` of one sequence alone: no packing, no cache, eager attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=token_ids[None], use_cache=False).logits[0]
        return logits


def load_plain_model(directory: Path) -> PlainModel:
    """Load a float32 causal language model in evaluation mode, using only transformers' code."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return PlainModel(model).eval()


def load_plain_classifier(directory: Path) -> PlainModel:
    """Load a float32 sequence classifier likewise: ``forward(token_ids [T]) -> scores [num_labels]``."""
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return PlainModel(model).eval()
