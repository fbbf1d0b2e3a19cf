"""Options of GRPO and Dr.GRPO."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chatlearn_algorithms.role_names import RolloutRoles

# The names repeat those of chatlearn_losses, which imports torch; a test holds the two lists together.
KLName = Literal["k1", "k2", "k3", "k1_straight_through", "k3_straight_through"]
KLWeightName = Literal["none", "ratio", "generator_ratio", "score"]
KLClampName = Literal["k3", "all", "none"]
Level = Literal["token", "sequence", "sequence_geometric"]
AdvantageStd = Literal["population", "sample", "none"]


class GRPOOptions(BaseModel):
    """Group relative policy optimization (arXiv 2402.03300)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(8, ge=2, description="Completions sampled for one prompt.")
    advantage_std: AdvantageStd = Field(
        "population", description="What a group's centred rewards are divided by: their standard deviation, or nothing."
    )
    epsilon: float = Field(1e-5, gt=0, description="Added to the standard deviation.")
    drop_zero_spread_groups: bool = Field(
        False, description="Exclude groups whose rewards are all equal (DAPO): they carry no signal, only weight."
    )
    clip_low: float = Field(0.2, ge=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="The ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(
        None, gt=1, description="For negative advantages the loss is at most -advantage * dual_clip; off by default."
    )
    aggregation: str = Field("seq_mean_token_mean", description="How token losses become one number.")
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of an aggregation that a plugin adds."
    )
    constant_length: int | None = Field(
        None,
        ge=1,
        description="Tokens that seq_mean_token_sum_norm divides by; the longest completion allowed by default.",
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL to the role 'reference' in the loss; 0: no KL.")
    kl_estimator: KLName = Field("k3", description="How the KL to the reference is estimated from sampled tokens.")
    kl_weight: KLWeightName = Field(
        "none",
        description="What each token's KL is multiplied by, with gradient, so that k1 and k3 push toward the reference "
        "as the KL itself does: ratio, of the policy to old (TRL); generator_ratio, to the generator, or score (both "
        "NeMo-RL).",
    )
    kl_clamp: KLClampName = Field(
        "k3",
        description="What is cut, and gives no gradient there: k3 above 10 (verl), all estimates beyond 10 either way "
        "(NeMo-RL, OpenRLHF), or none (TRL).",
    )
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus in the loss.")
    log_entropy: bool = Field(True, description="Measure the policy's entropy even without a bonus.")
    recompute_old_logprobs: bool = Field(
        True,
        description="Ratios are against logprobs that the trainer computes before its first update; false: against the "
        "generator's own, which saves one forward pass and needs top_p=1, top_k=0.",
    )
    importance_correction: Literal["none", "truncate", "mask", "mask_sequences"] = Field(
        "none",
        description="Correct for the gap between the trainer's and the generator's logprobs: weights cut to the "
        "bounds, 0 outside them, or 0 in sequences outside them.",
    )
    importance_level: Level = Field("token", description="Whose ratio the correction weighs by.")
    importance_threshold: float = Field(2.0, gt=0, description="Upper bound of the correction's weights.")
    importance_min: float | None = Field(
        None, ge=0, description="Lower bound; by default none to truncate, and 1/importance_threshold to mask."
    )

    roles: RolloutRoles = Field(RolloutRoles(), description="What the roles are called, if not as by default.")

    @model_validator(mode="after")
    def _settings_agree(self) -> GRPOOptions:
        if self.roles.reward is None and self.roles.environment is None:
            raise ValueError("roles.reward=null needs an environment that gives rewards: set roles.environment")
        if self.constant_length is not None and self.aggregation != "seq_mean_token_sum_norm":
            raise ValueError(
                f"constant_length={self.constant_length} has no meaning for aggregation={self.aggregation}: remove it, "
                f"or set aggregation: seq_mean_token_sum_norm"
            )
        if self.importance_correction != "none" and not self.recompute_old_logprobs:
            raise ValueError(
                f"importance_correction={self.importance_correction} weighs by exp(old - generator), which is 1 with "
                f"recompute_old_logprobs=false: set recompute_old_logprobs: true, or importance_correction: none"
            )
        if self.importance_correction == "mask_sequences" and self.importance_level == "token":
            raise ValueError(
                "importance_correction=mask_sequences looks at the ratio of a sequence, not at importance_level=token: "
                "set importance_level: sequence_geometric (or sequence)"
            )
        least = self.importance_min
        if least is None and self.importance_correction != "truncate":
            least = 1 / self.importance_threshold
        if least is not None and least > self.importance_threshold and self.importance_correction != "none":
            raise ValueError(
                f"importance_threshold={self.importance_threshold} is below the lower bound {least:g}, so nothing is "
                f"between: raise it, or set importance_min below it (by default 1/importance_threshold to mask)"
            )
        if self.importance_min is not None and self.importance_correction == "none":
            raise ValueError(
                f"importance_min={self.importance_min} bounds weights that importance_correction=none does not make: "
                f"remove it, or set importance_correction"
            )
        if self.kl_weight != "none" and self.kl_estimator not in ("k1", "k2", "k3"):
            raise ValueError(
                f"kl_weight={self.kl_weight} gives the KL the gradient that kl_estimator={self.kl_estimator} takes "
                f"from k2 already, and both together twice that: set kl_weight: none, or kl_estimator: k1 or k3"
            )
        return self

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define. The reference has a message of its own."""
        roles = self.roles
        environment = roles.environment  # which says itself what generators it uses
        needed = [(roles.generator, "generator") if environment is None else (environment, "environment")]
        needed += [(roles.policy, "trainer")]
        needed += [(roles.reward, "reward")] if roles.reward is not None else []
        return tuple(needed)

    @property
    def stale_tokens(self) -> tuple[tuple[str, ...], str] | None:
        """Partial rollouts: why tokens of older weights would be taken for the current policy's; None: corrected."""
        if self.importance_correction != "none" or not self.recompute_old_logprobs:
            return None
        remedy = "set algorithm.options.importance_correction to truncate or mask, or recompute_old_logprobs to false"
        return ("importance_correction", "recompute_old_logprobs"), remedy

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """(option, sentence) pairs: what is allowed and hardly meant."""
        if self.kl_coef and self.kl_estimator == "k1" and self.kl_weight == "none":
            return (
                (
                    "kl_estimator",
                    "k1 in a loss adds noise and no pull toward the reference: its gradient has expectation 0 while "
                    "the policy is the one that sampled. Set kl_weight: ratio, or kl_estimator: k1_straight_through",
                ),
            )
        return ()


class DrGRPOOptions(GRPOOptions):
    """Dr.GRPO (arXiv 2503.20783): advantages without a standard deviation, token sums over a constant length."""

    advantage_std: AdvantageStd = Field(
        "none", description="What a group's centred rewards are divided by: their standard deviation, or nothing."
    )
    aggregation: str = Field("seq_mean_token_sum_norm", description="How token losses become one number.")
