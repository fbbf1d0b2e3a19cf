"""The distribution that a token is drawn from, written plainly: the fakes sample by it, the suites check by it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.types import LogprobBasis


def basis_logprobs(logits: Tensor, basis: LogprobBasis) -> Tensor:
    """[..., V] logprobs under ``basis``: logits over temperature, cut to top-k, then to top-p; -inf where cut."""
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
    """The random number of completion token ``position``, a function of both arguments alone."""
    return float(np.random.Generator(np.random.Philox(key=[seed % 2**64, position])).random())


def draw(logprobs: Tensor, number: float) -> int:
    """The token at quantile ``number`` of the distribution [V]."""
    cumulative = logprobs.exp().cumsum(-1)
    token = int(torch.searchsorted(cumulative, number * float(cumulative[-1]), right=True))
    return min(token, logprobs.shape[-1] - 1)
