"""What a configuration may set of any runtime over worker processes; a runtime's own options extend it."""

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
        description="Threads of torch's CPU operations in every worker; OMP_NUM_THREADS or a worker's CPUs if null.",
    )
    start_timeout_s: Seconds = Field(600.0, description="Longest time until a worker's process is up.")
    heartbeat_timeout_s: Seconds = Field(
        60.0,
        description="How long a worker's process may not answer until it is killed and treated as dead. It answers "
        "while it computes, unless C code holds Python's lock.",
    )
    max_generator_restarts: Count = Field(2, description="How often in a run each dead generator replica is rebuilt.")
    max_reward_restarts: Count = Field(2, description="How often in a run each dead reward worker is rebuilt.")
    max_environment_restarts: Count = Field(
        2, description="How often in a run each dead environment worker is rebuilt."
    )
    max_trainer_restarts: Count = Field(
        1, description="How often in a run a trainer that lost a rank is rebuilt and goes on from the last checkpoint."
    )
