"""The arguments of ``trainer.acme``. Imports pydantic only: flows are checked without loading torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeArguments(BaseModel):
    """Arguments of a call, besides samples and ``name``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    temperature: float | None = Field(
        None, gt=0, description="Divides the logits; by default the sampling.temperature of the run."
    )
