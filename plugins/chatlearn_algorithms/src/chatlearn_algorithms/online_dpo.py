"""Online DPO (arXiv 2402.04792): pairs that the policy samples and a reward ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatlearn_algorithms.dpo import DPOLoss
from chatlearn_algorithms.ipo import IPOLoss
from chatlearn_algorithms.pair_loss import PairLoss, derive_pairs
from chatlearn_algorithms.preference_options import OnlineDPOOptions
from chatlearn_core.protocols import Algorithm, AlgorithmContext, RoleUpdate
from chatlearn_core.types import Derived, Metric, TrainBatch

EQUAL_REWARDS = "equal_rewards"
"""Exclusion of a prompt's completions if all have the same reward, so that none is preferred."""


class OnlineDPO(Algorithm):
    """Samples a group per prompt, scores it, and learns from the best against the worst by the loss of DPO or IPO."""

    def __init__(self, options: OnlineDPOOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context
        self.group_size = options.group_size
        self.policy = options.roles.policy

    def flow(self, prompts: Any, m: Any) -> Any:
        """Generate, then score and compute the reference's logprobs."""
        roles = self.options.roles
        if roles.environment is None:
            samples = getattr(m, roles.generator).generate(prompts)
        else:
            samples = getattr(m, roles.environment).rollout(prompts)
        parts = [] if roles.reward is None else [getattr(m, roles.reward).score(samples)]
        return m.join(samples, *parts, getattr(m, roles.reference).logprobs(samples))

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Rank completions by reward, and exclude those in no pair."""
        rewards = batch.sequence_data["reward"]
        derived = derive_pairs(batch, rewards, self.options.pairing, tie=EQUAL_REWARDS)
        if batch.num_sequences:
            derived.metrics["reward"] = Metric(float(rewards.sum()), batch.num_sequences)
        return derived

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """The policy alone."""
        return [RoleUpdate(self.options.roles.policy, self.loss())]

    def loss(self) -> PairLoss:
        """The loss of the offline algorithm, at the temperature of the samples."""
        options, temperature = self.options, self.context.basis.temperature
        reference = f"{options.roles.reference}_logprobs"
        if options.loss == "ipo":
            return IPOLoss(temperature, beta=options.beta, reference_logprobs=reference)
        return DPOLoss(
            temperature, beta=options.beta, label_smoothing=options.label_smoothing, reference_logprobs=reference
        )
