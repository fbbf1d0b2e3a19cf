"""GDPO (arXiv 2601.05242): several rewards, each normalised within its group before they are added.

Normalising the sum instead, as GRPO does, gives different combinations of rewards the same advantage.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chatlearn_algorithms.group_advantages import (
    group_advantages,
    groups_of,
    groups_too_small,
    on_actions,
    spread_metrics,
    trained_tokens,
    without_spread,
)
from chatlearn_algorithms.group_relative import GroupBased
from chatlearn_algorithms.grpo_options import GDPOOptions
from chatlearn_algorithms.policy_gradient import ClippedPolicyGradient
from chatlearn_algorithms.scored_rewards import components
from chatlearn_core.types import Derived, Metric, RewardResult, TrainBatch
from chatlearn_losses import whiten


class GDPO(GroupBased[GDPOOptions], ClippedPolicyGradient[GDPOOptions]):
    """A = whiten(Σ_k w_k (r_k − mean_group(r_k)) / (std_group(r_k) + ε)) over the step."""

    advantage_split = "batch"

    def has_spread(self, rewards: Sequence[RewardResult]) -> bool:
        """Any of the components differs."""
        return any(len({reward.components.get(name) for reward in rewards}) > 1 for name in self.options.rewards)

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        options, scored = self.options, self.scored(batch, step)
        total = torch.zeros(batch.num_sequences, dtype=torch.float64)
        metrics = scored.metrics | spread_metrics(batch, scored)
        rewards = components(batch, options.rewards)
        for name, weight in options.rewards.items():
            values = rewards[name].numpy()
            metrics[f"reward/{name}"] = Metric(float(values.sum()), len(values))
            for members in groups_of(batch):
                normalised = group_advantages(values[members], options.advantage_std, options.epsilon)
                total[members] += weight * torch.from_numpy(normalised)
        exclusions = groups_too_small(batch)
        if options.drop_zero_spread_groups:
            exclusions = without_spread(batch, *rewards.values())
        if options.whiten_over == "token":
            advantages = whiten(total[batch.sequence_index], trained_tokens(batch, exclusions)).float()
            return Derived({"advantages": advantages}, {}, exclusions, metrics)
        kept = torch.tensor([sample not in exclusions for sample in batch.sample_ids], dtype=torch.bool)
        return Derived({"advantages": on_actions(batch, whiten(total, kept))}, {}, exclusions, metrics)
