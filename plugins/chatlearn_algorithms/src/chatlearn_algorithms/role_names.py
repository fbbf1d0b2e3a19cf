"""The names that a configuration gives to the roles of an algorithm."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PolicyRole(BaseModel):
    """The only role of an algorithm that does not sample."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str = Field("trainer", description="The role that learns: kind trainer.")


class RolloutRoles(PolicyRole):
    """The roles of an algorithm that samples and scores."""

    generator: str = Field("generator", description="The generator that samples.")
    reward: str | None = Field(
        "reward", description="The role that scores; null if the environment's rollouts have rewards."
    )
    environment: str | None = Field(
        None, description="The role of kind environment that makes multi-turn rollouts; null: a single turn."
    )
    reference: str = Field("reference", description="The frozen role to which a KL is measured: kind trainer.")
