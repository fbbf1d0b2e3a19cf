"""A policy gradient whose arithmetic is exact and small: rewards minus the mean of their group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from chatlearn_core.protocols import Algorithm, AlgorithmContext, RoleUpdate
from chatlearn_core.types import Derived, Metric, Sample, TrainBatch
from chatlearn_testing.batches import MaskedPolicyLoss
from chatlearn_testing.fakes.options import FakeAlgorithmOptions


class FakeAlgorithm(Algorithm):
    """Every completion's advantage is its reward minus the mean reward of its group.

    With ``replace_equal`` a step asks for further prompts until it has ``train.prompts_per_step`` groups whose rewards
    differ, as dynamic sampling does (DAPO, arXiv 2503.14476, section 3.2).
    """

    policy = "trainer"

    def __init__(self, options: FakeAlgorithmOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context
        self.group_size = options.group_size

    def flow(self, examples: Any, m: Any) -> Any:
        samples = m.generator.generate(examples)
        return m.join(samples, m.reward.score(samples))

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        rewards = batch.sequence_data["reward"]
        group = torch.unique(batch.group_index, return_inverse=True)[1]
        sums = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, rewards)
        advantages = rewards - (sums / torch.bincount(group))[group]
        return Derived(
            token_data={"advantages": torch.where(batch.loss_mask, advantages[batch.sequence_index], 0.0).float()},
            metrics={"reward": Metric(float(rewards.sum()), len(rewards))},
        )

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        return [RoleUpdate("trainer", MaskedPolicyLoss(self.context.basis.temperature))]

    def wanted(self, samples: Sequence[Sample]) -> int:
        if not self.options.replace_equal:
            return 0
        rewards: dict[str, set[float | None]] = {}
        for sample in samples:
            rewards.setdefault(sample.group_id, set()).add(None if sample.reward is None else sample.reward.value)
        return max(0, self.context.prompts_per_step - sum(len(of_group) > 1 for of_group in rewards.values()))
