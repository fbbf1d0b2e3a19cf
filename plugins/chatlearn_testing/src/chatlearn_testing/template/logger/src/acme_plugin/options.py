"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the logger."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """What a configuration may set under ``options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("localhost", description="Where the StatsD server listens.")
    port: int = Field(8125, ge=1, le=65535, description="Its UDP port.")
    prefix: str = Field("chatlearn", pattern=r"^[A-Za-z0-9_.-]+$", description="First part of every gauge's name.")
