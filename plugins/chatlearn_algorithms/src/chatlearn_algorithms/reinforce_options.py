"""Options of the algorithms based on REINFORCE: RLOO, REINFORCE++ and its baseline form, and MaxRL."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from chatlearn_algorithms.policy_gradient_options import ClippedOptions, GroupOptions, KLName


class RLOOOptions(GroupOptions, ClippedOptions):
    """REINFORCE leave-one-out (arXiv 2402.14740)."""

    aggregation: str = Field("seq_mean_token_sum", description="How to aggregate token losses.")
    kl_placement: Literal["loss", "reward"] = Field(
        "reward", description="Where the KL counts: in the loss, or in the reward as in the paper."
    )
    kl_estimator: KLName = Field("k1", description="How the KL to the reference is estimated from sampled tokens.")


class ReinforcePPOptions(ClippedOptions):
    """REINFORCE++ (arXiv 2501.03262)."""

    group_size: int = Field(1, ge=1, description="Number of completions sampled for each prompt.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount of later tokens' rewards.")
    kl_placement: Literal["loss", "reward"] = Field(
        "reward", description="Where the KL counts: in the loss, or in the reward as in the paper."
    )
    kl_estimator: KLName = Field("k1", description="How the KL to the reference is estimated from sampled tokens.")


class ReinforcePPBaselineOptions(GroupOptions, ClippedOptions):
    """REINFORCE++ with the group's mean as baseline (arXiv 2501.03262)."""

    gamma: float = Field(1.0, ge=0, le=1, description="Discount of later tokens' rewards.")
    kl_estimator: KLName = Field("k2", description="How the KL to the reference is estimated from sampled tokens.")


class MaxRLOptions(GroupOptions, ClippedOptions):
    """Maximum-likelihood reinforcement learning (arXiv 2602.02710)."""

    @model_validator(mode="after")
    def _maxrl_agrees(self) -> MaxRLOptions:
        if self.kl_placement == "reward":
            raise ValueError(
                "maxrl divides by the mean reward, which a KL in the reward (kl_placement=reward) can make 0 or "
                "negative: set kl_placement: loss"
            )
        if self.overlong_buffer is not None:
            raise ValueError(
                f"maxrl divides by the mean reward, which a penalty on length (overlong_buffer={self.overlong_buffer}) "
                "can make 0 or negative: remove it, or choose another algorithm"
            )
        return self
