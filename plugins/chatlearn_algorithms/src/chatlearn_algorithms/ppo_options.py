"""Options of PPO and of decoupled PPO."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from chatlearn_algorithms.policy_gradient_options import ClippedOptions, KLName
from chatlearn_algorithms.role_names import RolloutRoles


class PPORoles(RolloutRoles):
    """The roles of an algorithm with a critic."""

    critic: str = Field("critic", description="The role that learns values: kind trainer, head: value.")


class PPOOptions(ClippedOptions):
    """Proximal policy optimization (arXiv 1707.06347) of language models (arXiv 2203.02155)."""

    roles: PPORoles = Field(PPORoles(), description="Names of the roles in the configuration.")
    group_size: int = Field(1, ge=1, description="Number of completions sampled for each prompt.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount of later tokens' rewards.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Lambda of the generalised advantage estimation.")
    whiten_advantages: bool = Field(True, description="Normalise advantages over the tokens of the step.")
    kl_placement: Literal["loss", "reward"] = Field(
        "reward", description="Where the KL counts: in the loss, or token by token in the reward."
    )
    kl_estimator: KLName = Field("k1", description="How the KL to the reference is estimated from sampled tokens.")
    value_clip: float | None = Field(
        0.2, gt=0, description="Clip values to this distance from the values before the step; null: no clipping."
    )
    value_aggregation: str = Field("token_mean", description="How to aggregate the critic's token losses.")
    value_aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the critic's aggregation."
    )
    critic_warmup_steps: int = Field(
        0, ge=0, description="Number of steps at the start in which only the critic learns."
    )
    critic_epochs: int | None = Field(
        None, ge=1, description="The critic's passes over a step's samples; train.epochs by default."
    )
    critic_mini_batches: int | None = Field(
        None, ge=1, description="The critic's optimizer steps a pass; train.mini_batches by default."
    )

    @model_validator(mode="after")
    def _roles_differ(self) -> PPOOptions:
        if self.roles.critic in (self.roles.policy, self.roles.reference):
            raise ValueError(
                f"roles.critic={self.roles.critic} is also the policy or the reference, but a critic"
                " needs its own model and optimizer: name another role"
            )
        return self

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return (*super().required_roles, (self.roles.critic, "trainer"))


class DecoupledPPOOptions(PPOOptions):
    """Decoupled PPO (arXiv 2110.00641, 2505.24298): exp(proximal - generator) weights the loss."""

    importance_correction: Literal["none", "truncate", "mask", "mask_sequences"] = Field(
        "truncate",
        description="Correct for the gap between the proximal policy, whose logprobs the trainer computes when a step "
        "takes its samples, and the policy that sampled them.",
    )
    importance_threshold: float = Field(5.0, gt=0, description="Upper bound of the correction's weights; .inf: none.")

    @model_validator(mode="after")
    def _is_decoupled(self) -> DecoupledPPOOptions:
        if self.importance_correction == "none" or not self.recompute_old_logprobs:
            raise ValueError(
                f"importance_correction={self.importance_correction}, recompute_old_logprobs="
                f"{str(self.recompute_old_logprobs).lower()}: decoupled_ppo weights the loss by the ratio of"
                " the proximal policy to the sampling policy. Set importance_correction: truncate and"
                " recompute_old_logprobs: true, or "
                "algorithm.name: ppo"
            )
        return self
