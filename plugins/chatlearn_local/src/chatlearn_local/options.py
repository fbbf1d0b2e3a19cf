"""Options of the local runtime."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class LocalRuntimeOptions(BaseModel):
    """Everything in one process; trainers compute in threads of their own, generators and rewards on the event loop."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_generator_restarts: Annotated[int, Field(ge=0)] = Field(
        2, description="How often in a run each dead generator replica is rebuilt before the run stops."
    )
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Threads of torch's CPU operations; by default as many as there are cores."
    )
