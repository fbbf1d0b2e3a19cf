"""MaxRL (arXiv 2602.02710): rewards relative to the group's mean, which gives hard prompts more weight.

With binary rewards and success rate p, the gradient of the log-likelihood of success, log p, is the gradient of p
divided by p.
"""

from __future__ import annotations

from chatlearn_algorithms.group_advantages import Floats
from chatlearn_algorithms.group_relative import GroupRelative
from chatlearn_algorithms.policy_gradient import ClippedPolicyGradient
from chatlearn_algorithms.reinforce_options import MaxRLOptions
from chatlearn_core.exceptions import FlowError
from chatlearn_core.types import Derived, TrainBatch


def mean_normalised(rewards: Floats) -> Floats:
    """[G] (r_i − mean) / mean of rewards that are not negative; 0 where the mean is 0."""
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > 0 else rewards * 0.0


class MaxRL(GroupRelative[MaxRLOptions], ClippedPolicyGradient[MaxRLOptions]):
    """The group's mean estimates the probability of success."""

    def group_advantages(self, rewards: Floats) -> Floats:
        return mean_normalised(rewards)

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """
        Raises:
            FlowError: a reward is negative.
        """
        rewards = batch.sequence_data.get("reward")
        if rewards is not None and (rewards < 0).any():
            index = int(rewards.argmin())
            raise FlowError(
                f"sample {batch.sample_ids[index]}: its reward is {float(rewards[index]):g}, and maxrl uses the"
                " mean reward of a prompt as its probability of success, so no reward may be negative. Let the reward"
                " give "
                "0 for failure and 1 for success, or choose another algorithm"
            )
        return super().advantages(batch, step)
