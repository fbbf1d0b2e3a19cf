"""The base of rewards that run in worker processes: owns their pool, and converts outcomes to results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import RewardResult
from chatlearn_rewards.options import PoolOptions
from chatlearn_rewards.process_pool import Outcome, ProcessPool, Task
from chatlearn_rewards.reward_role import RewardRole


class PooledReward(RewardRole):
    """Owns a process pool from ``setup`` to ``close``; a subclass defines the task of its workers."""

    def __init__(self, name: str, task: Task, options: PoolOptions, context: RoleContext) -> None:
        self._pool = ProcessPool(
            task,
            name=f"reward {name!r} of role {context.role!r}",
            timeout_s=options.timeout_s,
            num_workers=options.num_workers,
            memory_mb=options.worker_memory_mb,
        )

    def setup(self) -> None:
        """Start the workers.

        Raises:
            ConfigError: the options name no task that can run.
            BackendError: no worker starts.
        """
        self._pool.start()

    def health(self) -> str | None:
        return self._pool.health()

    def close(self) -> None:
        self._pool.close()


def result_from_outcome(outcome: Outcome) -> RewardResult:
    """Convert a worker's ``{"value", "components"}`` or ``{"error"}``, or the failure of the worker, to a result."""
    if outcome.error is not None:
        return RewardResult(None, error=outcome.error)
    verdict: Mapping[str, Any] = outcome.value
    if "error" in verdict:
        return RewardResult(None, error=verdict["error"])
    return RewardResult(verdict["value"], dict(verdict.get("components", {})), answer=verdict.get("answer"))
