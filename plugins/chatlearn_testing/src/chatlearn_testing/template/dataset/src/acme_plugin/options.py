"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the format."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """Options under a dataset's ``options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction: str = Field(
        "Answer with the letter of the right choice.", description="Text after the choices; may be empty."
    )
