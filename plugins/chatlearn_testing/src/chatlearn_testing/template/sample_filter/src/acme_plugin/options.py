"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the filter."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """Options under ``rollout.filters[].options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    factor: float = Field(4.0, gt=1, description="A completion longer than this many means is excluded.")
