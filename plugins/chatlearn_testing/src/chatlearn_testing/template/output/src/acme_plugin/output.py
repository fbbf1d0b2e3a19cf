"""The output ``acme`` from logits, for trainers that compute it."""

from __future__ import annotations

import torch


def margins(logits: torch.Tensor, loss_mask: torch.Tensor, temperature: float) -> torch.Tensor:
    """[T] nats between the two likeliest tokens of each token's distribution, 0 where ``loss_mask`` is False.

    Args:
        logits: [T, V] logits of the distribution that each token is from: those at the position before it.
        loss_mask: [T] bool.
        temperature: divides the logits.
    """
    first, second = (logits / temperature).topk(2, -1).values.unbind(-1)
    return (first - second).masked_fill(~loss_mask, 0.0)
