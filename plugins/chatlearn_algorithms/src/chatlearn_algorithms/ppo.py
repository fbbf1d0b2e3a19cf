"""PPO with a critic (arXiv 1707.06347), as it is used on language models (arXiv 2203.02155).

Decoupled PPO (arXiv 2110.00641) is PPO with other options: old logprobs belong to the proximal policy (the trainer
computes them when a step takes its samples), and their ratio to the generator's logprobs weights the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from chatlearn_algorithms.policy_gradient import ClippedPolicyGradient
from chatlearn_algorithms.ppo_options import PPOOptions
from chatlearn_algorithms.value_loss import ValueLoss
from chatlearn_core.exceptions import FlowError
from chatlearn_core.protocols import AlgorithmContext, RoleUpdate
from chatlearn_core.types import Derived, Metric, TrainBatch
from chatlearn_losses import gae, whiten


class PPO(ClippedPolicyGradient[PPOOptions]):
    """Rewards are the verdict at the last token, minus β KL_t at each token; advantages by GAE; the critic learns
    returns.
    """

    advantage_split = "batch"

    def __init__(self, options: PPOOptions, context: AlgorithmContext) -> None:
        super().__init__(options, context)
        self.critic = options.roles.critic
        self.values = f"{self.critic}_values"
        self.value_aggregation = context.aggregation(options.value_aggregation, options.value_aggregation_options)

    def parts(self, samples: Any, m: Any) -> list[Any]:
        """Return the calls of every policy gradient, and the critic's values."""
        return [*super().parts(samples, m), getattr(m, self.critic).values(samples)]

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Compute GAE (arXiv 1506.02438) over the sampled tokens; ``returns`` use the advantages before whitening."""
        if self.values not in batch.token_data:
            raise FlowError(f"samples have no {self.values}: the flow must join m.{self.critic}.values(samples)")
        scored, values = self.scored(batch, step), batch.token_data[self.values]
        estimate = gae(scored.tokens, values, batch, gamma=self.options.gamma, lam=self.options.gae_lambda)
        advantages = estimate.advantages
        if self.options.whiten_advantages:
            advantages = whiten(advantages, batch.loss_mask)
        explained = Metric(_explained_variance(values[batch.loss_mask], estimate.returns[batch.loss_mask]))
        token_data = {"advantages": advantages.float(), "returns": estimate.returns.float()}
        return Derived(token_data, metrics=scored.metrics | {f"{self.critic}/explained_variance": explained})

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """Update the critic and, after its warm-up, the policy."""
        options = self.options
        loss = ValueLoss(options.value_clip, self.value_aggregation, self.values)
        critic = RoleUpdate(self.critic, loss, options.critic_epochs, options.critic_mini_batches)
        return [critic] if step <= options.critic_warmup_steps else [critic, *super().updates(step)]


def _explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var(R − V) / Var(R): 1 for a perfect critic, 0 for a constant one, and 0 if all returns are equal."""
    variance = float(returns.double().var(unbiased=False)) if len(returns) else 0.0
    return 1.0 - float((returns - values.double()).var(unbiased=False)) / variance if variance else 0.0
