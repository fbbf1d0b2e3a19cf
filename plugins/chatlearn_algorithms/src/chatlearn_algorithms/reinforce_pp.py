"""REINFORCE++ (arXiv 2501.03262): discounted token rewards, normalised over the whole batch, without a critic."""

from __future__ import annotations

from chatlearn_algorithms.group_advantages import (
    group_means,
    groups_too_small,
    spread_metrics,
    trained_tokens,
    without_spread,
)
from chatlearn_algorithms.group_relative import GroupBased
from chatlearn_algorithms.policy_gradient import ClippedPolicyGradient
from chatlearn_algorithms.reinforce_options import ReinforcePPBaselineOptions, ReinforcePPOptions
from chatlearn_core.types import Derived, TrainBatch
from chatlearn_losses import discounted_returns, rewards_at_actions, whiten


class ReinforcePP(ClippedPolicyGradient[ReinforcePPOptions]):
    """A_t = whiten(Σ_{s ≥ t} γ^(s−t) r_s), with r_s = 1[s last] · reward − β KL_s."""

    advantage_split = "batch"

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        scored = self.scored(batch, step)
        returns = discounted_returns(scored.tokens, batch, gamma=self.options.gamma)
        return Derived({"advantages": whiten(returns, batch.loss_mask).float()}, metrics=scored.metrics)


class ReinforcePPBaseline(GroupBased[ReinforcePPBaselineOptions], ClippedPolicyGradient[ReinforcePPBaselineOptions]):
    """REINFORCE++ on rewards minus the mean reward of the prompt's group."""

    advantage_split = "batch"

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        scored = self.scored(batch, step)
        exclusions, metrics = groups_too_small(batch), scored.metrics | spread_metrics(batch, scored)
        if self.options.drop_zero_spread_groups:
            exclusions = without_spread(batch, scored.verdicts)
        centred = scored.tokens - rewards_at_actions(batch, group_means(batch, scored.shaped))
        returns = discounted_returns(centred, batch, gamma=self.options.gamma)
        advantages = whiten(returns, trained_tokens(batch, exclusions)).float()
        return Derived({"advantages": advantages}, {}, exclusions, metrics)
