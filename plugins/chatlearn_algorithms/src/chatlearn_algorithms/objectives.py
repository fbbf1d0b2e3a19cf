"""Objectives of policy losses: an objective computes one number per token, before aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from chatlearn_core.types import TrainBatch
from chatlearn_losses import ClippedLoss, clipped_policy_loss


class Objective(Protocol):
    """Consists only of settings, so that it can be sent to workers."""

    def __call__(self, logprobs: Tensor, log_ratio: Tensor, batch: TrainBatch) -> ClippedLoss:
        """The loss of each token of whole sequences.

        Args:
            logprobs: [T] π, with gradient; 0 outside the loss mask.
            log_ratio: [T] π − old, with gradient, within ±20; 0 outside the loss mask.
            batch: with ``token_data["advantages"]``.
        """


@dataclass(slots=True, frozen=True)
class Clip:
    """PPO's clipped ratio, with a separate upper bound (DAPO) and a dual clip; see ``clipped_policy_loss``."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __call__(self, logprobs: Tensor, log_ratio: Tensor, batch: TrainBatch) -> ClippedLoss:
        return clipped_policy_loss(
            log_ratio.exp(),
            batch.token_data["advantages"],
            clip_low=self.low,
            clip_high=self.high,
            dual_clip=self.dual,
        )
