"""GRPO (arXiv 2402.03300), and with other options Dr.GRPO (arXiv 2503.20783)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from chatlearn_algorithms.group_advantages import Floats, group_advantages
from chatlearn_algorithms.group_relative import GroupRelative
from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_algorithms.policy_gradient import ClippedPolicyGradient
from chatlearn_algorithms.policy_gradient_options import NormalisedOptions
from chatlearn_algorithms.process_supervision import derive_process_advantages, differ, without_token_rewards
from chatlearn_core.types import Derived, RewardResult, TrainBatch

NormalisedT = TypeVar("NormalisedT", bound=NormalisedOptions)


class GroupNormalised(GroupRelative[NormalisedT]):
    """A_i = (r_i − mean(r)) / (std(r) + ε) at every token of completion i, section 4.1.2."""

    def group_advantages(self, rewards: Floats) -> Floats:
        return group_advantages(rewards, self.options.advantage_std, self.options.epsilon)


class GRPO(GroupNormalised[GRPOOptions], ClippedPolicyGradient[GRPOOptions]):
    """Samples a group per prompt, scores it, and reinforces completions above the group's mean: eq. 3, PPO's clip with
    these advantages.
    """

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Of whole completions, or with ``supervision=process`` of their steps, too."""
        if self.options.supervision == "outcome":
            return super().advantages(batch, step)
        outcomes = self.scored(without_token_rewards(batch), step)
        return derive_process_advantages(
            batch,
            self.scored(batch, step),
            outcomes,
            self.group_advantages,
            drop_zero_spread=self.options.drop_zero_spread_groups,
        )

    def has_spread(self, rewards: Sequence[RewardResult]) -> bool:
        """Verdicts differ, or with ``supervision=process`` those of completions without their steps, or of steps."""
        return super().has_spread(rewards) if self.options.supervision == "outcome" else differ(rewards)
