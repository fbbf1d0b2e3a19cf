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
        if self.overlong_buffer is not None:
            raise ValueError(
                f"gdpo normalises each reward separately, which a penalty on their sum (overlong_buffer="
                f"{self.overlong_buffer}) does not allow: remove it, and name a reward of the length in rewards"
            )
        return self
