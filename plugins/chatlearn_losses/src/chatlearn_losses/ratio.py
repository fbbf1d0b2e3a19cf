"""Importance ratios between two policies, from logprobs of the same basis."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: far outside any clip range, and still finite when squared or multiplied by an advantage."""


def masked_difference(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """δ = π − old where the loss mask is True, else 0.

    Entries outside the mask carry no meaning and may even be infinite: they reach neither the value nor the gradient.

    Args:
        logprobs: [T] of the policy that learns.
        old_logprobs: [T] of the policy that is the ratio's denominator.
        loss_mask: [T] bool.

    Returns:
        [T], as it is: what a diagnostic shows.
    """
    zero = logprobs.new_zeros(())
    return torch.where(loss_mask, logprobs, zero) - torch.where(loss_mask, old_logprobs, zero)


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """``masked_difference``, clamped to ±``MAX_LOG_RATIO``: the logarithm of a ratio that a loss can bear."""
    return masked_difference(logprobs, old_logprobs, loss_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """ρ = exp(π − old), [T]; 1 outside the loss mask."""
    return masked_log_ratio(logprobs, old_logprobs, loss_mask).exp()


def sequence_log_ratio(
    log_ratio: Tensor, loss_mask: Tensor, sequence_index: Tensor, num_sequences: int, *, mean: bool
) -> Tensor:
    """Sum (or mean) of δ over each sequence's masked tokens, given back to every token.

    Args:
        log_ratio: [T]
        loss_mask: [T] bool
        sequence_index: [T] int64, the sequence of each token.
        num_sequences: S
        mean: True for the mean, whose exponential is the geometric mean of the token ratios (GSPO, arXiv 2507.18071,
            eq. 7); False for the sum, whose exponential is the ratio of the whole sequences' probabilities.

    Returns:
        [T], clamped to ±``MAX_LOG_RATIO``; 0 for sequences without a masked token.
    """
    mask = loss_mask.to(log_ratio.dtype)
    total = log_ratio.new_zeros(num_sequences).index_add(0, sequence_index, log_ratio * mask)
    if mean:
        total = total / mask.new_zeros(num_sequences).index_add(0, sequence_index, mask).clamp(min=1)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence_index]


def straight_through_ratio(sequence_ratio: Tensor, logprobs: Tensor) -> Tensor:
    """sg(s) · exp(π − sg(π)): the sequence's ratio with the gradient of each token's logprob (GSPO-token, arXiv
    2507.18071, eq. 14).

    Args:
        sequence_ratio: [T] s of the token's sequence.
        logprobs: [T] π, with gradient.
    """
    return sequence_ratio.detach() * (logprobs - logprobs.detach()).exp()
