"""Supervised fine-tuning: maximise the likelihood of demonstrated completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chatlearn_algorithms.aggregated_loss import AggregatedLoss
from chatlearn_algorithms.sft_options import SFTOptions
from chatlearn_core.protocols import Aggregation, Algorithm, AlgorithmContext, RoleUpdate
from chatlearn_core.protocols.loss import LossOutput
from chatlearn_core.types import Derived, Metric, Metrics, OutputRequest, Outputs, TrainBatch
from chatlearn_losses import AggregationMode


@dataclass(slots=True, frozen=True)
class SFTLoss(AggregatedLoss):
    """−Σ w·π over the masked tokens: cross-entropy, at temperature 1."""

    aggregation: AggregationMode | Aggregation = "token_mean"

    @property
    def needs(self) -> OutputRequest:
        return OutputRequest(frozenset({"logprobs"}))

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Add ``loss_weight``."""
        return replace(batch, token_data=batch.token_data | {"loss_weight": self.weights(batch)})

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """The loss of one micro-batch; ``nll`` is the mean over tokens, nats, in every aggregation mode."""
        logprobs, mask = outputs["logprobs"], batch.loss_mask
        if not batch.num_sequences:
            return LossOutput(logprobs.sum())
        negative = -torch.where(mask, logprobs, logprobs.new_zeros(()))
        mean = Metric(negative.detach().sum(dtype=torch.float64).item(), int(mask.sum()))
        return LossOutput((batch.token_data["loss_weight"] * negative).sum(), {"nll": mean})


class SFT(Algorithm):
    """Imitates demonstrations; evaluation measures the logprobs of held-out demonstrations.

    Where a generator and a reward are configured, evaluation samples and scores prompts instead.
    """

    input = "demonstrations"

    def __init__(self, options: SFTOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context
        self.policy = options.roles.policy
        self.aggregation = context.aggregation(options.aggregation, options.aggregation_options)
        samples = {"generator", "reward"} <= set(context.roles.values())
        self.evaluation_input = None if samples else self.input

    def flow(self, demonstrations: Any, m: Any) -> Any:
        """Return the demonstrations, which already are training samples."""
        return demonstrations

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Return no arrays, only a metric: the number of tokens to learn."""
        return Derived(metrics={"sft/tokens": Metric(float(batch.loss_mask.sum()), reducer="sum")})

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """Update the policy with cross-entropy."""
        return [RoleUpdate(self.options.roles.policy, SFTLoss(self.aggregation))]

    def evaluation(self, demonstrations: Any, m: Any) -> Any:
        """The logprobs of held-out demonstrations, at the temperature of the loss."""
        policy = getattr(m, self.options.roles.policy)
        return m.join(demonstrations, policy.logprobs(demonstrations, temperature=1.0))

    def evaluation_metrics(self, batch: TrainBatch) -> Metrics:
        """``nll``: mean negative logprob of a token, nats."""
        logprobs = batch.token_data[f"{self.options.roles.policy}_logprobs"]
        total = torch.where(batch.loss_mask, logprobs, 0.0).sum(dtype=torch.float64)
        return {"nll": Metric(-float(total), float(batch.loss_mask.sum()))}
