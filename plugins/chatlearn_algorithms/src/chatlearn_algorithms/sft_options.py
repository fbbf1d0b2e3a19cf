"""Options of supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from chatlearn_algorithms.role_names import PolicyRole


class SFTOptions(BaseModel):
    """Supervised fine-tuning on demonstrations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    roles: PolicyRole = Field(PolicyRole(), description="Name of the role in the configuration.")
    aggregation: str = Field(
        "token_mean", description="How to aggregate token losses: with equal weights of tokens, or of sequences."
    )
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of an aggregation that a plugin adds."
    )

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return ((self.roles.policy, "trainer"),)
