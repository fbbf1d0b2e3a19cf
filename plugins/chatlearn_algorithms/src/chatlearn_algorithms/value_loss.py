"""The loss of a critic: the squared error of its values, clipped as PPO clips ratios."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from chatlearn_core.exceptions import FlowError
from chatlearn_core.protocols.aggregation import Aggregation
from chatlearn_core.protocols.loss import LossOutput, Unit
from chatlearn_core.types import Metric, OutputRequest, Outputs, TrainBatch
from chatlearn_losses import AggregationMode, aggregation_weights, clipped_value_loss


@dataclass(slots=True, frozen=True)
class ValueLoss:
    """Σ w ½ max((V − R)², (clip(V, V_old ± ε) − R)²) over the masked tokens.

    Reads ``token_data``: ``returns``, and the values before the step.
    """

    clip: float | None = 0.2
    aggregation: AggregationMode | Aggregation = "token_mean"
    old_values: str = "critic_values"

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"values"}))

    @property
    def reads(self) -> frozenset[str]:
        """What a plugin's aggregation looks at, see ``ReadsSamples``."""
        return self.aggregation.reads if isinstance(self.aggregation, Aggregation) else frozenset()

    @property
    def unit(self) -> Unit:
        if isinstance(self.aggregation, Aggregation):
            return self.aggregation.loss_unit
        return "group" if self.aggregation == "prompt_mean" else "sequence"

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add ``loss_weight``, [T].

        Raises:
            FlowError: a per-token array that the loss reads is missing.
        """
        missing = sorted({"returns", self.old_values} - batch.token_data.keys())
        if batch.num_sequences and missing:
            raise FlowError(
                f"The value loss reads {', '.join(missing)}, which not every sample of the mini-batch carries (samples "
                f"{batch.sample_ids[0]} ... {batch.sample_ids[-1]}; it has: "
                f"{', '.join(sorted(batch.token_data)) or 'nothing'}). The flow must join <critic>.values(samples), "
                "and the algorithm's advantages must give returns"
            )
        if isinstance(self.aggregation, Aggregation):
            weights = self.aggregation(batch)
        else:
            weights = aggregation_weights(batch, self.aggregation)
        return replace(batch, token_data=batch.token_data | {"loss_weight": weights})

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
