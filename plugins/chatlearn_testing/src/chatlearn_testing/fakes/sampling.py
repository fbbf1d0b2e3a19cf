"""A plain implementation of the sampling distribution: the fakes sample from it, and the suites compare with it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.types import LogprobBasis


def basis_logprobs(logits: Tensor, basis: LogprobBasis) -> Tensor:
    """Compute [..., V] logprobs under ``basis``: logits / temperature, then top-k and top-p; -inf if removed."""
    scaled = logits.double() / basis.temperature
    if 0 < basis.top_k < logits.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled.topk(basis.top_k, dim=-1).values[..., -1:], -torch.inf)
    if basis.top_p < 1.0:
        probabilities, order = torch.softmax(scaled, -1).sort(dim=-1, descending=True)
        outside = (probabilities.cumsum(-1) - probabilities) >= basis.top_p
        outside[..., 0] = False
        scaled = scaled.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return torch.log_softmax(scaled, -1)


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of completion token ``position``; depends on the two arguments only."""
    return float(np.random.Generator(np.random.Philox(key=[seed % 2**64, position])).random())


def draw(logprobs: Tensor, number: float) -> int:
    """Return the token at quantile ``number`` of the distribution [V]."""
    cumulative = logprobs.exp().cumsum(-1)
    token = int(torch.searchsorted(cumulative, number * float(cumulative[-1]), right=True))
    return min(token, logprobs.shape[-1] - 1)
