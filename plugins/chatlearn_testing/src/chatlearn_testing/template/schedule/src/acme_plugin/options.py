"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the schedule."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class AcmeOptions(BaseModel):
    """Options under ``schedules[].options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start: float = Field(description="Value up to and including step first_step.")
    end: float = Field(description="Value from step last_step on.")
    first_step: int = Field(1, ge=1, description="Step at which the value begins to change.")
    last_step: int = Field(ge=2, description="Step at which it has reached its end.")

    @model_validator(mode="after")
    def _has_a_length(self) -> AcmeOptions:
        if self.last_step <= self.first_step:
            raise ValueError(f"last_step={self.last_step} must be after first_step={self.first_step}")
        return self
