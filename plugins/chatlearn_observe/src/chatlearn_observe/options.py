"""Options of the loggers, as they stand under ``log.loggers[].options``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorBoardOptions(_Options):
    """Options of the logger ``tensorboard``."""

    directory: str | None = Field(
        None, description="Where event files go; the run directory's tensorboard/ by default."
    )
    flush_s: float = Field(30.0, gt=0, description="Longest time before a step can be seen, seconds.")


class WandbOptions(_Options):
    """Options of the logger ``wandb``; what is None is left to wandb's own environment variables."""

    project: str = Field("chatlearn", min_length=1, description="Where wandb files the run.")
    entity: str | None = Field(None, description="User or team.")
    name: str | None = Field(None, description="Shown name; the run's name by default.")
    group: str | None = Field(None, description="Runs of one group are shown together.")
    job_type: str | None = Field(None, description="What this run is within its group.")
    tags: list[str] = Field(default_factory=list, description="Words to find the run by.")
    notes: str | None = Field(None, description="Text beside the run.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="offline: write to the run directory, upload later with `wandb sync`."
    )
    id: str | None = Field(
        None, description="wandb's id of the run; kept in the run directory, so that a resumed run goes on in the same."
    )
