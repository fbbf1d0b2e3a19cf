"""The common part of all partial rollouts: a number of prompts stays in flight from step to step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from chatlearn_core.exceptions import BackendError, RoleLostError
from chatlearn_core.executor.rollouts.partial_rollout_step import PartialRolloutStep
from chatlearn_core.executor.rollouts.pending import Group, groups_of, num_samples, with_values
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.protocols import DataStore, PlainData
from chatlearn_core.types import Completion, GenerateRequest, Metric, Metrics

Generate = Callable[[GenerateRequest], Awaitable[Completion]]


class PromptsInFlight(ABC):
    """Begins a step with the pending prompts, and new ones replacing those that were trained on.

    Args:
        generate: sends a request.
        max_rounds: maximum number of steps of a completion, at least 1.
        in_flight_prompts: number of prompts that a step begins with.
        data: fetches values behind references in completions.
    """

    def __init__(
        self, generate: Generate, *, max_rounds: int, in_flight_prompts: int, data: DataStore | None = None
    ) -> None:
        self.data = data or PlainData()
        self.max_rounds = max_rounds
        self.in_flight_prompts = in_flight_prompts
        self._generate = generate

    def num_prompts(self, pending: Sequence[Group]) -> int:
        """See ``PartialRollouts``."""
        return max(0, self.in_flight_prompts - len(pending))

    def begin(self, pending: Sequence[Group], new: Sequence[RolloutRequest]) -> PartialRolloutStep:
        """See ``PartialRollouts``."""
        return PartialRolloutStep([*(group.copy() for group in pending), *groups_of(new)])

    async def play(self, rollout_step: PartialRolloutStep) -> None:
        """See ``PartialRollouts``."""
        await rollout_step.wanted.wait()
        try:
            await self._sample(rollout_step)
        except BaseException as error:
            # Raised as a group: a plain BackendError would exclude the waiting samples, which are also pending.
            if isinstance(error, BackendError) and not isinstance(error, RoleLostError):
                rollout_step.end(ExceptionGroup("rollouts", [error]))
            else:
                rollout_step.end(error)
            if not isinstance(error, Exception):
                raise
        else:
            rollout_step.end()

    @abstractmethod
    async def _sample(self, rollout_step: PartialRolloutStep) -> None:
        """Sample until enough groups are complete, at least one."""

    async def _pending(
        self, rollout_step: PartialRolloutStep, num_unfinished: int
    ) -> tuple[tuple[Group, ...], Metrics]:
        """The return value of ``finish``.

        Args:
            rollout_step: the ended step.
            num_unfinished: number of completions that continue.
        """
        unfinished = rollout_step.unfinished
        metrics: Metrics = {
            "rollout/rounds": Metric(rollout_step.num_rounds, reducer="sum"),
            "rollout/prompts": Metric(len(rollout_step.complete), reducer="sum"),
            "rollout/unfinished": Metric(num_unfinished, reducer="sum"),
            "rollout/pending": Metric(num_samples(unfinished), reducer="sum"),
        }
        return await with_values(unfinished, self.data), metrics
