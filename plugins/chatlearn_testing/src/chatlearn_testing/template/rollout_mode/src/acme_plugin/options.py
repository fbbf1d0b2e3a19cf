"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the mode."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """Options under ``rollout.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first_steps: int = Field(
        0, ge=0, description="Steps at the beginning that wait for their own rollouts, while the policy changes most."
    )
