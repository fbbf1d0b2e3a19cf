"""Options that all policy-gradient algorithms have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chatlearn_algorithms.role_names import RolloutRoles

# The names repeat those of chatlearn_losses, which imports torch; a test keeps the two lists equal.
KLName = Literal["k1", "k2", "k3", "k1_straight_through", "k3_straight_through", "full"]
KLWeightName = Literal["none", "ratio", "generator_ratio", "score"]
KLClampName = Literal["k3", "all", "none"]
Level = Literal["token", "sequence", "sequence_geometric"]
AdvantageStd = Literal["population", "sample", "none"]


class PolicyGradientOptions(BaseModel):
    """The number of completions per prompt, and all options of the loss except its objective."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(8, ge=1, description="Number of completions sampled for each prompt.")
    aggregation: str = Field("token_mean", description="How to aggregate token losses.")
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of an aggregation that a plugin adds."
    )
    constant_length: int | None = Field(
        None,
        ge=1,
        description="Number of tokens by which seq_mean_token_sum_norm divides; by default the longest allowed"
        " completion.",
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL to the role 'reference'; 0: no KL.")
    kl_placement: Literal["loss", "reward"] = Field(
        "loss",
        description="Where the KL counts: in the loss, or in the reward, from which it is subtracted token"
        " by token before the advantages are computed.",
    )
    kl_estimator: KLName = Field(
        "k3",
        description="How the KL to the reference is estimated from sampled tokens; full: over the reference's kl_top_k"
        " most likely tokens, with all other tokens as one class.",
    )
    kl_top_k: int = Field(
        64, ge=1, description="Number of tokens for kl_estimator=full; the vocabulary's size gives the exact KL."
    )
    kl_weight: KLWeightName = Field(
        "none",
        description="Factor of each token's KL, with gradient, which gives k1 and k3 the"
        " gradient of the KL itself: ratio, of the policy to old (TRL); generator_ratio, to the generator, or score"
        " (both NeMo-RL).",
    )
    kl_clamp: KLClampName = Field(
        "k3",
        description="Which estimates are clipped and then have no gradient: k3 above 10 (verl), all estimates"
        " outside ±10 (NeMo-RL, OpenRLHF), or none (TRL).",
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description="Target KL of a token in nats, to which kl_coef is adapted (arXiv 1909.08593, section 2.2); by"
        " default kl_coef stays constant.",
    )
    kl_horizon: int = Field(
        10_000, ge=1, description="With kl_target: number of samples over which kl_coef changes by at most a fifth."
    )
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus in the loss.")
    log_entropy: bool = Field(True, description="Measure the policy's entropy even without a bonus.")
    recompute_old_logprobs: bool = Field(
        True,
        description="Old logprobs of the ratios: true takes those that the trainer computes before its first"
        " update; false takes the generator's, which saves a forward pass and needs top_p=1, top_k=0,"
        " or truncated_logprobs.",
    )
    truncated_logprobs: bool = Field(
        False,
        description="Logprobs of policy and reference are of the distribution that was sampled from: over the ids that "
        "sampling.top_k and sampling.top_p kept, which the generator returns. Needs sampling.top_k.",
    )
    importance_correction: Literal["none", "truncate", "mask", "mask_sequences"] = Field(
        "none",
        description="Correct for the gap between the trainer's and the generator's logprobs: truncate clips weights to"
        " the bounds, mask sets weights outside them to 0, mask_sequences does so for whole sequences.",
    )
    importance_level: Level = Field("token", description="Unit of the ratio that gives the correction's weights.")
    importance_threshold: float = Field(2.0, gt=0, description="Upper bound of the correction's weights.")
    importance_min: float | None = Field(
        None, ge=0, description="Lower bound; by default none to truncate, and 1/importance_threshold to mask."
    )

    roles: RolloutRoles = Field(RolloutRoles(), description="Names of the roles in the configuration.")

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
                    f"importance_min={least} bounds importance weights, but importance_correction=none uses"
                    f" none: remove it, or set importance_correction"
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
                "importance_correction=mask_sequences needs the ratio of a sequence, but importance_level"
                " is token: set importance_level: sequence_geometric (or sequence)"
            )
        if least is None and mode != "truncate":
            least = 1 / threshold
        if least is not None and least > threshold:
            problems.append(
                f"importance_threshold={threshold} is below the lower bound {least:g}, so no"
                f" weight is allowed: raise it, or set importance_min below it (by default 1/importance_threshold to"
                " mask)"
            )
        return problems

    def _kl_problems(self) -> list[str]:
        problems = []
        if self.kl_weight != "none" and self.kl_placement == "reward":
            problems.append(
                f"kl_weight={self.kl_weight} changes the gradient of a KL in the loss,"
                f" but a KL in the reward (kl_placement=reward) has no gradient: set kl_weight: none"
            )
        elif self.kl_weight != "none" and self.kl_estimator == "full":
            problems.append(
                f"kl_weight={self.kl_weight} corrects the gradient of an estimate from"
                f" sampled tokens, but kl_estimator=full needs no correction: set kl_weight: none"
            )
        elif self.kl_weight != "none" and self.kl_estimator not in ("k1", "k2", "k3"):
            problems.append(
                f"kl_weight={self.kl_weight} and kl_estimator={self.kl_estimator} each give the KL its"
                f" whole gradient; together they would double it: set kl_weight: none, or kl_estimator: k1 or k3"
            )
        if self.kl_placement == "reward" and self.kl_estimator.endswith("_straight_through"):
            problems.append(
                f"kl_estimator={self.kl_estimator} differs in its gradient alone, but kl_placement=reward subtracts a"
                f" number from the reward: set kl_estimator: k1, k2, k3 or full, or kl_placement: loss"
            )
        if self.kl_target is not None and not self.kl_coef:
            problems.append(
                f"kl_target={self.kl_target} adapts kl_coef by factors, but kl_coef is 0 and would stay 0: set kl_coef"
                f" to a start value above 0, or remove kl_target"
            )
        return problems

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define. A missing reference has its own message."""
        roles = self.roles
        environment = roles.environment  # the environment names the generators that it uses
        needed = [(roles.generator, "generator") if environment is None else (environment, "environment")]
        needed += [(roles.policy, "trainer")]
        needed += [(roles.reward, "reward")] if roles.reward is not None else []
        return tuple(needed)

    @property
    def stale_tokens(self) -> tuple[tuple[str, ...], str] | None:
        """Return the remedy if the loss would treat tokens of older weights as the current policy's; None if it
        corrects them.
        """
        if self.importance_correction != "none" or not self.recompute_old_logprobs:
            return None
        remedy = "set algorithm.options.importance_correction to truncate or mask, or recompute_old_logprobs to false"
        return ("importance_correction", "recompute_old_logprobs"), remedy

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """Return (option, sentence) pairs about settings that are allowed but probably mistakes."""
        unweighted = self.kl_estimator == "k1" and self.kl_weight == "none"
        if self.kl_coef and unweighted and self.kl_placement == "loss":
            return (
                (
                    "kl_estimator",
                    "k1 in a loss adds noise but no pull toward the reference: on samples of"
                    " the current policy the expectation of its gradient is 0. Set kl_weight: ratio, kl_estimator:"
                    " k1_straight_through, or "
                    "kl_placement: reward",
                ),
            )
        return ()


class ClippedOptions(PolicyGradientOptions):
    """Options of PPO's clipped ratio (arXiv 1707.06347)."""

    clip_low: float = Field(0.2, ge=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="The ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(
        None, gt=1, description="For negative advantages the loss is at most -advantage * dual_clip; off by default."
    )


class GroupOptions(PolicyGradientOptions):
    """Options of algorithms that compare the completions of a prompt with each other."""

    group_size: int = Field(8, ge=2, description="Number of completions sampled for each prompt.")
    drop_zero_spread_groups: bool = Field(
        False, description="Exclude groups whose rewards are all equal (DAPO): they carry no signal, only weight."
    )
    dynamic_sampling: bool = Field(
        False,
        description="Draw further prompts until train.prompts_per_step groups have rewards that differ (DAPO),"
        " at most rollout.max_refills times.",
    )
    oversampling: float = Field(
        1.0,
        ge=1,
        description="Number of prompts drawn for each missing group. Surplus groups wait for the next"
        " step if rollout.max_staleness is at least 1.",
    )
    overlong_buffer: int | None = Field(
        None,
        ge=1,
        description="Number of tokens before the longest completion over which the reward falls; off by default.",
    )
    overlong_penalty: float = Field(1.0, gt=0, description="What the reward falls by at the longest completion.")
    overlong_length: int | None = Field(
        None, ge=1, description="Longest completion, tokens; sampling.max_tokens by default."
    )

    @model_validator(mode="after")
    def _groups_agree(self) -> GroupOptions:
        if self.dynamic_sampling and not self.drop_zero_spread_groups:
            raise ValueError(
                "dynamic_sampling=true replaces groups whose rewards are all equal, and drop_zero_spread_groups=false "
                "trains on them, too: set drop_zero_spread_groups: true, or dynamic_sampling: false"
            )
        if self.oversampling > 1 and not self.dynamic_sampling:
            raise ValueError(
                f"oversampling={self.oversampling:g} says how many prompts dynamic_sampling draws, and that is off: "
                "remove it, or set dynamic_sampling: true"
            )
        for name in sorted({"overlong_length", "overlong_penalty"} & self.model_fields_set):
            if self.overlong_buffer is None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} belongs to a penalty that is off: set overlong_buffer, or remove "
                    f"{name}"
                )
        buffer, longest = self.overlong_buffer, self.overlong_length
        if buffer is not None and longest is not None and buffer > longest:
            raise ValueError(
                f"overlong_buffer={buffer} is longer than overlong_length={longest}, so that every completion would "
                "be punished: lower it"
            )
        return self


class NormalisedOptions(GroupOptions):
    """Options of GRPO's advantages (arXiv 2402.03300)."""

    aggregation: str = Field("seq_mean_token_mean", description="How to aggregate token losses.")
    advantage_std: AdvantageStd = Field(
        "population", description="Divisor of a group's centred rewards: their standard deviation, or none."
    )
    epsilon: float = Field(1e-5, gt=0, description="Number added to the standard deviation.")
