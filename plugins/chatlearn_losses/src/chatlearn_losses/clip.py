"""The clipped policy-gradient objective of PPO with its dual clip, and the clipped weights of CISPO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True, eq=False)
class ClippedLoss:
    """The loss of each token, and where a clip decided it."""

    per_token: Tensor
    """[T]"""
    clipped: Tensor
    """[T] bool: the ratio was clipped, so the token gives no gradient. For clipped weights: the weight was clipped."""
    dual_clipped: Tensor | None = None
    """[T] bool: the dual clip capped the loss, so the token gives no gradient; None without a dual clip."""


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> ClippedLoss:
    """max(−Aρ, −A·clip(ρ, 1−ε_low, 1+ε_high)); with dual clip c, for A < 0: min(that, −A·c).

    PPO, arXiv 1707.06347, eq. 7; separate ε, DAPO, arXiv 2503.14476; dual clip, arXiv 1912.09729, eq. 5.

    Args:
        ratio: [T] ρ, with gradient.
        advantages: [T]
        clip_low: ε_low, in [0, 1).
        clip_high: ε_high, 0 or more.
        dual_clip: c > 1, or None for no dual clip.
    """
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token = torch.maximum(unclipped, bounded)
    clipped = bounded > unclipped
    if dual_clip is None:
        return ClippedLoss(per_token, clipped)
    cap = -advantages * dual_clip
    dual_clipped = (advantages < 0) & (per_token > cap)
    return ClippedLoss(torch.where(dual_clipped, cap, per_token), clipped & ~dual_clipped, dual_clipped)


def clipped_weight_loss(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> ClippedLoss:
    """−sg(clip(ρ, 1−ε_low, 1+ε_high))·A·π: the weight is clipped, and no token loses its gradient (CISPO, arXiv
    2506.13585, eq. 4 and 5).

    Args:
        logprobs: [T] π, with gradient.
        ratio: [T] ρ
        advantages: [T]
        clip_low: ε_low, in [0, 1]; 1: no lower bound.
        clip_high: ε_high, 0 or more.

    Returns:
        ``clipped`` is True where the weight is not ρ.
    """
    weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return ClippedLoss(-weight * advantages * logprobs, weight != ratio)
