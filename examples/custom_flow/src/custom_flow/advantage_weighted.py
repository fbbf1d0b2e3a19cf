"""An algorithm with a loss of its own: advantage-weighted regression (arXiv 1910.00177)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chatlearn_core.protocols import Algorithm, AlgorithmContext, LossOutput, RoleUpdate
from chatlearn_core.protocols.loss import Unit
from chatlearn_core.types import Derived, Metric, OutputRequest, Outputs, TrainBatch
from chatlearn_losses import aggregation_weights
from custom_flow.options import AdvantageWeightedOptions


@dataclass(frozen=True)
class WeightedImitation:
    """−Σ_t w_i · log π(token t) / N over the N sampled tokens of a mini-batch, for the weight w_i of their sample."""

    temperature: float
    unit: Unit = "sequence"

    @property
    def needs(self) -> OutputRequest:
        """Logprobs of the distribution that was sampled from."""
        return OutputRequest(frozenset({"logprobs"}), self.temperature)

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Once, on the whole mini-batch: 1/N at every sampled token."""
        return replace(batch, token_data=batch.token_data | {"loss_weight": aggregation_weights(batch, "token_mean")})

    def __call__(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """On one micro-batch, where the logits are; the parts add up to the loss of the mini-batch."""
        logprobs = outputs["logprobs"]
        if not batch.num_sequences:
            return LossOutput(logprobs.sum())  # 0, and connected to the graph
        weights = batch.sequence_data["imitation_weight"].to(logprobs)[batch.sequence_index]
        losses = -weights * torch.where(batch.loss_mask, logprobs, 0.0)
        mean = Metric(float(losses.detach().sum()), int(batch.loss_mask.sum()))
        return LossOutput((batch.token_data["loss_weight"] * losses).sum(), {"weighted_nll": mean})


class AdvantageWeighted(Algorithm):
    """Samples a group, and imitates each sample with the weight exp((r − mean of the group) / temperature), eq. 8."""

    def __init__(self, options: AdvantageWeightedOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.group_size = options.group_size
        self.sampling_temperature = context.basis.temperature

    def flow(self, prompts: Any, m: Any) -> Any:
        samples = m.generator.generate(prompts)
        return m.join(samples, m.reward.score(samples))

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """The weight of each sample; the batch consists of whole groups."""
        rewards, groups = batch.sequence_data["reward"].double(), batch.group_index
        sums = torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add(0, groups, rewards)
        means = sums / groups.bincount()
        weights = ((rewards - means[groups]) / self.options.temperature).exp().clamp(max=self.options.max_weight)
        metrics = {"reward": Metric(float(rewards.sum()), len(rewards))}
        return Derived(sequence_data={"imitation_weight": weights}, metrics=metrics)

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        return [RoleUpdate("trainer", WeightedImitation(self.sampling_temperature))]
