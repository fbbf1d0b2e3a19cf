"""The clipped policy-gradient objective of PPO, and its dual clip."""

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
    """[T] bool: the ratio was clipped, so the token gives no gradient."""
    dual_clipped: Tensor
    """[T] bool: the dual clip capped the loss, so the token gives no gradient."""


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
    dual_clipped = torch.zeros_like(clipped)
    if dual_clip is not None:
        cap = -advantages * dual_clip
        dual_clipped = (advantages < 0) & (per_token > cap)
        per_token = torch.where(dual_clipped, cap, per_token)
    return ClippedLoss(per_token, clipped & ~dual_clipped, dual_clipped)
