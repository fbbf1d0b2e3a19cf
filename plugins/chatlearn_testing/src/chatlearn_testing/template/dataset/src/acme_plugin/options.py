"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the format."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """What a configuration may set under a dataset's ``options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction: str = Field(
        "Answer with the letter of the right choice.", description="Put after the choices; may be empty."
    )
