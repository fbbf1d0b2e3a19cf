"""Drawing one token, and the logprob that is reported for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from chatlearn_core.types import LogprobBasis, SamplingParams
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Draw:
    """A sampled token."""

    token: int
    logprob: float
    """Under the distribution that it was drawn from (``SamplingParams.basis``)."""
    raw_logprob: float
    """Under the model's own distribution."""


def draw(logits: Tensor, sampling: SamplingParams, position: int) -> Draw:
    """Sample completion token ``position`` from ``logits`` [V].

    The random number depends on (seed, position) alone, so that what a request is batched with, or an interruption,
    changes nothing.
    """
    raw = torch.log_softmax(logits.double(), -1)
    if sampling.temperature == 0.0:
        token = int(raw.argmax())
        return Draw(token, float(raw[token]), float(raw[token]))
    processed = processed_logprobs(logits, sampling.basis)
    cumulative = processed.exp().cumsum(-1)
    number = np.random.Generator(np.random.Philox(key=[sampling.seed % 2**64, position])).random()
    token = int(torch.searchsorted(cumulative, number * float(cumulative[-1]), right=True))
    token = min(token, len(logits) - 1)  # rounding may leave the last number beyond the sum
    return Draw(token, float(processed[token]), float(raw[token]))


def processed_logprobs(logits: Tensor, basis: LogprobBasis) -> Tensor:
    """[V] logprobs after temperature, then top-k, then top-p; -inf where cut."""
    scaled = logits.double() / basis.temperature
    if 0 < basis.top_k < len(scaled):
        scaled[scaled < scaled.topk(basis.top_k).values[-1]] = -torch.inf
    if basis.top_p < 1.0:
        probabilities, order = torch.softmax(scaled, -1).sort(descending=True)
        # A token stays if those more likely than it do not reach top_p yet; the most likely one always does.
        scaled[order[probabilities.cumsum(-1) - probabilities >= basis.top_p]] = -torch.inf
    return torch.log_softmax(scaled, -1)
