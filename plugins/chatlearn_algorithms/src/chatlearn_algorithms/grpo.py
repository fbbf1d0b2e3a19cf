"""GRPO (arXiv 2402.03300), and with other options Dr.GRPO (arXiv 2503.20783) and DAPO's loss (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatlearn_algorithms.group_advantages import derive_group_advantages
from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_algorithms.policy_loss import ImportanceCorrection, PolicyLoss
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import Algorithm, AlgorithmContext, RoleUpdate
from chatlearn_core.types import Derived, LogprobBasis, TrainBatch
from chatlearn_losses import check_same_basis


class GRPO(Algorithm):
    """Samples a group a prompt, scores it, and prefers what scored above the group's mean.

    Raises:
        ConfigError: a KL is asked for without a role ``reference``, or the options need the generator's logprobs in a
            ratio and these are of another distribution than the trainer's: raw ones at a temperature other than 1, or
            cut to top-p or top-k, which no trainer computes.
    """

    scheduled = frozenset({"clip_low", "clip_high", "kl_coef", "entropy_coef"})

    def __init__(self, options: GRPOOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context
        self.group_size = options.group_size
        self.policy = options.roles.policy
        if options.kl_coef and context.roles.get(options.roles.reference) != "trainer":
            configured = ", ".join(f"{name} ({kind})" for name, kind in context.roles.items())
            raise ConfigError(
                f"algorithm.options.kl_coef is {options.kl_coef}, which needs a role "
                f"{options.roles.reference!r} of kind trainer; the configured roles are {configured}. Add "
                f"roles.{options.roles.reference} with kind: trainer, or set kl_coef: 0."
            )
        compares = {
            "recompute_old_logprobs=false": not options.recompute_old_logprobs,
            f"importance_correction={options.importance_correction}": options.importance_correction != "none",
            f"kl_weight={options.kl_weight}": options.kl_coef > 0 and options.kl_weight == "generator_ratio",
        }
        for setting in (setting for setting, compared in compares.items() if compared):
            for basis in (context.generator_basis or context.basis, context.basis):
                check_same_basis(
                    LogprobBasis(context.basis.temperature),
                    basis,
                    first_name="trainer_logprobs",
                    second_name=f"generator_logprobs of {context.generator}",
                    wanted_by=f"algorithm.options.{setting}",
                )

    def flow(self, prompts: Any, m: Any) -> Any:
        """Generate, then score and compute the logprobs that the options need."""
        roles = self.options.roles
        if roles.environment is None:
            samples = getattr(m, roles.generator).generate(prompts)
        else:
            samples = getattr(m, roles.environment).rollout(prompts)
        parts = [] if roles.reward is None else [getattr(m, roles.reward).score(samples)]
        if self.options.kl_coef:
            parts.append(getattr(m, roles.reference).logprobs(samples))
        if self.options.recompute_old_logprobs:
            parts.append(getattr(m, roles.policy).logprobs(samples))
        return m.join(samples, *parts)

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Relative to the other completions of the same prompt."""
        return derive_group_advantages(
            batch,
            std=self.options.advantage_std,
            epsilon=self.options.epsilon,
            drop_zero_spread=self.options.drop_zero_spread_groups,
        )

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """The policy, by the clipped loss."""
        return [RoleUpdate(self.options.roles.policy, self.loss(self.context.options_at(self.options, step)))]

    def loss(self, options: GRPOOptions | None = None) -> PolicyLoss:
        """The clipped policy loss with what the options add; by default the configured ones."""
        options = options or self.options
        aggregation_options = dict(options.aggregation_options)
        if options.aggregation == "seq_mean_token_sum_norm":
            aggregation_options["constant_length"] = options.constant_length or self.context.max_completion_tokens
        correction = None
        if options.importance_correction != "none":
            correction = ImportanceCorrection(
                options.importance_correction,
                options.importance_level,
                options.importance_threshold,
                options.importance_min,
            )
        old = f"{options.roles.policy}_logprobs" if options.recompute_old_logprobs else "generator_logprobs"
        return PolicyLoss(
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            dual_clip=options.dual_clip,
            aggregation=self.context.aggregation(options.aggregation, aggregation_options),
            kl_coef=options.kl_coef,
            kl_estimator=options.kl_estimator,
            kl_weight=options.kl_weight,
            kl_clamp=options.kl_clamp,
            entropy_coef=options.entropy_coef,
            log_entropy=options.log_entropy,
            correction=correction,
            old_logprobs=old,
            reference_logprobs=f"{options.roles.reference}_logprobs",
            temperature=self.context.basis.temperature,
        )
