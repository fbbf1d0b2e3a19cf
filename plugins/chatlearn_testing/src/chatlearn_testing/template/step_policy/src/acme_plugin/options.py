"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the step policy."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """Options under ``train.step_policies[].options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int = Field(ge=1, description="Trained tokens after which the run ends.")
    metric: str = Field("perf/trained_tokens", description="Metric with the tokens of a step.")
