"""The policy gradient as a loss: a pure function of logprobs and batch, which every trainer can compute."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from chatlearn_core.protocols import LossOutput, Unit
from chatlearn_core.types import Metric, OutputRequest, Outputs, TrainBatch
from chatlearn_losses import aggregation_weights


@dataclass(slots=True, frozen=True)
class PolicyGradientLoss:
    """Sum over trained tokens of -weight * advantage * logprob.

    The weights contain the denominator of the whole mini-batch (the number of its trained tokens), so the loss does not
    depend on how the batch is split over ranks and micro-batches.
    """

    temperature: float
    """The sampling temperature, so that the loss trains the distribution that was sampled from."""

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"logprobs"}), temperature=self.temperature)

    @property
    def unit(self) -> Unit:
        return "sequence"

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add ``loss_weight``, which needs the whole mini-batch."""
        weights = aggregation_weights(batch, "token_mean")
        return replace(batch, token_data=batch.token_data | {"loss_weight": weights})

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        logprobs = outputs["logprobs"]
        if not batch.num_sequences:
            return LossOutput(logprobs.sum())  # 0, but part of the graph: other ranks wait in the backward pass
        learned = torch.where(batch.loss_mask, logprobs, logprobs.new_zeros(()))
        total = -(batch.token_data["loss_weight"] * batch.token_data["advantages"] * learned).sum()
        mean_logprob = Metric(float(learned.detach().sum(dtype=torch.float64)), int(batch.loss_mask.sum()))
        return LossOutput(total, {"logprob": mean_logprob})
