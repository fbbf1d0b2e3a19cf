"""Options of the sample filters, schedules and step policies of this distribution."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TruncatedOptions(BaseModel):
    """Options of the filter ``truncated``: none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LinearOptions(BaseModel):
    """From one value to another along a straight line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: float = Field(description="Value up to and including step first_step.")
    end: float = Field(description="Value from step last_step on.")
    first_step: int = Field(1, ge=1, description="Where the line begins.")
    last_step: int = Field(ge=2, description="Where it ends.")

    @model_validator(mode="after")
    def _has_a_length(self) -> LinearOptions:
        if self.last_step <= self.first_step:
            raise ValueError(f"last_step={self.last_step} must be after first_step={self.first_step}")
        return self


class EarlyStopOptions(BaseModel):
    """Ends a run whose metric does not improve any more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field("eval/accuracy", description="Name in metrics.jsonl. Steps without it are passed over.")
    mode: Literal["max", "min"] = Field("max", description="Whether larger or smaller is better.")
    patience: int = Field(3, ge=1, description="Measurements in a row without improvement that end the run.")
    min_improvement: float = Field(0.0, ge=0, description="What a measurement must be better by than the best before.")
    goal: float | None = Field(None, description="A value that ends the run as soon as it is reached.")
