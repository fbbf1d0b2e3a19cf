"""CISPO (arXiv 2506.13585): REINFORCE whose importance weights are clipped, so that no token loses its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from chatlearn_algorithms.grpo import GroupNormalised
from chatlearn_algorithms.grpo_options import CISPOOptions
from chatlearn_core.types import TrainBatch
from chatlearn_losses import ClippedLoss, clipped_weight_loss


@dataclass(slots=True, frozen=True)
class ClippedWeight:
    """−sg(clip(ρ_t, 1 − ε_low, 1 + ε_high)) A_t log π_t, eq. 4 and 5."""

    low: float
    high: float

    def __call__(self, logprobs: Tensor, log_ratio: Tensor, batch: TrainBatch) -> ClippedLoss:
        advantages = batch.token_data["advantages"]
        return clipped_weight_loss(logprobs, log_ratio.exp(), advantages, clip_low=self.low, clip_high=self.high)


class CISPO(GroupNormalised[CISPOOptions]):
    """GRPO's advantages, weights instead of a clipped objective."""

    def objective(self, options: CISPOOptions) -> ClippedWeight:
        return ClippedWeight(options.clip_low, options.clip_high)
