"""The names that a configuration gives to the roles of an algorithm."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PolicyRole(BaseModel):
    """The one role of an algorithm that only learns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str = Field("trainer", description="The role that learns: of kind trainer.")


class RolloutRoles(PolicyRole):
    """The roles of an algorithm that samples and scores."""

    generator: str = Field("generator", description="The role that samples.")
    reward: str | None = Field(
        "reward", description="The role that scores; null where the environment's rollouts have rewards."
    )
    environment: str | None = Field(
        None, description="The role of kind environment that makes rollouts of several turns; null: one turn."
    )
    reference: str = Field("reference", description="The frozen role that a KL is measured to: of kind trainer.")
