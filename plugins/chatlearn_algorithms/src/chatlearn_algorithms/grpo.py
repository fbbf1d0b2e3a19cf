"""GRPO (arXiv 2402.03300), and with other options Dr.GRPO (arXiv 2503.20783).

Of the G completions of a prompt, with rewards r_1 ... r_G, section 4.1.2 and eq. 3:

    A_i  = (r_i − mean(r)) / (std(r) + ε)
    ρ_it = π(o_it) / π_old(o_it)
    L    = mean over i of mean over t of −min(ρ_it A_i, clip(ρ_it, 1 − ε_low, 1 + ε_high) A_i) + β KL_it
"""

from __future__ import annotations

from typing import TypeVar

from chatlearn_algorithms.group_advantages import Floats, group_advantages
from chatlearn_algorithms.group_relative import GroupRelative
from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_algorithms.policy_gradient import ClippedPolicyGradient
from chatlearn_algorithms.policy_gradient_options import NormalisedOptions
from chatlearn_algorithms.process_supervision import StepSupervised

NormalisedT = TypeVar("NormalisedT", bound=NormalisedOptions)


class GroupNormalised(GroupRelative[NormalisedT]):
    """A_i at every token of completion i."""

    def group_advantages(self, rewards: Floats) -> Floats:
        return group_advantages(rewards, self.options.advantage_std, self.options.epsilon)


class GRPO(StepSupervised, GroupNormalised[GRPOOptions], ClippedPolicyGradient[GRPOOptions]):
    """Samples a group per prompt, scores it, and reinforces completions above the group's mean, by PPO's clip."""
