"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the producer."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class AcmeOptions(BaseModel):
    """Options under ``rollout.options``: none, because ``rollout.max_staleness`` is the number of steps ahead."""

    model_config = ConfigDict(extra="forbid", frozen=True)
