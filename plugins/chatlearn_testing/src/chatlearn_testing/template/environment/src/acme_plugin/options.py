"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the environment."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """Options under ``roles.<role>.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_guesses: int = Field(8, ge=1, description="Guesses that a rollout may have.")
    missed: float = Field(0.0, description="Reward of a rollout that did not find the number.")
