"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the generator."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """What a configuration may set under ``options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_length: int = Field(
        256, ge=2, description="Longest prompt and completion together, tokens, where the run sets no model.max_length."
    )
