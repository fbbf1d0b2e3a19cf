"""Options that all policy-gradient algorithms have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chatlearn_algorithms.role_names import RolloutRoles

# The names repeat those of chatlearn_losses, which imports torch; a test holds the two lists together.
KLName = Literal["k1", "k2", "k3", "k1_straight_through", "k3_straight_through", "full"]
KLWeightName = Literal["none", "ratio", "generator_ratio", "score"]
KLClampName = Literal["k3", "all", "none"]
Level = Literal["token", "sequence", "sequence_geometric"]
AdvantageStd = Literal["population", "sample", "none"]


class PolicyGradientOptions(BaseModel):
    """How many completions a prompt gets, and everything of the loss but its objective."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(8, ge=1, description="Completions sampled for one prompt.")
    aggregation: str = Field("token_mean", description="How token losses become one number.")
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of an aggregation that a plugin adds."
    )
    constant_length: int | None = Field(
        None,
        ge=1,
        description="Tokens that seq_mean_token_sum_norm divides by; the longest completion allowed by default.",
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL to the role 'reference'; 0: no KL.")
    kl_placement: Literal["loss", "reward"] = Field(
        "loss",
        description="Where the KL counts: in the loss, or in the reward, from which it is taken token by token before "
        "advantages are computed.",
    )
    kl_estimator: KLName = Field(
        "k3",
        description="How the KL to the reference is estimated from sampled tokens; full: computed over the reference's "
        "kl_top_k most likely tokens, all others being one class.",
    )
    kl_top_k: int = Field(
        64, ge=1, description="Tokens that kl_estimator=full looks at; the vocabulary's size for the exact KL."
    )
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
    kl_target: float | None = Field(
        None,
        gt=0,
        description="KL of a token, nats, that kl_coef is adapted to reach (arXiv 1909.08593, section 2.2); off by "
        "default: kl_coef stays.",
    )
    kl_horizon: int = Field(
        10_000, ge=1, description="Samples over which kl_coef changes by at most a fifth; with kl_target."
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
    def _settings_agree(self) -> PolicyGradientOptions:
        if self.roles.reward is None and self.roles.environment is None:
            raise ValueError("roles.reward=null needs an environment that gives rewards: set roles.environment")
        if self.constant_length is not None and self.aggregation != "seq_mean_token_sum_norm":
            raise ValueError(
                f"constant_length={self.constant_length} has no meaning for aggregation={self.aggregation}: remove it, "
                f"or set aggregation: seq_mean_token_sum_norm"
            )
        for problem in (*self._correction_problems(), *self._kl_problems()):
            raise ValueError(problem)
        return self

    def _correction_problems(self) -> list[str]:
        mode, threshold, least = self.importance_correction, self.importance_threshold, self.importance_min
        if mode == "none":
            return (
                []
                if least is None
                else [
                    f"importance_min={least} bounds weights that importance_correction=none does not make: "
                    f"remove it, or set importance_correction"
                ]
            )
        problems = []
        if not self.recompute_old_logprobs:
            problems.append(
                f"importance_correction={mode} weighs by exp(old - generator), which is 1 with "
                f"recompute_old_logprobs=false: set recompute_old_logprobs: true, or importance_correction: none"
            )
        if mode == "mask_sequences" and self.importance_level == "token":
            problems.append(
                "importance_correction=mask_sequences looks at the ratio of a sequence, not at importance_level=token: "
                "set importance_level: sequence_geometric (or sequence)"
            )
        if least is None and mode != "truncate":
            least = 1 / threshold
        if least is not None and least > threshold:
            problems.append(
                f"importance_threshold={threshold} is below the lower bound {least:g}, so nothing is "
                f"between: raise it, or set importance_min below it (by default 1/importance_threshold to mask)"
            )
        return problems

    def _kl_problems(self) -> list[str]:
        problems = []
        if self.kl_weight != "none" and self.kl_placement == "reward":
            problems.append(
                f"kl_weight={self.kl_weight} gives a KL in the loss its gradient; a KL in the reward "
                f"(kl_placement=reward) has none: set kl_weight: none"
            )
        elif self.kl_weight != "none" and self.kl_estimator == "full":
            problems.append(
                f"kl_weight={self.kl_weight} mends the gradient of an estimate from sampled tokens, and "
                f"kl_estimator=full has its whole gradient: set kl_weight: none"
            )
        elif self.kl_weight != "none" and self.kl_estimator not in ("k1", "k2", "k3"):
            problems.append(
                f"kl_weight={self.kl_weight} gives the KL the gradient that kl_estimator={self.kl_estimator} takes "
                f"from k2 already, and both together twice that: set kl_weight: none, or kl_estimator: k1 or k3"
            )
        if self.kl_placement == "reward" and self.kl_estimator not in ("k1", "k2", "k3"):
            what = "is computed with the loss" if self.kl_estimator == "full" else "differs in its gradient alone"
            problems.append(
                f"kl_estimator={self.kl_estimator} {what}, and kl_placement=reward takes a number from the "
                f"reward: set kl_estimator: k1, k2 or k3, or kl_placement: loss"
            )
        if self.kl_target is not None and not self.kl_coef:
            problems.append(
                f"kl_target={self.kl_target} adapts a kl_coef that is 0, and stays so: set kl_coef above 0, where it "
                f"starts, or remove kl_target"
            )
        return problems

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
        unweighted = self.kl_estimator == "k1" and self.kl_weight == "none"
        if self.kl_coef and unweighted and self.kl_placement == "loss":
            return (
                (
                    "kl_estimator",
                    "k1 in a loss adds noise and no pull toward the reference: its gradient has expectation 0 while "
                    "the policy is the one that sampled. Set kl_weight: ratio, kl_estimator: k1_straight_through, or "
                    "kl_placement: reward",
                ),
            )
        return ()


class ClippedOptions(PolicyGradientOptions):
    """With PPO's clipped ratio (arXiv 1707.06347)."""

    clip_low: float = Field(0.2, ge=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="The ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(
        None, gt=1, description="For negative advantages the loss is at most -advantage * dual_clip; off by default."
    )


class GroupOptions(PolicyGradientOptions):
    """Of algorithms that compare the completions of a prompt with each other."""

    group_size: int = Field(8, ge=2, description="Completions sampled for one prompt.")
    drop_zero_spread_groups: bool = Field(
        False, description="Exclude groups whose rewards are all equal (DAPO): they carry no signal, only weight."
    )


class NormalisedOptions(GroupOptions):
    """With GRPO's advantages (arXiv 2402.03300)."""

    aggregation: str = Field("seq_mean_token_mean", description="How token losses become one number.")
    advantage_std: AdvantageStd = Field(
        "population", description="What a group's centred rewards are divided by: their standard deviation, or nothing."
    )
    epsilon: float = Field(1e-5, gt=0, description="Added to the standard deviation.")
