"""Options of GRPO and the algorithms that share its advantages: Dr.GRPO, DAPO, GSPO, CISPO and GDPO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from chatlearn_algorithms.policy_gradient_options import AdvantageStd, ClippedOptions, NormalisedOptions


class ClippedGroupOptions(NormalisedOptions, ClippedOptions):
    """GRPO's advantages in PPO's clipped ratio."""


class GRPOOptions(ClippedGroupOptions):
    """Group relative policy optimization (arXiv 2402.03300)."""

    supervision: Literal["outcome", "process"] = Field(
        "outcome",
        description="outcome: a completion has one advantage, from its reward plus the sum of its rewards of steps and "
        "tokens (section 4.1.2). process: rewards of steps are normalised over the group, and a token has the sum of "
        "those of steps that end at or after it (section 4.1.3), plus the advantage of the completion's own reward.",
    )

    @property
    def needs_steps(self) -> str | None:
        """The reward role that must give rewards of steps; None: none must."""
        return self.roles.reward if self.supervision == "process" else None


class DrGRPOOptions(GRPOOptions):
    """Dr.GRPO (arXiv 2503.20783): advantages without a standard deviation, token sums over a constant length."""

    advantage_std: AdvantageStd = Field(
        "none", description="Divisor of a group's centred rewards: their standard deviation, or none."
    )
    aggregation: str = Field("seq_mean_token_sum_norm", description="How to aggregate token losses.")


class DAPOOptions(ClippedGroupOptions):
    """DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token mean, overlong shaping."""

    clip_high: float = Field(0.28, ge=0, description="The ratio is clipped above 1 + clip_high.")
    aggregation: str = Field("token_mean", description="How to aggregate token losses.")
    drop_zero_spread_groups: bool = Field(True, description="Exclude groups whose rewards are all equal.")
    dynamic_sampling: bool = Field(
        True,
        description="Draw further prompts until train.prompts_per_step groups have rewards that differ, at"
        " most rollout.max_refills times.",
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
    def _dapo_agrees(self) -> DAPOOptions:
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
        if self.overlong_buffer is None and self.overlong_length is not None:
            raise ValueError(
                f"overlong_length={self.overlong_length} bounds a penalty that is off: set overlong_buffer, or remove "
                "overlong_length"
            )
        buffer, longest = self.overlong_buffer, self.overlong_length
        if buffer is not None and longest is not None and buffer > longest:
            raise ValueError(
                f"overlong_buffer={buffer} is longer than overlong_length={longest}, so that every completion would "
                "be punished: lower it"
            )
        return self


class GSPOOptions(ClippedGroupOptions):
    """GSPO (arXiv 2507.18071): the clip is on the sequence's ratio, so its range is far smaller."""

    clip_low: float = Field(3e-4, ge=0, lt=1, description="The sequence's ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(4e-4, ge=0, description="The sequence's ratio is clipped above 1 + clip_high.")


class CISPOOptions(NormalisedOptions):
    """CISPO (arXiv 2506.13585): the weight is clipped, by default from above alone."""

    aggregation: str = Field("token_mean", description="How to aggregate token losses.")
    clip_low: float = Field(1.0, ge=0, le=1, description="The weight is at least 1 - clip_low; 1: no lower bound.")
    clip_high: float = Field(4.0, ge=0, description="The weight is at most 1 + clip_high.")


class GDPOOptions(ClippedGroupOptions):
    """GDPO (arXiv 2601.05242): each reward is normalised separately before they are added."""

    rewards: dict[str, float] = Field(
        default_factory=dict,
        min_length=1,
        validate_default=True,
        description="Component of the reward -> its weight, such as {correct: 1.0, format: 0.5}: parts of the role "
        "'reward' by their names, or components that a reward returns.",
    )
    whiten_over: Literal["sequence", "token"] = Field(
        "sequence",
        description="Unit over which the sum is normalised: the sequences of the step as in the paper, or its tokens"
        " (verl).",
    )

    @model_validator(mode="after")
    def _gdpo_agrees(self) -> GDPOOptions:
        if self.kl_placement == "reward":
            raise ValueError(
                "gdpo normalises each reward separately, which a KL in the reward (kl_placement=reward)"
                " does not allow: set kl_placement: loss"
            )
        return self
