"""The algorithm ``acme``: its flow, its advantages, and the loss of the role that it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from chatlearn_core.protocols import Algorithm, AlgorithmContext, RoleUpdate
from chatlearn_core.types import Derived, Metric, TrainBatch

from acme_plugin.loss import PolicyGradientLoss
from acme_plugin.options import AcmeOptions


class Acme(Algorithm):
    """REINFORCE with a leave-one-out baseline (RLOO, arXiv 2402.14740, section 2).

    The advantage of a completion is its reward minus the mean reward of the other completions of its group. The loss is
    on-policy: with several updates per step (``train.mini_batches``, ``train.epochs``), later updates are biased.
    """

    policy = "trainer"

    def __init__(self, options: AcmeOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context
        self.group_size = options.group_size

    def flow(self, prompts: Any, m: Any) -> Any:
        """Define the flow. Called once, before the run, to trace it; ``m`` has a method for each call on a role."""
        samples = m.generator.generate(prompts)
        return m.join(samples, m.reward.score(samples))

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Compute the advantages of whole groups; runs in a worker of the policy.

        A completion that is alone in its group is excluded and counted.
        """
        rewards = batch.sequence_data["reward"]
        group = torch.unique(batch.group_index, return_inverse=True)[1]
        sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, rewards)
        sizes = torch.bincount(group)
        others = sizes[group] - 1
        advantages = rewards - (sums[group] - rewards) / others.clamp(min=1)
        alone = [name for name, count in zip(batch.sample_ids, others.tolist(), strict=True) if count == 0]
        return Derived(
            token_data={"advantages": torch.where(batch.loss_mask, advantages[batch.sequence_index], 0.0).float()},
            exclusions=dict.fromkeys(alone, "group_too_small"),
            metrics={"reward": Metric(float(rewards.sum()), len(rewards))},
        )

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        return [RoleUpdate("trainer", PolicyGradientLoss(self.context.basis.temperature))]
