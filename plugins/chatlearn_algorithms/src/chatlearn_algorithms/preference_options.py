"""Options of the algorithms that learn from preferences."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chatlearn_algorithms.role_names import PolicyRole, RolloutRoles

Pairing = Literal["all", "best_worst"]


class ReferenceRoles(PolicyRole):
    """The roles of an algorithm with a frozen reference."""

    reference: str = Field("reference", description="The frozen role to which the policy is compared: kind trainer.")


class PairOptions(BaseModel):
    """Options of all algorithms that compare completions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pairing: Pairing = Field(
        "all",
        description="Which completions of a prompt with more than two are compared: every one with every worse"
        " one, or the best with the worst. All prompts have the same weight, whatever their number of pairs.",
    )
    roles: PolicyRole = Field(PolicyRole(), description="Name of the role in the configuration.")

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return ((self.roles.policy, "trainer"),)


class ReferencedPairOptions(PairOptions):
    """Options of the algorithms that compare completions and need a reference."""

    cache_reference: bool = Field(
        True,
        description="Compute the logprobs of the reference once, before the run, and keep them on disk, so that "
        "no reference model stays in memory. False for a reference that follows the policy (refresh).",
    )
    roles: ReferenceRoles = Field(ReferenceRoles(), description="Names of the roles in the configuration.")

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return ((self.roles.policy, "trainer"), (self.roles.reference, "trainer"))


class DPOOptions(ReferencedPairOptions):
    """Direct preference optimization (arXiv 2305.18290)."""

    beta: float = Field(0.1, gt=0, description="How strongly the policy is kept near the reference.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Fraction of pairs whose labels are assumed to be swapped (conservative DPO)."
    )
    sft_coef: float = Field(
        0.0, ge=0, description="Weight of the negative logprob of chosen completions, a mean over their tokens."
    )


class IPOOptions(ReferencedPairOptions):
    """Identity preference optimization (arXiv 2310.12036)."""

    beta: float = Field(0.1, gt=0, description="The target of the difference to the reference is 1/(2 beta).")
    token_means: bool = Field(
        False, description="Compare means over tokens (TRL, AReaL) in place of sums (the paper, OpenRLHF)."
    )


class SimPOOptions(PairOptions):
    """Simple preference optimization (arXiv 2405.14734)."""

    beta: float = Field(2.0, gt=0, description="Scale of the mean logprobs.")
    gamma: float = Field(1.0, ge=0, description="Target margin of the chosen completion, after scaling.")


class ORPOOptions(PairOptions):
    """Odds ratio preference optimization (arXiv 2403.07691)."""

    odds_ratio_coef: float = Field(
        0.1, gt=0, description="Weight of the odds ratio relative to the likelihood (lambda)."
    )


class RewardModelOptions(PairOptions):
    """Reward-model training (arXiv 2203.02155)."""

    margin_coef: float = Field(
        0.0,
        ge=0,
        description="Target margin of the chosen completion: this number times the difference of the two ranks"
        " (scores, where the dataset's options name columns with them); 0: no margin.",
    )
    centring_coef: float = Field(0.0, ge=0, description="Weight of the squared sum of a pair's scores.")


class KTOOptions(BaseModel):
    """Kahneman-Tversky optimization (arXiv 2402.01306)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    beta: float = Field(0.1, gt=0, description="How strongly the policy is kept near the reference.")
    desirable_weight: float = Field(1.0, gt=0, description="Weight of good completions.")
    undesirable_weight: float = Field(1.0, gt=0, description="Weight of bad completions.")
    reference_point: Literal["mismatched", "zero"] = Field(
        "mismatched",
        description="Number to which completions are compared: the KL to the reference, estimated from prompts"
        " with completions of other prompts, or 0, which saves two forward passes.",
    )
    cache_reference: bool = Field(
        True,
        description="Compute the logprobs of the reference, those of mismatched pairs too, before the run, and keep "
        "them on disk, so that no reference model stays in memory.",
    )
    roles: ReferenceRoles = Field(ReferenceRoles(), description="Names of the roles in the configuration.")

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return ((self.roles.policy, "trainer"), (self.roles.reference, "trainer"))


class OnlineDPOOptions(BaseModel):
    """Online DPO (arXiv 2402.04792)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(2, ge=2, description="Number of completions sampled for each prompt.")
    loss: Literal["dpo", "ipo"] = Field("dpo", description="Of the pairs.")
    beta: float = Field(0.1, gt=0, description="How strongly the policy is kept near the reference.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="For the loss dpo: fraction of pairs whose order is assumed to be wrong."
    )
    pairing: Pairing = Field(
        "best_worst", description="Which completions of a prompt are compared: the best with the worst, or all."
    )
    roles: RolloutRoles = Field(RolloutRoles(), description="Names of the roles in the configuration.")

    @model_validator(mode="after")
    def _settings_agree(self) -> OnlineDPOOptions:
        check_rewarded(self.roles)
        if self.label_smoothing and self.loss == "ipo":
            raise ValueError(f"label_smoothing={self.label_smoothing} has no meaning for loss=ipo: remove it")
        return self

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return (*rollout_roles(self.roles), (self.roles.reference, "trainer"))


class RejectionSamplingOptions(BaseModel):
    """Rejection sampling (arXiv 2304.06767)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(8, ge=2, description="Number of completions sampled for each prompt.")
    keep: int = Field(
        1, ge=1, description="Number of completions of a group to imitate: those with the highest rewards."
    )
    min_reward: float | None = Field(None, description="Lowest reward of a completion that is imitated.")
    aggregation: str = Field("token_mean", description="How to aggregate token losses.")
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of an aggregation that a plugin adds."
    )
    roles: RolloutRoles = Field(RolloutRoles(), description="Names of the roles in the configuration.")

    @model_validator(mode="after")
    def _settings_agree(self) -> RejectionSamplingOptions:
        check_rewarded(self.roles)
        if self.keep >= self.group_size:
            raise ValueError(f"keep={self.keep} keeps all completions of group_size={self.group_size}: set keep lower")
        return self

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return rollout_roles(self.roles)


def check_rewarded(roles: RolloutRoles) -> None:
    """Check that completions are scored. Raises: ValueError: there is neither a reward nor an environment."""
    if roles.reward is None and roles.environment is None:
        raise ValueError("roles.reward=null needs an environment that gives rewards: set roles.environment")


def rollout_roles(roles: RolloutRoles) -> tuple[tuple[str, str], ...]:
    """(name, kind) of the roles that sample, score and learn."""
    environment = roles.environment  # the environment names the generators that it uses
    needed = [(roles.generator, "generator") if environment is None else (environment, "environment")]
    needed += [(roles.policy, "trainer")]
    needed += [(roles.reward, "reward")] if roles.reward is not None else []
    return tuple(needed)
