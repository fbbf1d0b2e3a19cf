"""Options of the aggregations of this distribution."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class NoAggregationOptions(BaseModel):
    """Options of an aggregation that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ConstantLengthOptions(NoAggregationOptions):
    """Sums over a constant length (Dr.GRPO, arXiv 2503.20783)."""

    constant_length: int = Field(ge=1, description="Number of tokens by which every sequence's sum is divided.")
