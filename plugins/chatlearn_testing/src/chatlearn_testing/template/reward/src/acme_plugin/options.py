"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the reward."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """What a configuration may set under ``options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keywords: tuple[str, ...] = Field(
        (), description="What a completion should mention; if empty, the ground truth of each prompt is taken."
    )
    length_budget: int = Field(256, ge=1, description="Tokens that cost nothing.")
    length_penalty: float = Field(0.001, ge=0, description="Cost of each token beyond the budget.")
