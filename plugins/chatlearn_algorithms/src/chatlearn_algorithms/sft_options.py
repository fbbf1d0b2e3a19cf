"""Options of supervised fine-tuning."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SFTOptions(BaseModel):
    """Supervised fine-tuning on demonstrations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    aggregation: Literal["token_mean", "seq_mean_token_mean"] = Field(
        "token_mean", description="How token losses become one number: every token weighs the same, or every sequence."
    )
