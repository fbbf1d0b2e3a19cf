"""Options of every runtime over worker processes; each runtime's own options extend them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkersOptions(Section):
    """How workers are started, watched and rebuilt."""

    environment: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of every worker; secrets as ${oc.env:NAME}."
    )
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None,
        description="Threads of torch's CPU operations per worker; if null, OMP_NUM_THREADS or the worker's CPUs.",
    )
    start_timeout_s: Seconds = Field(600.0, description="Timeout for starting a worker's process.")
    heartbeat_timeout_s: Seconds = Field(
        60.0,
        description="A worker's process that does not answer for this long is killed and treated as dead. It answers "
        "while it computes, unless C code holds Python's lock.",
    )
    max_generator_restarts: Count = Field(2, description="How often in a run each dead generator replica is rebuilt.")
    max_reward_restarts: Count = Field(2, description="How often in a run each dead reward worker is rebuilt.")
    max_environment_restarts: Count = Field(
        2, description="How often in a run each dead environment worker is rebuilt."
    )
    max_trainer_restarts: Count = Field(
        1, description="How often in a run a trainer that lost a rank is rebuilt to resume from the last checkpoint."
    )
