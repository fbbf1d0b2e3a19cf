"""The options of ``acme``. Imports pydantic only."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class AcmeOptions(BaseModel):
    """Readers are chosen by suffix and built without options."""

    model_config = ConfigDict(extra="forbid", frozen=True)
