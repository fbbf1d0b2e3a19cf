"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the algorithm."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """Options under ``algorithm.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_size: int = Field(4, ge=2, description="Number of completions per prompt; each is compared with the others.")
