"""The options of ``acme``. Imports pydantic only: configurations are checked without loading the logger."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    """Options under ``log.loggers[].options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("localhost", description="Host of the StatsD server.")
    port: int = Field(8125, ge=1, le=65535, description="UDP port of the StatsD server.")
    prefix: str = Field("chatlearn", pattern=r"^[A-Za-z0-9_.-]+$", description="First part of every gauge's name.")
