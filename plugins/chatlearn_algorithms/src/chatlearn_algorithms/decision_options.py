"""Options of the sample filters, schedules and step policies of this distribution."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TruncatedOptions(BaseModel):
    """Options of the filter ``truncated``: none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LinearOptions(BaseModel):
    """Options of a linear schedule."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: float = Field(description="Value up to and including step first_step.")
    end: float = Field(description="Value from step last_step on.")
    first_step: int = Field(1, ge=1, description="Step at which the line begins.")
    last_step: int = Field(ge=2, description="Where it ends.")

    @model_validator(mode="after")
    def _has_a_length(self) -> LinearOptions:
        if self.last_step <= self.first_step:
            raise ValueError(f"last_step={self.last_step} must be after first_step={self.first_step}")
        return self


class EarlyStopOptions(BaseModel):
    """Options of the step policy that ends a run whose metric no longer improves."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field("eval/accuracy", description="Name in metrics.jsonl. Steps without this metric are skipped.")
    mode: Literal["max", "min"] = Field("max", description="Whether larger or smaller values are better.")
    patience: int = Field(
        3, ge=1, description="Number of consecutive measurements without an improvement after which the run ends."
    )
    min_improvement: float = Field(
        0.0, ge=0, description="Smallest difference from the best earlier value that counts as an improvement."
    )
    goal: float | None = Field(None, description="Value at which the run ends at once.")
