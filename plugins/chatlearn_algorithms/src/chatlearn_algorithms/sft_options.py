"""Options of supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from chatlearn_algorithms.role_names import PolicyRole


class SFTOptions(BaseModel):
    """Supervised fine-tuning on demonstrations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    roles: PolicyRole = Field(PolicyRole(), description="What the role is called, if not as by default.")
    aggregation: str = Field(
        "token_mean", description="How token losses become one number: every token weighs the same, or every sequence."
    )
    aggregation_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of an aggregation that a plugin adds."
    )

    @property
    def required_roles(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the roles that a configuration must define."""
        return ((self.roles.policy, "trainer"),)
