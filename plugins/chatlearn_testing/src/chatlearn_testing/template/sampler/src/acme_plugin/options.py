"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the sampler."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """Options under ``data.sampler.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    solved_at: float = Field(1.0, description="A prompt is solved if all of its samples have this reward or more.")
    rest_passes: int = Field(1, ge=1, description="Passes over its dataset for which a solved prompt is left out.")
