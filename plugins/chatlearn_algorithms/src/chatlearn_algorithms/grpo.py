"""GRPO (arXiv 2402.03300), and with other options Dr.GRPO (arXiv 2503.20783)."""

from __future__ import annotations

from typing import TypeVar

from chatlearn_algorithms.group_advantages import Floats, group_advantages
from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_algorithms.policy_gradient import ClippedPolicyGradient, GroupRelative
from chatlearn_algorithms.policy_gradient_options import NormalisedOptions

NormalisedT = TypeVar("NormalisedT", bound=NormalisedOptions)


class GroupNormalised(GroupRelative[NormalisedT]):
    """A_i = (r_i − mean(r)) / (std(r) + ε) at every token of completion i, section 4.1.2."""

    def group_advantages(self, rewards: Floats) -> Floats:
        return group_advantages(rewards, self.options.advantage_std, self.options.epsilon)


class GRPO(GroupNormalised[GRPOOptions], ClippedPolicyGradient[GRPOOptions]):
    """Samples a group per prompt, scores it, and reinforces completions above the group's mean: eq. 3, PPO's clip with
    these advantages.
    """
