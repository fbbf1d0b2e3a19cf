"""Rejection sampling (RAFT, arXiv 2304.06767; Llama 2, arXiv 2307.09288): imitate the best of n completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatlearn_algorithms.preference_options import RejectionSamplingOptions
from chatlearn_algorithms.sft import SFTLoss
from chatlearn_core.protocols import Algorithm, AlgorithmContext, RoleUpdate
from chatlearn_core.types import Derived, Metric, TrainBatch
from chatlearn_losses import groups

NOT_THE_BEST = "not_the_best"
BEST_TOO_BAD = "below_min_reward"


class RejectionSampling(Algorithm):
    """Samples a group per prompt, scores it, and imitates the completions with the highest rewards."""

    def __init__(self, options: RejectionSamplingOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.group_size = options.group_size
        self.policy = options.roles.policy
        self.aggregation = context.aggregation(options.aggregation, options.aggregation_options)

    def flow(self, prompts: Any, m: Any) -> Any:
        """Generate and score."""
        roles = self.options.roles
        if roles.environment is None:
            samples = getattr(m, roles.generator).generate(prompts)
        else:
            samples = getattr(m, roles.environment).rollout(prompts)
        return samples if roles.reward is None else m.join(samples, getattr(m, roles.reward).score(samples))

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Keep the best completions of each prompt (the first ones of equal ones), if their rewards are high enough."""
        rewards = batch.sequence_data["reward"].tolist()
        exclusions: dict[str, str] = {}
        kept: list[float] = []
        for members in groups(batch.group_index):
            order = sorted(members, key=lambda index: -rewards[index])
            for place, index in enumerate(order):
                if place >= self.options.keep:
                    exclusions[batch.sample_ids[index]] = NOT_THE_BEST
                elif self.options.min_reward is not None and rewards[index] < self.options.min_reward:
                    exclusions[batch.sample_ids[index]] = BEST_TOO_BAD
                else:
                    kept.append(rewards[index])
        metrics = {"reward": Metric(sum(rewards), len(rewards))} if rewards else {}
        if kept:
            metrics["rejection_sampling/kept_reward"] = Metric(sum(kept), len(kept))
        return Derived(exclusions=exclusions, metrics=metrics)

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """Update the policy with cross-entropy on the kept completions."""
        return [RoleUpdate(self.options.roles.policy, SFTLoss(self.aggregation))]
