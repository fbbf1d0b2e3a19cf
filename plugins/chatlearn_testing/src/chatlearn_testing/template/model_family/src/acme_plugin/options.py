"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the family."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class AcmeOptions(BaseModel):
    """No options: a model directory describes itself. A run builds every family with the defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)
