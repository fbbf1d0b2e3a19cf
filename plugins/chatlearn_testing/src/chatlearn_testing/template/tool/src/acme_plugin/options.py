"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the tool."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """Options of an entry of ``tools`` with ``kind: acme``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(description="Text file in UTF-8.")
    name: str = Field("find_lines", description="Name of the tool for the model.")
    max_lines: int = Field(5, ge=1, description="Lines of one answer.")
