"""RLOO (arXiv 2402.14740): REINFORCE whose baseline is the mean reward of the other completions of the prompt."""

from __future__ import annotations

from chatlearn_algorithms.group_advantages import Floats
from chatlearn_algorithms.group_relative import GroupRelative
from chatlearn_algorithms.policy_gradient import ClippedPolicyGradient
from chatlearn_algorithms.reinforce_options import RLOOOptions


def leave_one_out(rewards: Floats) -> Floats:
    """[G] r_i − mean of the other G − 1, G at least 2."""
    others: Floats = (rewards.sum() - rewards) / (len(rewards) - 1)
    return rewards - others


class RLOO(GroupRelative[RLOOOptions], ClippedPolicyGradient[RLOOOptions]):
    """The KL is subtracted from the reward. The whole completion is one action, so its tokens' losses are summed."""

    def group_advantages(self, rewards: Floats) -> Floats:
        return leave_one_out(rewards)
