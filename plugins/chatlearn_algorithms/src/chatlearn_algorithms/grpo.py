"""GRPO (arXiv 2402.03300), and with other options Dr.GRPO (arXiv 2503.20783) and DAPO's loss (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chatlearn_algorithms.group_advantages import assign_group_advantages
from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_algorithms.policy_loss import ImportanceCorrection, PolicyLoss
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.losses import check_same_basis
from chatlearn_core.protocols.algorithm import AlgorithmContext, InputKind
from chatlearn_core.protocols.loss import Loss
from chatlearn_core.types import LogprobBasis, Metrics, Sample


class GRPO:
    """Samples a group a prompt, scores it, and prefers what scored above the group's mean.

    Raises:
        ConfigError: a KL is asked for without a role ``reference``, or the options need the generator's logprobs in a
            ratio and these are of another distribution than the trainer's: raw ones at a temperature other than 1, or
            cut to top-p or top-k, which no trainer computes.
    """

    def __init__(self, options: GRPOOptions, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context
        if options.kl_coef and context.roles.get("reference") != "trainer":
            configured = ", ".join(f"{name} ({kind})" for name, kind in context.roles.items())
            raise ConfigError(
                f"algorithm.options.kl_coef is {options.kl_coef}, which needs a role 'reference' of kind trainer; the "
                f"configured roles are {configured}. Add roles.reference with kind: trainer, or set kl_coef: 0."
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

    @property
    def input(self) -> InputKind:
        return "prompts"

    @property
    def group_size(self) -> int:
        return self.options.group_size

    @property
    def policy(self) -> str:
        return "trainer"

    def flow(self, prompts: Any, m: Any) -> Any:
        """Generate, then score and compute the logprobs that the options need."""
        samples = m.generator.generate(prompts)
        parts = [m.reward.score(samples)]
        if self.options.kl_coef:
            parts.append(m.reference.logprobs(samples))
        if self.options.recompute_old_logprobs:
            parts.append(m.trainer.logprobs(samples))
        return m.join(samples, *parts)

    def prepare_samples(self, samples: Sequence[Sample]) -> Metrics:
        """Group advantages in place; metrics of the rewards."""
        return assign_group_advantages(
            samples,
            std=self.options.advantage_std,
            epsilon=self.options.epsilon,
            drop_zero_spread=self.options.drop_zero_spread_groups,
        )

    def losses(self) -> Mapping[str, Loss]:
        """The clipped policy loss, for the role ``trainer``."""
        options = self.options
        constant_length = options.constant_length
        if constant_length is None and options.aggregation == "seq_mean_token_sum_norm":
            constant_length = self.context.max_completion_tokens
        correction = None
        if options.importance_correction != "none":
            correction = ImportanceCorrection(
                options.importance_correction,
                options.importance_level,
                options.importance_threshold,
                options.importance_min,
            )
        return {
            "trainer": PolicyLoss(
                clip_low=options.clip_low,
                clip_high=options.clip_high,
                dual_clip=options.dual_clip,
                aggregation=options.aggregation,
                constant_length=constant_length,
                kl_coef=options.kl_coef,
                kl_estimator=options.kl_estimator,
                kl_weight=options.kl_weight,
                kl_clamp=options.kl_clamp,
                entropy_coef=options.entropy_coef,
                log_entropy=options.log_entropy,
                correction=correction,
                old_logprobs="trainer_logprobs" if options.recompute_old_logprobs else "generator_logprobs",
                temperature=self.context.basis.temperature,
            )
        }
