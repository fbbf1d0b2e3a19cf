"""The options of ``acme``. Imports pydantic only: configurations are checked without loading torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """Options under ``aggregation_options`` of an algorithm."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    power: float = Field(
        0.5, ge=0, le=1, description="0: every sequence weighs the same; 1: every token weighs the same."
    )
