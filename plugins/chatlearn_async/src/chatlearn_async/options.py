"""Options of the rollout modes. Imports pydantic only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DuringSync = Literal["continue", "abort", "pause", "wait"]
"""What becomes of unfinished completions at a weight sync.

``continue``: those of a replica that loads weights are aborted or paused, when its turn comes; all others go on.
``abort``: they end in the engine and resume from their tokens under the new weights. ``pause``: they stay in the
engine, which keeps or recomputes their KV cache. ``wait``: the sync waits until there are none.
"""


class OneStepOffOptions(BaseModel):
    """No options: a weight sync waits for the rollouts of the next step."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AsyncOptions(BaseModel):
    """What generators do at a weight sync, whether rollouts wait for each other, and the run that is repeated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    during_sync: Literal["auto", "continue", "abort", "pause", "wait"] = Field(
        "auto",
        description="Unfinished completions at a weight sync. continue: go on, except on the replicas whose turn it is "
        "to load (weight_sync.fleet_rule: rolling). abort: resume from their tokens. pause: stay in the engine. wait: "
        "end first. auto: the first of these that generator and fleet rule permit.",
    )
    turns: Literal["auto", "together", "free"] = Field(
        "auto",
        description="When an environment's rollouts go on with their next turn. free: at once; a slow tool delays its "
        "own rollout alone. together: when all rollouts of the step have asked for one, so that what the engine "
        "batches does not depend on tools. auto: together with max_staleness 0, else free.",
    )
    replay: str | None = Field(
        None,
        description="admissions.jsonl of another run, which this one repeats exactly: every completion goes on under "
        "new weights from the same token. Needs a generator that resumes completions; auto then chooses abort.",
    )


class RecordedOptions(BaseModel):
    """Where the rollouts are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: str = Field(description="output_dir of chatlearn run --rollouts-only.")
