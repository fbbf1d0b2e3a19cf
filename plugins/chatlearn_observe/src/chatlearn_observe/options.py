"""Options of the loggers, under ``log.loggers[].options``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorBoardOptions(_Options):
    """Options of the logger ``tensorboard``."""

    directory: str | None = Field(
        None, description="Directory of the event files; by default tensorboard/ in the run directory."
    )
    flush_s: float = Field(30.0, gt=0, description="Longest time in seconds until a step becomes visible.")


class WandbOptions(_Options):
    """Options of the logger ``wandb``; for None, wandb uses its own environment variables."""

    project: str = Field("chatlearn", min_length=1, description="wandb project of the run.")
    entity: str | None = Field(None, description="User or team.")
    name: str | None = Field(None, description="Displayed name; the run's name by default.")
    group: str | None = Field(None, description="Runs of one group are shown together.")
    job_type: str | None = Field(None, description="Kind of the run within its group.")
    tags: list[str] = Field(default_factory=list, description="Tags for searching.")
    notes: str | None = Field(None, description="Description of the run.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="offline: write to the run directory, upload later with `wandb sync`."
    )
    id: str | None = Field(
        None,
        description="wandb's id of the run; by default stored in the run directory, so that a resume continues it.",
    )
