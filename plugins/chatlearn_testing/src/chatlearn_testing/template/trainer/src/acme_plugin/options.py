"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the trainer."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """What a configuration may set under ``options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    learning_rate: float = Field(1e-2, gt=0, description="Of AdamW; constant.")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW.")
    grad_clip: float | None = Field(1.0, gt=0, description="Largest gradient norm; null: no clipping.")
    max_tokens_per_micro_batch: int = Field(16384, ge=1, description="Token budget of one forward pass.")
