"""GSPO (arXiv 2507.18071): GRPO with one importance ratio, and so one clip, for the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from chatlearn_algorithms.grpo import GroupNormalised
from chatlearn_algorithms.grpo_options import GSPOOptions
from chatlearn_core.types import TrainBatch
from chatlearn_losses import ClippedLoss, clipped_policy_loss, sequence_log_ratio, straight_through_ratio


@dataclass(slots=True, frozen=True)
class SequenceClip:
    """s = exp(Σ_t m_t (π_t − old_t) / Σ_t m_t), eq. 7; clipped like PPO's ratio, with the gradient of eq. 14."""

    low: float
    high: float
    dual: float | None = None

    def __call__(self, logprobs: Tensor, log_ratio: Tensor, batch: TrainBatch) -> ClippedLoss:
        mean = sequence_log_ratio(log_ratio, batch.loss_mask, batch.sequence_index, batch.num_sequences, mean=True)
        return clipped_policy_loss(
            straight_through_ratio(mean.exp(), logprobs),
            batch.token_data["advantages"],
            clip_low=self.low,
            clip_high=self.high,
            dual_clip=self.dual,
        )


class GSPO(GroupNormalised[GSPOOptions]):
    """GRPO's advantages; either all tokens of a sequence are clipped or none."""

    def objective(self, options: GSPOOptions) -> SequenceClip:
        return SequenceClip(options.clip_low, options.clip_high, options.dual_clip)
