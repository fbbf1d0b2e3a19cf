"""The loss of a critic: the squared error of its values, clipped as PPO clips ratios."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from chatlearn_algorithms.aggregated_loss import AggregatedLoss, check_token_data
from chatlearn_core.protocols.aggregation import Aggregation
from chatlearn_core.protocols.loss import LossOutput
from chatlearn_core.types import Metric, OutputRequest, Outputs, TrainBatch
from chatlearn_losses import AggregationMode, clipped_value_loss


@dataclass(slots=True, frozen=True)
class ValueLoss(AggregatedLoss):
    """Σ w ½ max((V − R)², (clip(V, V_old ± ε) − R)²) over the masked tokens.

    Reads ``token_data``: ``returns``, and the values before the step.
    """

    clip: float | None = 0.2
    aggregation: AggregationMode | Aggregation = "token_mean"
    old_values: str = "critic_values"

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"values"}))

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add ``loss_weight``, [T].

        Raises:
            FlowError: a per-token array that the loss reads is missing.
        """
        remedy = "The flow must join <critic>.values(samples), and the algorithm's advantages must give returns"
        check_token_data(batch, ("returns", self.old_values), "The value loss", remedy)
        return replace(batch, token_data=batch.token_data | {"loss_weight": self.weights(batch)})

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """The loss of one micro-batch, and token means: ``value_clipfrac``, ``value`` and ``value_error`` (V − R)²."""
        if not batch.num_sequences:
            return LossOutput(outputs["values"].sum())
        mask, data = batch.loss_mask, batch.token_data
        zero = outputs["values"].new_zeros(())
        values, old, returns = (
            torch.where(mask, of, zero) for of in (outputs["values"], data[self.old_values], data["returns"])
        )
        loss = clipped_value_loss(values, old, returns, clip=self.clip)
        total = (data["loss_weight"] * loss.per_token).sum()
        detached = values.detach()
        means = {
            "value": detached,
            "value_error": (detached - returns).square(),
            "value_clipfrac": loss.clipped & mask,
        }
        sums = torch.stack([of.sum(dtype=torch.float64) for of in (mask, *means.values())]).tolist()
        return LossOutput(total, {name: Metric(of, sums[0]) for name, of in zip(means, sums[1:], strict=True)})
