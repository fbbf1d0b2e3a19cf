"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the transport."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """What a configuration may set under ``weight_sync.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    poll_interval_s: float = Field(0.01, gt=0, le=1, description="How often a receiver looks for the next file.")
