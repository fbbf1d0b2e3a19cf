"""Divergences between a student's and a teacher's distribution over the next token, from the logprobs of k tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_LOGPROB = -100.0
"""Logprob of a token that one side excludes, so that a divergence stays finite."""
MIN_TAIL = 1e-7
"""Lower bound of the probability of all other tokens; smaller values are rounding errors."""


def with_tail(logprobs: Tensor) -> Tensor:
    """[..., k + 1] the logprobs of k tokens, and the logprob of all other tokens together.

    Args:
        logprobs: [..., k] of different tokens of one distribution.
    """
    tail = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=MIN_TAIL).log()
    return torch.cat([logprobs, tail], dim=-1).clamp(min=MIN_LOGPROB)


def generalised_jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """β KL(T ‖ M) + (1 − β) KL(S ‖ M), with M = (1 − β) S + β T (GKD, arXiv 2306.13649, eq. 1).

    At β = 0 it is the forward KL(T ‖ S), at β = 1 the reverse KL(S ‖ T). All other tokens count as one class. If k is
    the vocabulary's size, the result is exact; otherwise it is a lower bound (data processing inequality).

    Args:
        student: [..., k] logprobs of k tokens, with gradient.
        teacher: [..., k] logprobs of the same tokens.
        beta: 0 to 1.

    Returns:
        [...] nats.
    """
    ours, theirs = with_tail(student), with_tail(teacher)
    if beta == 0.0:
        return _kl(theirs, ours)
    if beta == 1.0:
        return _kl(ours, theirs)
    mixture = torch.logaddexp(ours + math.log1p(-beta), theirs + math.log(beta))
    return beta * _kl(theirs, mixture) + (1 - beta) * _kl(ours, mixture)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """[...] Σ p (log p − log q)."""
    return (first.exp() * (first - second)).sum(-1)
