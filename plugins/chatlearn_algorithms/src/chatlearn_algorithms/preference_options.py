"""Options of the algorithms that learn from preferences."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from chatlearn_algorithms.role_names import PolicyRole, RolloutRoles

Pairing = Literal["all", "best_worst"]


class ReferenceRoles(PolicyRole):
    """The roles of an algorithm that measures from a frozen model."""

    reference: str = Field("reference", description="The frozen role that the policy is measured from: a trainer.")


class PairOptions(BaseModel):
    """What all algorithms that compare completions share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pairing: Pairing = Field(
        "all",
        description="Which completions of a prompt are compared, where there are more than two: every one with every "
        "worse one, or the best with the worst. A prompt weighs the same, however many pairs it gives.",
    )
    roles: PolicyRole = Field(PolicyRole(), description="What the role is called, if not as by default.")

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return ((self.roles.policy, "trainer"),)


class ReferencedPairOptions(PairOptions):
    """Those of them that need a reference."""

    cache_reference: bool = Field(
        True,
        description="Compute the logprobs of the reference once, before the run, and keep them on disk, so that "
        "no reference model stays in memory. False for a reference that follows the policy (refresh).",
    )
    roles: ReferenceRoles = Field(ReferenceRoles(), description="What the roles are called, if not as by default.")

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return ((self.roles.policy, "trainer"), (self.roles.reference, "trainer"))


class DPOOptions(ReferencedPairOptions):
    """Direct preference optimization (arXiv 2305.18290)."""

    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs that are labelled the wrong way round (conservative DPO)."
    )
    sft_coef: float = Field(
        0.0, ge=0, description="Weight of the negative logprob of chosen completions, a mean over their tokens."
    )


class IPOOptions(ReferencedPairOptions):
    """Identity preference optimization (arXiv 2310.12036)."""

    beta: float = Field(0.1, gt=0, description="The difference to the reference that is aimed at is 1/(2 beta).")
    token_means: bool = Field(
        False, description="Compare means over tokens (TRL, AReaL) in place of sums (the paper, OpenRLHF)."
    )


class SimPOOptions(PairOptions):
    """Simple preference optimization (arXiv 2405.14734)."""

    beta: float = Field(2.0, gt=0, description="Scale of the mean logprobs.")
    gamma: float = Field(1.0, ge=0, description="By how much the chosen completion should be ahead, after scaling.")


class ORPOOptions(PairOptions):
    """Odds ratio preference optimization (arXiv 2403.07691)."""

    odds_ratio_coef: float = Field(0.1, gt=0, description="Weight of the odds ratio beside the likelihood: lambda.")


class RewardModelOptions(PairOptions):
    """Reward-model training (arXiv 2203.02155)."""

    margin_coef: float = Field(
        0.0,
        ge=0,
        description="The chosen completion should be ahead by so much times the difference of the two ranks (scores, "
        "where the dataset's options name columns with them); 0: no margin.",
    )
    centring_coef: float = Field(0.0, ge=0, description="Weight of the squared sum of a pair's scores.")


class KTOOptions(BaseModel):
    """Kahneman-Tversky optimization (arXiv 2402.01306)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference.")
    desirable_weight: float = Field(1.0, gt=0, description="Weight of good completions.")
    undesirable_weight: float = Field(1.0, gt=0, description="Weight of bad completions.")
    reference_point: Literal["mismatched", "zero"] = Field(
        "mismatched",
        description="What completions are measured from: the KL to the reference, estimated from each prompt with the "
        "completion of another one, or 0, which saves two forward passes.",
    )
    cache_reference: bool = Field(
        True,
        description="With reference_point: zero, compute the logprobs of the reference once, before the run, and keep "
        "them on disk, so that no reference model stays in memory. Mismatched pairs need it in every step.",
    )
    roles: ReferenceRoles = Field(ReferenceRoles(), description="What the roles are called, if not as by default.")

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return ((self.roles.policy, "trainer"), (self.roles.reference, "trainer"))


class OnlineDPOOptions(BaseModel):
    """Online DPO (arXiv 2402.04792)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(2, ge=2, description="Completions sampled for one prompt.")
    loss: Literal["dpo", "ipo"] = Field("dpo", description="Of the pairs.")
    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs that the reward ranks the wrong way round; for the loss dpo."
    )
    pairing: Pairing = Field(
        "best_worst", description="Which completions of a prompt are compared: the best with the worst, or all."
    )
    roles: RolloutRoles = Field(RolloutRoles(), description="What the roles are called, if not as by default.")

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

    group_size: int = Field(8, ge=2, description="Completions sampled for one prompt.")
    keep: int = Field(1, ge=1, description="How many of them are imitated: those with the highest rewards.")
    min_reward: float | None = Field(None, description="What a completion must score at least to be imitated.")
    aggregation: str = Field("token_mean", description="How token losses become one number.")
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of an aggregation that a plugin adds."
    )
    roles: RolloutRoles = Field(RolloutRoles(), description="What the roles are called, if not as by default.")

    @model_validator(mode="after")
    def _settings_agree(self) -> RejectionSamplingOptions:
        check_rewarded(self.roles)
        if self.keep >= self.group_size:
            raise ValueError(f"keep={self.keep} rejects nothing of group_size={self.group_size}: set it lower")
        return self

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return rollout_roles(self.roles)


def check_rewarded(roles: RolloutRoles) -> None:
    """Raises ValueError: neither a reward nor an environment scores completions."""
    if roles.reward is None and roles.environment is None:
        raise ValueError("roles.reward=null needs an environment that gives rewards: set roles.environment")


def rollout_roles(roles: RolloutRoles) -> tuple[tuple[str, str], ...]:
    """(name, kind) of the roles that sample, score and learn."""
    environment = roles.environment  # which says itself what generators it uses
    needed = [(roles.generator, "generator") if environment is None else (environment, "environment")]
    needed += [(roles.policy, "trainer")]
    needed += [(roles.reward, "reward")] if roles.reward is not None else []
    return tuple(needed)
