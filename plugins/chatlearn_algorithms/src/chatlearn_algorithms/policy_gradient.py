"""The base of policy-gradient algorithms: sample, score, compute logprobs; then update the policy by advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from chatlearn_algorithms.adaptive_kl import AdaptiveKL
from chatlearn_algorithms.objectives import Clip, Objective
from chatlearn_algorithms.policy_gradient_options import ClippedOptions, PolicyGradientOptions
from chatlearn_algorithms.policy_loss import ImportanceCorrection, PolicyLoss
from chatlearn_algorithms.scored_rewards import KLPenalty, ScoredRewards, scored_rewards
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import Algorithm, AlgorithmContext, RoleUpdate
from chatlearn_core.types import KEPT_IDS, LogprobBasis, Metric, TrainBatch
from chatlearn_losses import check_same_basis

OptionsT = TypeVar("OptionsT", bound=PolicyGradientOptions)
ClippedT = TypeVar("ClippedT", bound=ClippedOptions)


class PolicyGradient(Algorithm, Generic[OptionsT]):
    """A subclass defines the advantages and the objective.

    Raises:
        ConfigError: the options set a KL without a role ``reference``; a coefficient has both a schedule and a target;
            or a ratio needs the generator's logprobs, but they belong to another distribution than the trainer's: raw
            ones at a temperature other than 1, or cut to top-p or top-k without ``truncated_logprobs``.
    """

    scheduled = frozenset({"clip_low", "clip_high", "kl_coef", "entropy_coef"})

    def __init__(self, options: OptionsT, context: AlgorithmContext) -> None:
        self.options = options
        self.context = context
        self.group_size = options.group_size
        self.policy = options.roles.policy
        self.logprobs = "truncated_logprobs" if options.truncated_logprobs else "logprobs"
        recomputed = f"{options.roles.policy}_{self.logprobs}"
        self.old_logprobs = recomputed if options.recompute_old_logprobs else "generator_logprobs"
        self.adaptive_kl: AdaptiveKL | None = None
        if options.kl_target is not None:
            self.adaptive_kl = AdaptiveKL(options.kl_coef, options.kl_target, options.kl_horizon)
        check_reference(options, context)
        check_bases(options, context)

    def flow(self, prompts: Any, m: Any) -> Any:
        """Generate, then score and compute the logprobs that the options need."""
        roles = self.options.roles
        if roles.environment is None:
            samples = getattr(m, roles.generator).generate(prompts)
        else:
            samples = getattr(m, roles.environment).rollout(prompts)
        return m.join(samples, *self.parts(samples, m))

    def parts(self, samples: Any, m: Any) -> list[Any]:
        """Return the calls on the samples, which the flow joins."""
        roles = self.options.roles
        parts = [] if roles.reward is None else [getattr(m, roles.reward).score(samples)]
        if self.options.kl_coef and self.options.kl_estimator == "full":
            likely = getattr(m, roles.reference).topk(samples, k=self.options.kl_top_k)
            parts.append(likely)
            if self.options.kl_placement == "reward":
                parts.append(getattr(m, roles.policy).logprobs_at(likely, ids=f"{roles.reference}_topk_ids"))
        elif self.options.kl_coef:
            parts.append(self.scored_tokens(getattr(m, roles.reference), samples))
        if self.options.recompute_old_logprobs:
            parts.append(self.scored_tokens(getattr(m, roles.policy), samples))
        return parts

    def scored_tokens(self, role: Any, samples: Any) -> Any:
        """The role's logprobs of the sampled tokens, in the distribution that the options name."""
        if self.options.truncated_logprobs:
            return role.truncated_logprobs(samples, kept=KEPT_IDS)
        return role.logprobs(samples)

    def scored(self, batch: TrainBatch, step: int) -> ScoredRewards:
        """Return the samples' rewards, including shaping and a KL in the reward."""
        options, penalty = self.options_at(step), None
        if options.kl_coef and options.kl_placement == "reward":
            assert options.kl_estimator in ("k1", "k2", "k3", "full"), "the options refuse all other values"
            compared = (self.old_logprobs, f"{options.roles.reference}_{self.logprobs}")
            if options.kl_estimator == "full":
                compared = (f"{options.roles.policy}_logprobs_at", f"{options.roles.reference}_topk_logprobs")
            clamps = options.kl_clamp != "none"
            penalty = KLPenalty(options.kl_coef, options.kl_estimator, clamps, *compared)
        scored = scored_rewards(batch, penalty=penalty, bonus=self.bonus(batch))
        if self.adaptive_kl is not None:
            scored.metrics["kl_coef"] = Metric(options.kl_coef)
        return scored

    def bonus(self, batch: TrainBatch) -> Tensor | None:
        """[S] numbers to add to the rewards, or None."""
        return None

    def objective(self, options: OptionsT) -> Objective:
        """Return the loss of a token before KL, entropy and aggregation."""
        raise NotImplementedError

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """Update the policy."""
        return [RoleUpdate(self.options.roles.policy, self.loss(self.options_at(step)))]

    def loss(self, options: OptionsT | None = None) -> PolicyLoss:
        """Return the policy's loss with these options, by default those of the configuration."""
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
        return PolicyLoss(
            objective=self.objective(options),
            aggregation=self.context.aggregation(options.aggregation, aggregation_options),
            kl_coef=options.kl_coef if options.kl_placement == "loss" else 0.0,
            kl_estimator=options.kl_estimator,
            kl_weight=options.kl_weight,
            kl_clamp=options.kl_clamp,
            entropy_coef=options.entropy_coef,
            log_entropy=options.log_entropy,
            correction=correction,
            old_logprobs=self.old_logprobs,
            reference=options.roles.reference,
            temperature=self.context.basis.temperature,
            truncated=options.truncated_logprobs,
        )

    def options_at(self, step: int) -> OptionsT:
        """Return the options in a step: with scheduled values and the adapted KL coefficient."""
        options = self.context.options_at(self.options, step)
        if self.adaptive_kl is None:
            return options
        return options.model_copy(update={"kl_coef": self.adaptive_kl.coef})

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adapt the KL coefficient to the measured KL, if the step has one."""
        measured = "reward_kl" if self.options.kl_placement == "reward" else "policy/kl_loss"
        if self.adaptive_kl is not None and measured in metrics:
            self.adaptive_kl.update(metrics[measured], metrics.get("samples/trained", 0.0))

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient of an adaptive KL."""
        return {} if self.adaptive_kl is None else {"kl_coef": self.adaptive_kl.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient; if the checkpoint has none, it keeps its initial value."""
        if self.adaptive_kl is not None:
            self.adaptive_kl = replace(self.adaptive_kl, coef=state.get("kl_coef", self.options.kl_coef))


class ClippedPolicyGradient(PolicyGradient[ClippedT]):
    """A policy gradient with PPO's clipped ratio."""

    def objective(self, options: ClippedT) -> Objective:
        return Clip(options.clip_low, options.clip_high, options.dual_clip)


def check_reference(options: PolicyGradientOptions, context: AlgorithmContext) -> None:
    """Check that a KL has a reference, and that only one setting determines its coefficient.

    Raises:
        ConfigError: there is no reference, or both a schedule and a target.
    """
    if options.kl_coef and context.roles.get(options.roles.reference) != "trainer":
        configured = ", ".join(f"{name} ({kind})" for name, kind in context.roles.items())
        raise ConfigError(
            f"algorithm.options.kl_coef is {options.kl_coef}, which needs a role "
            f"{options.roles.reference!r} of kind trainer; the configured roles are {configured}. Add "
            f"roles.{options.roles.reference} with kind: trainer, or set kl_coef: 0."
        )
    if options.kl_target is not None and "kl_coef" in context.schedules:
        raise ConfigError(
            f"algorithm.options.kl_target is {options.kl_target}, which adapts kl_coef to the KL,"
            " but schedules also sets algorithm.options.kl_coef. Remove one of the two"
        )


def check_bases(options: PolicyGradientOptions, context: AlgorithmContext) -> None:
    """Check that every ratio compares logprobs of the same distribution.

    Raises:
        ConfigError: an option needs a ratio of two distributions.
    """
    compares = {
        "recompute_old_logprobs=false": not options.recompute_old_logprobs,
        f"importance_correction={options.importance_correction}": options.importance_correction != "none",
        f"kl_weight={options.kl_weight}": options.kl_coef > 0 and options.kl_weight == "generator_ratio",
    }
    trained = context.basis if options.truncated_logprobs else LogprobBasis(context.basis.temperature)
    for setting in (setting for setting, compared in compares.items() if compared):
        for basis in (context.generator_basis or context.basis, context.basis):
            check_same_basis(
                trained,
                basis,
                first_name="trainer_logprobs",
                second_name=f"generator_logprobs of {context.generator}",
                wanted_by=f"algorithm.options.{setting}",
            )
